"""robust.scope = "model": one set of coefficients for all fragments of an outer step, as the oracle has it."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from edit import reference
from edit.config.robust import RobustConfig
from edit.config.run import PenaltyConfig, RoundsConfig, RunConfig
from edit.errors import ConfigError, LocalProtocolError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.local import LocalRun
from edit.merging.merge import Measured, Merged, ShardPayload, measure
from edit.merging.mergers import Admission, Admitted, Rejected
from edit.merging.outer_state import OuterState
from edit.records import Contribution, EncodedTensor, PeerVerdict, Verdict
from tests.support.encoded import encode

SIZES = (300, 700, 120)
SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=(TensorSpec(name=f"layer{i}.w", shape=(size // 10, 10)),))
        for i, size in enumerate(SIZES)
    )
)
BUFFERED = Schema(
    (
        *SCHEMA.fragments,
        FragmentSpec(fragment_id=3, name="b", tensors=(TensorSpec(name="b", shape=(4,)),), buffers=True),
    )
)
OFF = PenaltyConfig(enabled=False)
Sent = Mapping[int, Sequence[Measured]]


def config(rule: str = "geometric_median", hostile: int = 2, penalty: PenaltyConfig = OFF, **more: Any) -> RunConfig:
    hostile = 0 if rule in ("clip", "none") else hostile
    robust = RobustConfig(rule=rule, hostile=hostile, scope="model", **more)
    return RunConfig(penalty=penalty, robust=robust, rounds=RoundsConfig(quorum=max(1, robust.least)))


def state(settings: RunConfig, schema: Schema = SCHEMA) -> OuterState:
    return OuterState(schema, settings, [torch.zeros(each.numel) for each in schema.fragments])


def rows(n: int, seed: int = 0) -> list[Tensor]:
    """The contributions to each fragment, [n, numel]: of different lengths in different fragments."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, size, generator=random) * torch.linspace(1, 2, n).roll(3 * i)[:, None] for i, size in enumerate(SIZES)
    ]


def contribution(delta: Tensor, peer_id: str, staleness: int = 0) -> Measured:
    payload = encode("fp32", delta)
    return Measured(peer_id, 1, 1, measure(payload), payload, staleness)


def sent(of: Sequence[Tensor], names: Sequence[str] = "abcdefghi") -> dict[int, list[Measured]]:
    return {i: [contribution(delta, name) for delta, name in zip(each, names, strict=False)] for i, each in enumerate(of)}


def merged(outer: OuterState, given: Sent, rejected: Sequence[str] = ()) -> list[Merged]:
    chosen = outer.choose(given, rejected)
    return [outer.reduce_chosen(i, each, chosen) for i, each in given.items()]


def vectors(found: Sequence[Merged]) -> list[Tensor]:
    assert all(each.merged is not None for each in found)
    return [each.merged for each in found if each.merged is not None]


def said(found: Merged) -> dict[str, Verdict]:
    return {each.peer_id: each.verdict for each in found.verdicts}


def weights(found: Merged) -> dict[str, float]:
    return {each.peer_id: each.weight for each in found.verdicts}


def by_oracle(of: Sequence[Tensor], rule: str, hostile: int = 2) -> list[Tensor]:
    rules = {
        "geometric_median": lambda each: reference.geometric_median(
            reference.nearest_neighbour_mixing(reference.equalised(each), hostile)
        ),
        "multi_krum": lambda each: reference.multi_krum(
            reference.nearest_neighbour_mixing(reference.equalised(each), hostile), hostile
        ),
        "clip": lambda each: (each * (each.norm(dim=1).quantile(0.5) / each.norm(dim=1)).clamp(max=1)[:, None]).mean(dim=0),
        "none": lambda each: reference.anchored(each, [1]),
    }
    return reference.by_model(of, rules[rule])


@pytest.mark.parametrize("rule", ["geometric_median", "multi_krum", "clip", "none"])
def test_all_fragments_are_merged_as_one_vector_as_by_the_oracle_and_the_order_changes_no_bit(rule: str) -> None:
    """none: with anchors."""
    of = rows(7)
    settings = config(rule)
    if rule == "none":
        settings = config(rule, trust="anchors", anchors=("b",))
        common = rows(1, seed=3)
        of = [each + 2 * towards for each, towards in zip(of, common, strict=True)]
    found = merged(state(settings), sent(of))
    for vector, wanted in zip(vectors(found), by_oracle(of, rule), strict=True):
        assert torch.allclose(vector, wanted, rtol=1e-4, atol=1e-5)
    assert len({tuple(weights(each).items()) for each in found}) == 1, "one set of coefficients"
    assert math.isclose(math.fsum(weights(found[0]).values()), 1) or rule == "clip"
    turned = {i: each[::-1] for i, each in reversed(sent(of).items())}
    for one, other in zip(found, merged(state(settings), turned)[::-1], strict=True):
        assert one.verdicts == other.verdicts
        assert one.merged is not None and other.merged is not None and torch.equal(one.merged, other.merged)
    alone = state(replace(settings, robust=replace(settings.robust, scope="fragment"))).reduce(1, sent(of)[1])
    assert weights(alone) != weights(found[1]), "each fragment by itself has others"


def test_centered_clip_is_pulled_from_the_last_merged_of_the_whole_model() -> None:
    settings = config("centered_clip", mixing="none", equalise=False, radius=25.0)
    outer, last, of = state(settings), rows(1, seed=8), rows(7)
    first = merged(outer, sent([each.expand(7, -1) + 1e-3 * noise for each, noise in zip(last, rows(7, 9), strict=True)]))
    outer.commit(1, "", [outer.record(each) for each in first])
    centre = torch.cat([outer.to_tensors()[f"last.{i}"].float() for i in range(3)])
    wanted = reference.by_model(of, lambda each: reference.centered_clip(each, centre, 25.0))
    for one, by in zip(vectors(merged(outer, sent(of))), wanted, strict=True):
        assert torch.allclose(one, by, rtol=1e-4, atol=1e-4)


def sharded(one: Measured, fragment: FragmentSpec, boxes: Sequence[Box]) -> Measured:
    assert isinstance(one.payload, EncodedTensor)
    whole = torch.frombuffer(bytearray(one.payload.data), dtype=torch.float32)
    shards = [Shard(fragment, [box]) for box in boxes]
    return replace(one, payload=tuple(ShardPayload(each, encode("fp32", each.take(whole))) for each in shards))


@pytest.mark.parametrize("across", [0, 1])
def test_sharded_contributions_are_merged_as_whole_ones(across: int) -> None:
    given = sent(rows(5))
    cut = {}
    for i, each in given.items():
        shape = SCHEMA.fragments[i].tensors[0].shape
        sizes = [(5, shape[1]), (shape[0] - 5, shape[1])] if across == 0 else [(shape[0], 4), (shape[0], 6)]
        boxes = [Box(0, (0, 0), sizes[0]), Box(0, (5, 0) if across == 0 else (0, 4), sizes[1])]
        cut[i] = [sharded(one, SCHEMA.fragments[i], boxes) if k % 2 else one for k, one in enumerate(each)]
    for one, other in zip(merged(state(config(hostile=1)), given), merged(state(config(hostile=1)), cut), strict=True):
        assert one.verdicts == other.verdicts
        assert one.merged is not None and other.merged is not None and torch.equal(one.merged, other.merged)


def test_one_that_is_not_finite_in_a_fragment_counts_in_none() -> None:
    of = rows(7)
    of[1][6, 5] = math.nan
    found = merged(state(config(hostile=1)), sent(of))
    assert [said(each)["g"] for each in found] == [Verdict.REJECTED, Verdict.NONFINITE, Verdict.REJECTED]
    without = merged(state(config(hostile=1)), sent([each[:6] for each in of]))
    for one, other in zip(vectors(found), vectors(without), strict=True):
        assert torch.equal(one, other)


def test_one_that_is_anomalous_in_a_fragment_counts_in_none_and_each_fragment_learns_for_itself() -> None:
    of = rows(7)
    of[0][2] *= 1e4
    outer = state(config(hostile=1, penalty=PenaltyConfig(clip=0.0)))
    found = merged(outer, sent(of))
    assert [said(each)["c"] for each in found] == [Verdict.ANOMALOUS, Verdict.REJECTED, Verdict.REJECTED]
    alone = state(replace(outer.config, robust=replace(outer.config.robust, scope="fragment")))
    for i, each in sent(of).items():
        assert found[i].statistics == alone.reduce(i, each).statistics


def test_one_that_is_idle_in_a_fragment_stays_in_the_others_and_one_that_is_idle_in_all_is_out() -> None:
    """An expert that a site's data never reach is no fault of the rest of its contribution."""
    of = rows(8)
    of[1][2] = 0.0
    for each in of:
        each[7] = 0.0
    settings = config(hostile=1, penalty=PenaltyConfig(clip=0.0))
    found = merged(state(settings), sent(of))
    assert [said(each)["c"] for each in found] == [Verdict.OK, Verdict.IDLE, Verdict.OK]
    assert weights(found[1])["c"] == 0 < weights(found[0])["c"]
    assert {said(each)["h"] for each in found} == {Verdict.IDLE}
    for one, wanted in zip(vectors(found), by_oracle([each[:7] for each in of], "geometric_median", 1), strict=True):
        assert torch.allclose(one, wanted, rtol=1e-4, atol=1e-5)
    short = {peer: weights(found[1])[peer] for peer in "abdefg"}
    assert short == {peer: weights(found[0])[peer] for peer in "abdefg"}, "nobody else counts for more"


def test_too_few_rows_roll_all_fragments_back_but_buffers() -> None:
    of = [*rows(5), torch.tensor([[1.0], [2.0], [1e6], [3.0], [4.0]]).expand(5, 4)]
    given = sent(of)
    found = merged(state(config(), BUFFERED), given)
    assert all(each.merged is not None for each in found)
    of[2] = of[2].clone()
    of[2][1, 0] = math.inf
    found = merged(state(config(), BUFFERED), sent(of))
    assert [each.merged is None for each in found] == [True, True, True, False]
    assert [said(each)["b"] for each in found] == [Verdict.REJECTED, Verdict.REJECTED, Verdict.NONFINITE, Verdict.OK]
    assert {said(each)["a"] for each in found} == {Verdict.OK} and not any(weights(found[0]).values())
    assert found[3].merged is not None and found[3].merged.tolist() == [3.0] * 4


def test_buffers_say_nothing_about_the_rest_and_a_group_of_buffers_alone_is_merged() -> None:
    values = torch.full((5, 4), 7.0)
    values[0] = math.nan
    found = merged(state(config(), BUFFERED), sent([*rows(5), values]))
    assert [said(each)["a"] for each in found] == [Verdict.OK] * 3 + [Verdict.NONFINITE]
    only = {3: sent([*rows(5), values])[3]}
    assert vectors(merged(state(config(), BUFFERED), only))[0].tolist() == [7.0] * 4


def test_copies_and_replays_are_told_by_the_whole_model() -> None:
    of = rows(7)
    part = [each.clone() for each in of]
    part[2][6] = part[2][0]  # the smallest fragment alone
    assert {said(each)["g"] for each in merged(state(config(hostile=1)), sent(part))} == {Verdict.OK}
    whole = [each.clone() for each in of]
    for each in whole:
        each[6] = 1.5 * each[0]
    found = merged(state(config(hostile=1)), sent(whole))
    assert all({name for name, verdict in said(each).items() if verdict is Verdict.COPIED} == {"a", "g"} for each in found)
    outer = state(config(hostile=1))
    for step in range(5):
        done = merged(outer, sent(rows(7, seed=20 + step)))
        outer.commit(step + 1, "", [outer.record(each) for each in done])
    sent_back = [torch.cat([each[:6], last[None]]) for each, last in zip(of, vectors(done), strict=True)]
    found = merged(outer, sent(sent_back))
    assert {said(each)["g"] for each in found} == {Verdict.COPIED} and {weights(each)["g"] for each in found} == {0.0}


def test_the_last_of_a_fragment_that_has_none_counts_as_zeros() -> None:
    """As after an outer step in which one fragment was rolled back."""
    outer = state(config(hostile=1))
    done = merged(outer, sent(rows(5, seed=1)))
    done[1] = replace(done[1], merged=None)
    outer.commit(1, "", [outer.record(each) for each in done])
    assert {name for name in outer.to_tensors() if name.startswith("last")} == {"last.0", "last.2"}
    of = rows(5, seed=2)
    for one, wanted in zip(vectors(merged(outer, sent(of))), by_oracle(of, "geometric_median", 1), strict=True):
        assert torch.allclose(one, wanted, rtol=1e-4, atol=1e-5)


def test_the_peers_of_an_organisation_count_as_one_row_of_the_whole_model() -> None:
    of, names = rows(7), ["a", "acme.1", "acme.2", "b", "c", "d", "e"]
    pooled = [torch.cat([each[:1], each[1:3].mean(dim=0, keepdim=True), each[3:]]) for each in of]
    settings = config(mixing="none")
    found = merged(state(settings), sent(of, names))
    for one, wanted in zip(vectors(found), vectors(merged(state(settings), sent(pooled))), strict=True):
        assert torch.allclose(one, wanted, atol=1e-5)
    assert weights(found[0])["acme.1"] == weights(found[2])["acme.2"]


def test_a_third_that_turns_its_sign_in_one_fragment_is_told_by_the_others_too() -> None:
    """In a fragment of few elements a hostile row hides; together with the others it does not."""
    common = rows(1, seed=5)
    of = [towards + each for towards, each in zip(common, rows(9), strict=True)]
    honest = [each[:6].mean(dim=0) for each in of]
    for each in of:
        each[6:] *= -1
    found = vectors(merged(state(config(hostile=3)), sent(of)))
    for one, wanted, each in zip(found, honest, of, strict=True):
        assert (one - wanted).norm() < 0.5 * (each.mean(dim=0) - wanted).norm()


def test_what_the_policy_rejects_in_one_fragment_is_rejected_in_all() -> None:
    of = rows(6)
    found = merged(state(config()), sent(of), rejected=("b",))
    assert {said(each)["b"] for each in found} == {Verdict.REJECTED}
    for one, other in zip(
        vectors(found), vectors(merged(state(config()), sent([each[[0, 2, 3, 4, 5]] for each in of], "acdef"))), strict=True
    ):
        assert torch.equal(one, other)


def test_no_fragment_is_merged_by_itself_and_each_contribution_must_be_whole() -> None:
    outer, given = state(config(hostile=1)), sent(rows(4))
    with pytest.raises(LocalProtocolError, match="a merge of one fragment by itself"):
        outer.reduce(0, given[0])
    given[1] = given[1][:3]
    with pytest.raises(LocalProtocolError, match="needs each fragment of each contribution, once"):
        outer.choose(given)
    given[1] = [*given[1], given[1][0]]
    with pytest.raises(LocalProtocolError, match="fragment 1: a peer contributes twice"):
        outer.choose(given)


def test_the_contributions_to_one_fragment_are_in_memory_at_a_time() -> None:
    alive, most = list[weakref.ref[Any]](), 0

    class Read(bytearray):
        """What a spill gave back."""

    def reader(one: Measured) -> Measured:
        assert isinstance(one.payload, EncodedTensor)
        payload, data = one.payload, bytes(one.payload.data)

        def read() -> EncodedTensor:
            nonlocal most
            back = Read(data)
            alive.append(weakref.ref(back))
            most = max(most, sum(each() is not None for each in alive))
            return replace(payload, data=memoryview(back))

        return replace(one, payload=read)

    given = {i: [reader(one) for one in each] for i, each in sent(rows(5)).items()}
    assert vectors(merged(state(config(hostile=1)), given))
    assert len(alive) == 2 * 15 and 0 < most <= 5, "each is read twice, of one fragment at a time"


class Refuses(Admission):
    """Rejects what one peer sends of one fragment."""

    def admit(self, fragment: FragmentSpec, contribution: Measured) -> Admitted | Rejected:
        if (contribution.peer_id, fragment.fragment_id) == ("b", 2):
            return Rejected("not wanted")
        return Admitted(contribution)


def piece(fragment_id: int, delta: Tensor) -> Contribution:
    return Contribution(fragment_id=fragment_id, outer_step=0, inner_steps=1, tokens=1, payload=encode("fp32", delta))


def one_round(run: LocalRun, of: Sequence[Tensor], names: Sequence[str]) -> list[dict[str, PeerVerdict]]:
    sides = {name: run.collective(name) for name in names}
    for side in sides.values():
        side.join(SCHEMA, lambda: [torch.zeros(size) for size in SIZES])
    for i, each in enumerate(of):  # fragment by fragment, so that fragment 0 of all is in before the others are
        for k, name in enumerate(names):
            sides[name].contribute(piece(i, each[k]))
    outcome = sides[names[0]].outcome(0, block=True)
    assert outcome is not None and run.state.outer_step == 1
    fragments = outcome.commit.fragments  # type: ignore[union-attr]
    return [{verdict.peer_id: verdict for verdict in each.verdicts} for each in fragments]


def test_a_run_in_one_process_reduces_nothing_before_all_fragments_are_in() -> None:
    of = rows(6)
    one, other = (LocalRun(config(), "abcdef", policy=policy) for policy in (None, Refuses()))
    found = one_round(one, of, "abcdef")
    wanted = merged(state(config()), sent(of))
    assert [list(each.values()) for each in found] == [list(each.verdicts) for each in wanted]
    refused = one_round(other, of, "abcdef")
    assert [each["b"].verdict for each in refused] == [Verdict.REJECTED] * 3
    assert one.state.digest != other.state.digest


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"robust": {"rule": "none"}}, 'robust.scope has no effect with robust.rule = "none"'),
        ({"robust": {"rule": "median"}}, 'robust.scope has no effect with robust.rule = "median"'),
        ({"robust": {"rule": "trimmed_mean"}}, 'robust.scope has no effect with robust.rule = "trimmed_mean"'),
        ({"robust": {"scope": "layer"}}, "robust.scope = 'layer': must be one of fragment, model"),
        (
            {"aggregators": {"addresses": ["h:1"]}},
            'must be empty with robust.scope = "model": each aggregator would see its own fragments only',
        ),
        ({"swarm": {}}, "robust.scope = 'model': must be fragment with [swarm]"),
    ],
)
def test_what_it_does_not_go_with_is_said_in_one_line(settings: dict[str, dict[str, Any]], words: str) -> None:
    base: dict[str, Any] = {
        "robust": {"rule": "geometric_median", "hostile": 1, "scope": "model"},
        "rounds": {"quorum": 3, "start_peers": 3},
    }
    written = {**base, **settings, "robust": {**base["robust"], **settings.get("robust", {})}}
    if written["robust"]["rule"] == "none":
        del written["robust"]["hostile"]
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_mapping(written)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert RunConfig.from_mapping(base).robust.of_model


def test_the_setting_goes_through_json_and_with_anchors_and_is_not_said_where_it_is_not_used() -> None:
    anchored = RunConfig.from_mapping({"robust": {"trust": "anchors", "anchors": ["a"], "scope": "model"}})
    assert anchored.robust.of_model and RunConfig.from_json(anchored.to_json()) == anchored
    plain = RunConfig.from_mapping({"robust": {"rule": "clip"}})
    assert "scope" not in json.loads(plain.to_json())["robust"] and not plain.robust.of_model
