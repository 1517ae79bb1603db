"""Contributions weighed by their cosine to those of anchors: the oracle's values, hostile majorities, refusals."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from edit import reference
from edit.config.robust import RobustConfig
from edit.config.run import PenaltyConfig, RunConfig
from edit.errors import ConfigError
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.merging.merge import Measured, Merged, MergeRule, ShardPayload, measure
from edit.merging.mergers import merger
from edit.merging.robust import by_anchors
from edit.records import Verdict
from tests.support.encoded import encode

NUMEL = 400
FRAGMENT = FragmentSpec(fragment_id=0, name="f", tensors=(TensorSpec(name="t", shape=(NUMEL,)),))
BUFFERS = FragmentSpec(fragment_id=0, name="b", tensors=(TensorSpec(name="t", shape=(4,)),), buffers=True)
ANCHORED: dict[str, Any] = {"robust": {"trust": "anchors", "anchors": ["a"]}}


def rows(n: int, seed: int = 0) -> Tensor:
    """Contributions of different lengths with a common direction."""
    random = torch.Generator().manual_seed(seed)
    common = torch.randn(NUMEL, generator=random)
    return (0.3 * common + torch.randn(n, NUMEL, generator=random)) * torch.linspace(0.5, 3, n)[:, None]


def contribution(delta: Tensor, peer_id: str, staleness: int = 0) -> Measured:
    payload = encode("fp32", delta)
    return Measured(peer_id, 1, 1, measure(payload), payload, staleness)


def merged(sent: list[Measured], *anchors: str, fragment: FragmentSpec = FRAGMENT, rule: MergeRule | None = None) -> Merged:
    config = RunConfig(penalty=PenaltyConfig(enabled=False), robust=RobustConfig(trust="anchors", anchors=anchors or ("a",)))
    return merger(config).merge(fragment, sent, {}, rule or MergeRule())


def named(deltas: Tensor, names: str = "abcdefghi") -> list[Measured]:
    return [contribution(delta, name) for delta, name in zip(deltas, names, strict=False)]


def vector(found: Merged) -> Tensor:
    assert found.merged is not None
    return found.merged


def weights(found: Merged) -> dict[str, float]:
    return {each.peer_id: each.weight for each in found.verdicts}


def said(found: Merged) -> dict[str, Verdict]:
    return {each.peer_id: each.verdict for each in found.verdicts}


def test_the_values_by_hand() -> None:
    """x_0 = (3, 4); the cosines are 1, 0.6 and -1."""
    sent = torch.zeros(3, NUMEL)
    sent[0, :2], sent[1, 0], sent[2, :2] = torch.tensor([3.0, 4.0]), 10.0, torch.tensor([-3.0, -4.0])
    found = merged(named(sent))
    assert weights(found) == pytest.approx({"a": 0.625, "b": 0.375, "c": 0.0})
    assert said(found) == {"a": Verdict.OK, "b": Verdict.OK, "c": Verdict.OUTLIER}
    assert vector(found)[:3].tolist() == pytest.approx([0.625 * 3 + 0.375 * 5, 0.625 * 4, 0.0])


@pytest.mark.parametrize(("n", "anchors"), [(2, "a"), (5, "c"), (7, "ad"), (9, "bfi")])
def test_the_merge_is_the_oracles_and_the_order_changes_no_bit(n: int, anchors: str) -> None:
    deltas = rows(n, seed=n)
    deltas[n - 2] *= -1  # points away
    found = merged(named(deltas), *anchors)
    wanted = reference.anchored(deltas, ["abcdefghi".index(name) for name in anchors])
    assert torch.allclose(vector(found), wanted, rtol=1e-4, atol=1e-5)
    again = merged(named(deltas)[::-1], *anchors[::-1])
    assert torch.equal(vector(found), vector(again)) and found.verdicts == again.verdicts
    assert math.fsum(weights(found).values()) == pytest.approx(1)


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e15])
def test_a_hostile_majority_neither_turns_nor_lengthens_the_step(length: float) -> None:
    deltas = rows(9)
    deltas[2:] = -length * (deltas[0] + torch.randn(7, NUMEL, generator=torch.Generator().manual_seed(1)))
    found = merged(named(deltas), "a")
    assert not any(weights(found)[name] for name in "cdefghi")
    assert float(vector(found) @ deltas[0]) > 0 and vector(found).norm() <= deltas[0].norm() * 1.001
    near = deltas.clone()
    near[2:] = length * (deltas[0] + 2 * torch.randn(7, NUMEL, generator=torch.Generator().manual_seed(2)))
    assert vector(merged(named(near), "a")).norm() <= deltas[0].norm() * 1.001


def test_what_is_too_short_to_be_measured_is_not_made_longer() -> None:
    """The squares of all elements but one are too small for fp32: its inner product with itself is 1e-44 and not 1e-42."""
    deltas = rows(3)
    deltas[2] = torch.where(deltas[0] > 0, 2.6e-23, -2.6e-23)
    deltas[2, 0] = math.copysign(1e-22, float(deltas[0, 0]))
    found = merged(named(deltas))
    assert weights(found)["c"] == 0 and vector(found).norm() <= deltas[0].norm() * 1.001


def test_peers_that_cancel_each_other_are_not_made_longer() -> None:
    deltas, names = rows(2), ["a", "b", "m.1", "m.2"]
    large = 1e4 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))
    sent = [*deltas, large, -large + 0.01 * deltas[0]]
    found = merged([*map(contribution, sent, names)])
    assert said(found)["m.1"] is said(found)["m.2"] is Verdict.OUTLIER
    gram = [[1.0, 0.001], [0.001, 1e-5]]  # of rows of which the second is what is left of squares of 1
    assert by_anchors(gram, [0.5, 0.5], [1.0, 0.0], [1.0, 1.0]).weights == [1.0, 0.0]
    assert by_anchors(gram, [0.5, 0.5], [1.0, 0.0], [1.0, 1e-5]).weights[1] > 0


def test_without_a_good_anchor_a_fragment_is_rolled_back() -> None:
    deltas = rows(4)
    assert merged(named(deltas), "z").merged is None
    broken = [contribution(torch.full((NUMEL,), math.nan), "a"), *named(deltas[1:], "bcd")]
    found = merged(broken)
    assert found.merged is None and said(found) == {"a": Verdict.NONFINITE, **dict.fromkeys("bcd", Verdict.OK)}
    assert torch.equal(vector(merged(broken, "a", "b")), vector(merged(broken, "b")))
    idle = [contribution(torch.zeros(NUMEL), "a"), *named(deltas[1:], "bcd")]
    found = merged(idle)
    assert found.merged is None and not any(weights(found).values()) and set(said(found).values()) == {Verdict.OK}


def test_an_anchor_is_an_organisation_and_a_name_that_begins_alike_is_none() -> None:
    deltas = rows(5)
    sent = [*map(contribution, deltas, ["acme.1", "acme.2", "acme-not", "b", "c"])]
    pooled = [*map(contribution, [deltas[:2].mean(dim=0), *deltas[2:]], ["acme", "acme-not", "b", "c"])]
    assert torch.allclose(vector(merged(sent, "acme")), vector(merged(pooled, "acme")), atol=1e-5)
    assert merged(sent[2:], "acme").merged is None


def test_copies_share_one_weight_and_a_stale_anchor_counts_for_less() -> None:
    deltas = rows(6)
    alone, copied = merged(named(deltas)), merged(named(torch.cat([deltas, 2 * deltas[5:], 3 * deltas[5:]])))
    assert {said(copied)[name] for name in "fgh"} == {Verdict.COPIED}
    assert sum(weights(copied)[name] for name in "fgh") == pytest.approx(weights(alone)["f"], rel=1e-3)
    late = [contribution(deltas[0], "a", staleness=3), *named(deltas[1:], "bcdef")]
    towards = [float(torch.nn.functional.cosine_similarity(vector(merged(late, "a", "b")), deltas[i], dim=0)) for i in (0, 1)]
    level = [
        float(torch.nn.functional.cosine_similarity(vector(merged(named(deltas), "a", "b")), deltas[i], dim=0)) for i in (0, 1)
    ]
    assert towards[0] < level[0] and towards[1] > level[1]


def test_a_sharded_anchor_is_merged_as_a_whole_one() -> None:
    sent = named(rows(4))
    shards = [Shard(FRAGMENT, [Box(0, (0,), (150,))]), Shard(FRAGMENT, [Box(0, (150,), (250,))])]
    whole = rows(4)[0]
    payloads = tuple(ShardPayload(each, encode("fp32", each.take(whole))) for each in shards)
    sharded = Measured("a", 1, 1, sent[0].norm, payloads)
    assert torch.equal(vector(merged([sharded, *sent[1:]])), vector(merged(sent)))


def test_buffers_are_the_median_of_the_anchors() -> None:
    sent = [
        contribution(torch.full((4,), value), name) for value, name in zip((1.0, 3.0, 5.0, 900.0, 901.0), "abcde", strict=True)
    ]
    assert vector(merged(sent, "a", "b", "c", fragment=BUFFERS)).tolist() == [3.0] * 4
    assert merged(sent, "z", fragment=BUFFERS).merged is None


def test_the_settings_go_through_json_and_are_not_said_where_they_are_not_used() -> None:
    config = RunConfig.from_mapping(ANCHORED)
    assert RunConfig.from_json(config.to_json()) == config and config.robust.anchors == ("a",)
    rule = RunConfig.from_mapping({"robust": {"rule": "clip"}})
    assert set(json.loads(rule.to_json())["robust"]) == {"rule", "hostile", "mixing", "equalise", "radius"}
    assert "robust" not in json.loads(RunConfig().to_json())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"robust": {"anchors": []}}, 'must name at least one organisation with robust.trust = "anchors"'),
        ({"robust": {"anchors": ["a.gpu"]}}, "robust.anchors = 'a.gpu': must be the name of an organisation"),
        ({"robust": {"anchors": ["a", "a"]}}, "robust.anchors = 'a': must not be named twice"),
        ({"robust": {"anchors": [f"a{i}" for i in range(65)]}}, "robust.anchors (their number) = 65"),
        ({"robust": {"trust": "none"}}, 'robust.anchors has no effect with robust.trust = "none"'),
        ({"robust": {"trust": "scores"}}, "robust.trust = 'scores': must be one of none, anchors, loss"),
        ({"robust": {"rule": "median", "hostile": 1}}, "robust.rule = 'median': must be none with robust.trust = \"anchors\""),
        ({"robust": {"hostile": 1}}, 'robust.hostile has no effect with robust.rule = "none"'),
        ({"penalty": {"max_share": 2.0}}, 'penalty.max_share has no effect with robust.trust = "anchors"'),
        ({"outer": {"direction": "rda"}}, "outer.direction = 'rda': must be mean with robust.trust = \"anchors\""),
        ({"outer": {"correct": "heloco"}}, "outer.correct = 'heloco': must be none with robust.trust"),
        ({"outer": {"algorithm": "gossip"}}, "outer.algorithm = 'gossip': must be mean with robust.trust"),
        (
            {"rounds": {"merging": "arrivals", "max_staleness": 8}},
            "rounds.merging = 'arrivals': must be rounds with robust.trust",
        ),
        ({"sync": {"mode": "eager"}}, "sync.mode = 'eager': must not be eager with robust.trust"),
        (
            {"secagg": {"enabled": True}, "rounds": {"quorum": 3, "start_peers": 3}},
            "robust.trust = 'anchors': must be none with secagg.enabled",
        ),
        (
            {"privacy": {"level": "organisation", "delta": 1e-3, "epsilon_max": 8.0}},
            'robust.trust = \'anchors\': must be "none" with privacy.level = "organisation"',
        ),
    ],
)
def test_what_anchors_do_not_go_with_is_said_in_one_line(settings: dict[str, dict[str, Any]], words: str) -> None:
    written = {**ANCHORED, **settings, "robust": {**ANCHORED["robust"], **settings.get("robust", {})}}
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_mapping(written)
    assert words in str(refused.value) and "\n" not in str(refused.value)
