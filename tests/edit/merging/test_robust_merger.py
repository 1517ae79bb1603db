"""A fragment merged by a robust rule: verdicts, weights, rollbacks, shards, what is kept, and what the settings refuse."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from edit import reference
from edit.codecs.base import PIECE
from edit.config.robust import RobustConfig
from edit.config.run import OuterConfig, PenaltyConfig, RoundsConfig, RunConfig
from edit.errors import ConfigError, LocalProtocolError, StorageError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.merging.merge import Measured, MergeRule, ShardPayload, decoded, measure, pieces
from edit.merging.mergers import merger
from edit.merging.norms import whole_norm
from edit.merging.outer_state import OuterState
from edit.merging.robust import Combination
from edit.merging.robust_merger import Gathered, RobustMerger
from edit.records import Verdict
from tests.support.encoded import encode

NUMEL = 500
FRAGMENT = FragmentSpec(fragment_id=0, name="f", tensors=(TensorSpec(name="t", shape=(NUMEL // 10, 10)),))
BUFFERS = FragmentSpec(fragment_id=0, name="b", tensors=(TensorSpec(name="t", shape=(4,)),), buffers=True)
OFF = PenaltyConfig(enabled=False)


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, NUMEL, generator=torch.Generator().manual_seed(seed))


def contribution(delta: Tensor, peer_id: str, staleness: int = 0) -> Measured:
    payload = encode("fp32", delta)
    return Measured(peer_id, 1, 1, measure(payload), payload, staleness)


def contributions(deltas: Tensor) -> list[Measured]:
    return [contribution(delta, chr(ord("a") + i)) for i, delta in enumerate(deltas)]


def by(rule: str, hostile: int = 1, penalty: PenaltyConfig = OFF, **more: Any) -> RobustMerger:
    return RobustMerger(penalty, RobustConfig(rule=rule, hostile=0 if rule == "clip" else hostile, **more))


def verdicts(merged: Any) -> dict[str, Verdict]:
    return {each.peer_id: each.verdict for each in merged.verdicts}


def test_the_recommended_rule_is_the_oracles_and_the_order_changes_no_bit() -> None:
    deltas = rows(7) * torch.linspace(1, 2, 7)[:, None]
    merge = by("geometric_median", 2).merge
    found = merge(FRAGMENT, contributions(deltas), {}, MergeRule())
    mixing = reference.nearest_neighbour_mixing(reference.equalised(deltas), 2)
    assert found.merged is not None and torch.allclose(found.merged, reference.geometric_median(mixing), atol=1e-5)
    again = merge(FRAGMENT, contributions(deltas)[::-1], {}, MergeRule())
    assert again.merged is not None and torch.equal(found.merged, again.merged) and again.verdicts == found.verdicts
    assert math.isclose(math.fsum(each.weight for each in found.verdicts), 1)


@pytest.mark.parametrize("rule", ["geometric_median", "centered_clip", "multi_krum", "median", "trimmed_mean"])
def test_reversed_contributions_do_not_turn_the_merge_around(rule: str) -> None:
    direction = rows(1, seed=5)
    honest, hostile = direction + 0.5 * rows(7), -3 * direction + 0.3 * rows(2, seed=8)
    sent, middle = torch.cat([hostile, honest]), honest.mean(dim=0)
    found = by(rule, 2).merge(FRAGMENT, contributions(sent), {}, MergeRule())
    assert found.merged is not None
    assert (found.merged - middle).norm() < 0.4 * (sent.mean(dim=0) - middle).norm()


def test_who_is_left_out_is_an_outlier_and_what_is_not_finite_is_said_as_ever() -> None:
    deltas = torch.cat([10 * rows(1, seed=1), rows(5, seed=2)])
    broken = contribution(torch.full((NUMEL,), math.nan), "z")
    found = by("multi_krum", mixing="none", equalise=False).merge(FRAGMENT, [*contributions(deltas), broken], {}, MergeRule())
    assert verdicts(found) == {"a": Verdict.OUTLIER, **dict.fromkeys("bcdef", Verdict.OK), "z": Verdict.NONFINITE}
    assert [each.weight for each in found.verdicts] == pytest.approx([0, *[0.2] * 5, 0])


@pytest.mark.parametrize("detector", ["", "edit"])
@pytest.mark.parametrize("rule", ["geometric_median", "centered_clip", "multi_krum", "clip", "median", "anchors", "model"])
def test_one_so_long_that_its_inner_products_overflow_is_not_finite_and_stops_nobody(rule: str, detector: str) -> None:
    """Its own norm is finite: that of two shards, 1.5e19 each, has a square beyond fp32."""
    long = rows(1, seed=9)[0]
    boxes = [Box(0, (0, 0), (NUMEL // 20, 10)), Box(0, (NUMEL // 20, 0), (NUMEL // 20, 10))]
    halves = (Shard(FRAGMENT, (box,)) for box in boxes)
    shards = [(half, part / part.norm() * 1.5e19) for half in halves for part in (half.take(long),)]
    payloads = tuple(ShardPayload(half, encode("fp32", part)) for half, part in shards)
    size = whole_norm(measure(encode("fp32", part)) for _, part in shards)
    assert math.isfinite(size)
    sent = [*contributions(rows(5)), Measured("z", 1, 1, size, payloads)]
    penalty = PenaltyConfig(detector=detector, clip=0) if detector else OFF
    if rule == "anchors":
        merge_by = RobustMerger(penalty, RobustConfig(trust="anchors", anchors=("a",)))
    else:
        merge_by = by("geometric_median" if rule == "model" else rule, penalty=penalty)
    merged = []
    for given in (sent, sent[:-1]):
        if rule == "model":
            chosen = merge_by.choose({0: Gathered(FRAGMENT, given, {}, MergeRule())})
            merged.append(merge_by.merge_chosen(FRAGMENT, given, chosen, MergeRule()))
        else:
            merged.append(merge_by.merge(FRAGMENT, given, {}, MergeRule()))
    found, without = merged
    assert found.merged is not None and without.merged is not None and torch.equal(found.merged, without.merged)
    assert found.verdicts[:-1] == without.verdicts
    assert found.verdicts[-1].verdict is Verdict.NONFINITE and found.verdicts[-1].weight == 0


def test_coefficients_that_are_not_finite_are_a_rollback_and_never_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = Combination([math.nan] * 5, [1.0] * 5)
    monkeypatch.setattr("edit.merging.robust_merger.coefficients", lambda *_: nan)
    found = by("geometric_median").merge(FRAGMENT, contributions(rows(5)), {}, MergeRule())
    assert found.merged is None and {each.weight for each in found.verdicts} == {0.0}


@pytest.mark.parametrize(("rule", "needs"), [("geometric_median", 5), ("multi_krum", 7), ("trimmed_mean", 5), ("median", 5)])
def test_too_few_good_contributions_are_rolled_back(rule: str, needs: int) -> None:
    enough = by(rule, 2).merge(FRAGMENT, contributions(rows(needs)), {}, MergeRule())
    assert enough.merged is not None
    few = [*contributions(rows(needs - 1)), contribution(torch.full((NUMEL,), math.inf), "z")]
    assert by(rule, 2).merge(FRAGMENT, few, {}, MergeRule()).merged is None


def test_copies_count_once_and_the_last_update_sent_back_does_not_count() -> None:
    deltas = rows(6)
    copied = torch.cat([deltas, deltas[:1] * 1.5])  # a and g
    last = deltas.mean(dim=0)
    replayed = contribution(last + 0.05 * rows(1, seed=3)[0] * last.norm() / NUMEL**0.5, "y")
    rule = MergeRule(outer_step=5, last=last.to(torch.bfloat16))
    found = by("geometric_median", mixing="none").merge(FRAGMENT, [*contributions(copied), replayed], {}, rule)
    said = verdicts(found)
    assert {said[name] for name in "agy"} == {Verdict.COPIED} and {said[name] for name in "bcdef"} == {Verdict.OK}
    weight = {each.peer_id: each.weight for each in found.verdicts}
    assert weight["y"] == 0 and weight["a"] + weight["g"] == pytest.approx(weight["b"], rel=0.2)
    found = by("median").merge(FRAGMENT, [*contributions(copied), replayed], {}, rule)
    assert found.merged is not None and torch.equal(
        found.merged, by("median").merge(FRAGMENT, contributions(deltas), {}, MergeRule()).merged
    )


ALL_RULES = ["geometric_median", "centered_clip", "multi_krum", "clip", "median", "trimmed_mean"]


@pytest.mark.parametrize("rule", ALL_RULES)
def test_the_peers_of_an_organisation_count_as_one_contribution_their_mean(rule: str) -> None:
    deltas, last = rows(9), rows(1, seed=9)[0]
    names = ["a", "acme.1", "acme.2", "acme.rack.3", "b", "c", "d", "umbra.1", "umbra.2"]
    whole = [*map(contribution, deltas, names)]
    pooled = [deltas[0], deltas[1:4].mean(dim=0), *deltas[4:7], deltas[7:].mean(dim=0)]
    of = [*map(contribution, pooled, ["a", "acme", "b", "c", "d", "umbra"])]
    how = MergeRule(outer_step=5, last=last.to(torch.bfloat16))
    found, wanted = (by(rule, mixing="none").merge(FRAGMENT, each, {}, how) for each in (whole, of))
    assert found.merged is not None and wanted.merged is not None
    assert torch.allclose(found.merged, wanted.merged, atol=1e-5)
    weights = {each.peer_id: each.weight for each in found.verdicts}
    for each in wanted.verdicts:
        mine = [weights[name] for name in names if name.partition(".")[0] == each.peer_id]
        assert max(mine) == min(mine) and math.fsum(mine) == pytest.approx(each.weight, abs=1e-6)
    again = by(rule, mixing="none").merge(FRAGMENT, whole[::-1], {}, how)
    assert again.merged is not None and torch.equal(found.merged, again.merged) and again.verdicts == found.verdicts


@pytest.mark.parametrize("rule", ["geometric_median", "median", "trimmed_mean"])
def test_an_organisation_gains_nothing_by_many_peers(rule: str) -> None:
    """Six of its peers against five honest: they would be the majority."""
    direction = rows(1, seed=5)
    honest, hostile = direction + 0.5 * rows(5), -direction + 0.5 * rows(6, seed=8)
    middle = honest.mean(dim=0)

    def away(names: str) -> float:
        of = [contribution(delta, names.format(i)) for i, delta in enumerate(hostile)]
        merged = by(rule, 2).merge(FRAGMENT, [*contributions(honest), *of], {}, MergeRule()).merged
        assert merged is not None
        return float((merged - middle).norm() / middle.norm())

    assert away("mallory.{}") < 0.5 < 1 < away("mallory-{}")


def test_too_few_organisations_are_rolled_back_however_many_their_peers() -> None:
    merge = by("geometric_median", 2).merge
    names = ["a.1", "a.2", "a.3", "b", "c", "d"]
    assert merge(FRAGMENT, [*map(contribution, rows(6), names)], {}, MergeRule()).merged is None
    assert merge(FRAGMENT, [*map(contribution, rows(7), [*names, "e"])], {}, MergeRule()).merged is not None


def test_buffers_of_an_organisation_count_once() -> None:
    values = [torch.full((4,), x) for x in (1.0, 2.0, 100.0, 200.0, 300.0)]
    names = ["a", "b", "m.1", "m.2", "m.3"]
    found = by("geometric_median").merge(BUFFERS, [*map(contribution, values, names)], {}, MergeRule())
    assert found.merged is not None and found.merged.tolist() == [2.0] * 4


def test_a_stale_contribution_has_a_smaller_prior() -> None:
    deltas = rows(5)
    late = [*contributions(deltas[:4]), contribution(deltas[4], "e", staleness=3)]
    weight = {each.peer_id: each.weight for each in by("clip").merge(FRAGMENT, late, {}, MergeRule()).verdicts}
    assert weight["e"] == pytest.approx(weight["a"] / 2, rel=0.2)  # (1 + 3) ** -0.5


def test_buffers_are_the_median_of_who_is_present() -> None:
    values = [torch.full((4,), x) for x in (1.0, 2.0, 1e6)]
    late = contribution(torch.full((4,), -50.0), "z", staleness=1)
    found = by("geometric_median").merge(BUFFERS, [*map(contribution, values, "abc"), late], {}, MergeRule())
    assert found.merged is not None and found.merged.tolist() == [2.0] * 4 and found.clip == 1.0
    assert by("geometric_median").merge(BUFFERS, [late], {}, MergeRule()).merged is None


def test_the_clip_bounds_what_is_merged() -> None:
    penalty = PenaltyConfig(clip=2.0)
    found = by("geometric_median", penalty=penalty).merge(FRAGMENT, contributions(rows(5)), {}, MergeRule())
    assert found.merged is not None and found.merged.norm() == pytest.approx(2.0, rel=1e-5) and found.clip < 1


def test_a_peer_that_contributes_twice_is_our_bug() -> None:
    twice = [*contributions(rows(4)), contribution(rows(1)[0], "a")]
    with pytest.raises(LocalProtocolError, match="a peer contributes twice"):
        by("median").merge(FRAGMENT, twice, {}, MergeRule())


def sharded(one: Measured, fragment: FragmentSpec, boxes: list[Box]) -> Measured:
    whole, shards = decoded(fragment, one), [Shard(fragment, [box]) for box in boxes]
    payloads = tuple(ShardPayload(shard, encode("fp32", shard.take(whole))) for shard in shards)
    return Measured(one.peer_id, one.inner_steps, one.tokens, one.norm, payloads)


ROWS = [Box(0, (0, 0), (17, 10)), Box(0, (17, 0), (33, 10))]
COLUMNS = [Box(0, (0, 0), (50, 4)), Box(0, (0, 4), (50, 6))]


@pytest.mark.parametrize("boxes", [ROWS, ROWS[::-1], COLUMNS])
def test_a_sharded_contribution_is_merged_as_a_whole_one(boxes: list[Box]) -> None:
    whole = contributions(rows(5))
    mixed = [sharded(one, FRAGMENT, boxes) if i % 2 else one for i, one in enumerate(whole)]
    for rule in ("geometric_median", "median"):
        one, other = (by(rule).merge(FRAGMENT, each, {}, MergeRule()) for each in (whole, mixed))
        assert one.merged is not None and other.merged is not None and torch.equal(one.merged, other.merged)


def test_the_pieces_of_shards_are_those_of_the_whole() -> None:
    numel = 2 * PIECE + 100
    fragment = FragmentSpec(fragment_id=0, name="f", tensors=(TensorSpec(name="t", shape=(numel,)),))
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    cuts = [0, 7, PIECE + 3, 2 * PIECE + 99, numel]
    boxes = [Box(0, (a,), (b - a,)) for a, b in itertools.pairwise(cuts)]
    one = sharded(contribution(vector, "a"), fragment, boxes)
    found = [piece.clone() for piece in pieces(fragment, one)]
    assert [piece.numel() for piece in found] == [PIECE, PIECE, 100] and torch.equal(torch.cat(found), vector)


SCHEMA = Schema((FRAGMENT,))
SAFE = RunConfig(
    penalty=OFF,
    outer=OuterConfig(optimizer="sgd", lr=1.0),
    robust=RobustConfig(rule="geometric_median", hostile=1),
    rounds=RoundsConfig(quorum=3),
)


def step(state: OuterState, seed: int) -> None:
    record = state.record(state.reduce(0, contributions(rows(5, seed))))
    state.commit(state.outer_step + 1, "", [record])


def test_what_was_merged_last_is_kept_survives_a_checkpoint_and_is_checked() -> None:
    assert isinstance(merger(SAFE), RobustMerger)
    state = OuterState(SCHEMA, SAFE, [torch.zeros(NUMEL)])
    assert "last.0" not in state.to_tensors()
    step(state, 1)
    merged = -state.theta[0]
    assert torch.equal(state.to_tensors()["last.0"], merged.to(torch.bfloat16))
    tensors = {name: each.clone() for name, each in state.to_tensors().items()}
    back = OuterState.restore(SCHEMA, SAFE, tensors, json.loads(json.dumps(state.metadata())))
    for each in (state, back):
        step(each, 2)
    assert state.digest == back.digest and torch.equal(state.to_tensors()["last.0"], back.to_tensors()["last.0"])
    with pytest.raises(StorageError, match=r"last\.0 is not 500 bf16"):
        OuterState.restore(SCHEMA, SAFE, {**tensors, "last.0": torch.zeros(NUMEL)}, back.metadata() | {"digest": ""})


def test_a_plain_run_keeps_nothing_of_it_and_says_nothing_of_it() -> None:
    plain = RunConfig(penalty=OFF)
    state = OuterState(SCHEMA, plain, [torch.zeros(NUMEL)])
    step(state, 1)
    assert "last.0" not in state.to_tensors() and "robust" not in json.loads(plain.to_json())
    assert RunConfig.from_json(SAFE.to_json()).robust == SAFE.robust


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"robust": {"rule": "median"}}, "robust.hostile = 0: must be at least 1"),
        ({"robust": {"hostile": 1}}, 'robust.hostile has no effect with robust.rule = "none"'),
        ({"robust": {"rule": "clip", "hostile": 1}}, "robust.hostile has no effect"),
        ({"robust": {"rule": "median", "hostile": 1, "mixing": "nnm"}}, "robust.mixing has no effect"),
        ({"robust": {"rule": "median", "hostile": 1, "radius": 1.0}}, "robust.radius has no effect"),
        ({"robust": {"rule": "multi_krum", "hostile": 1}}, "rounds.quorum = 3: must be at least 5"),
        ({"penalty": {"temperature": 2.0}}, 'penalty.temperature has no effect with robust.rule = "geometric_median"'),
        ({"penalty": {"max_share": 2.0}}, "penalty.max_share has no effect"),
        ({"outer": {"direction": "rda"}}, "outer.direction = 'rda': must be mean"),
        ({"outer": {"correct": "heloco"}}, "outer.correct = 'heloco': must be none"),
        ({"outer": {"algorithm": "gossip"}}, "outer.algorithm = 'gossip': must be mean"),
        ({"rounds": {"merging": "arrivals"}}, "rounds.merging = 'arrivals': must be rounds"),
        ({"sync": {"mode": "eager"}}, "sync.mode = 'eager': must not be eager with robust.rule"),
        ({"robust": {"rule": "krum", "hostile": 1}}, "robust.rule"),
    ],
)
def test_what_a_robust_rule_does_not_go_with_is_said_in_one_line(settings: dict[str, dict[str, Any]], said: str) -> None:
    written: dict[str, Any] = {"robust": {"rule": "geometric_median", "hostile": 1}, "rounds": {"quorum": 3, "start_peers": 3}}
    for section, values in settings.items():
        written[section] = values if section in ("robust", "outer") else {**written.get(section, {}), **values}
    if "arrivals" in said:
        written["rounds"] = {"merging": "arrivals", "max_staleness": 8}
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_mapping(written)
    assert said in str(refused.value)
