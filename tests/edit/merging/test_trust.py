"""Peers weighed by what their contributions do to a held-out loss: the means, the priors, merges, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from edit import reference
from edit.config.robust import RobustConfig
from edit.config.run import OuterConfig, PenaltyConfig, RoundsConfig, RunConfig, StorageConfig, SyncConfig
from edit.errors import ConfigError, StorageError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.local import LocalRun, Scorer
from edit.merging.merge import Measured, Merged, MergeRule, measure
from edit.merging.mergers import merger
from edit.merging.outer_state import OuterState
from edit.merging.trust import Trust, after_scores, agreed, factors, score, scores
from edit.records import Committed, Contribution, Verdict
from tests.support.encoded import encode

NUMEL = 300
FRAGMENT = FragmentSpec(fragment_id=0, name="f", tensors=(TensorSpec(name="t", shape=(NUMEL,)),))
BUFFERS = FragmentSpec(fragment_id=0, name="b", tensors=(TensorSpec(name="t", shape=(4,)),), buffers=True)
OFF = PenaltyConfig(enabled=False)
SCORED: dict[str, Any] = {"robust": {"trust": "loss"}}


def rows(n: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(NUMEL, generator=random) + torch.randn(n, NUMEL, generator=random)


def contribution(delta: Tensor, peer_id: str, staleness: int = 0) -> Measured:
    payload = encode("fp32", delta)
    return Measured(peer_id, 1, 1, measure(payload), payload, staleness)


def named(deltas: Tensor, names: Sequence[str]) -> list[Measured]:
    return [contribution(delta, name) for delta, name in zip(deltas, names, strict=True)]


def merged(sent: list[Measured], trust: Mapping[str, float], rule: str = "none", fragment: FragmentSpec = FRAGMENT) -> Merged:
    hostile = 0 if rule in ("none", "clip") else 1
    config = RunConfig(
        penalty=OFF, robust=RobustConfig(rule=rule, hostile=hostile, trust="loss"), rounds=RoundsConfig(quorum=5)
    )
    known = {peer_id: Trust(mean, 1) for peer_id, mean in trust.items()}
    return merger(config).merge(fragment, sent, {}, MergeRule(trust=known))


def weights(found: Merged) -> dict[str, float]:
    return {each.peer_id: each.weight for each in found.verdicts}


def said(found: Merged) -> dict[str, Verdict]:
    return {each.peer_id: each.verdict for each in found.verdicts}


# The pure rule.


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (2.0, 1.5, 0.25),
        (2.0, 2.5, -0.25),
        (2.0, 0.0, 1.0),
        (2.0, 1e9, -1.0),
        (2.0, math.inf, -1.0),
        (2.0, math.nan, -1.0),
    ],
)
def test_a_score_is_the_share_of_the_loss_that_half_a_contribution_takes_off(
    before: float, after: float, wanted: float
) -> None:
    assert score(before, after) == wanted


@pytest.mark.parametrize(
    ("means", "wanted"),
    [
        ({"a": 1.0, "b": 1.0, "c": 1.0}, [1.0, 1.0, 1.0]),
        ({"a": 0.02, "b": 0.01, "c": -0.01}, [2.0, 1.0, 0.0]),
        ({"a": 0.04, "b": 0.04, "c": 0.01}, [1.0, 1.0, 0.25]),  # a quarter counts
        ({"a": 0.04, "b": 0.04, "c": 0.0099}, [1.0, 1.0, 0.0]),
        ({"a": 0.9, "b": 0.1, "c": 0.1}, [4.0, 1.0, 1.0]),  # no more than four times the median
        ({"a": 0.1, "b": -0.1, "c": -0.1}, [1.0, 1.0, 1.0]),  # the median is not positive
        ({"a": 0.1, "b": 0.0, "c": -0.1}, [1.0, 1.0, 1.0]),
        ({}, [1.0, 1.0, 1.0]),
        ({"a": 0.1, "b": -0.02}, [2.5, 0.0, 1.0]),  # nobody has scored c: as the median
        ({"z": 0.9, "a": 0.1, "b": 0.1, "c": 0.1}, [1.0, 1.0, 1.0]),  # z is not in the round
    ],
)
def test_the_prior_by_means(means: Mapping[str, float], wanted: list[float]) -> None:
    known = {peer_id: Trust(mean, 3) for peer_id, mean in means.items()}
    assert factors("abc", known) == pytest.approx(wanted)


def test_an_organisation_counts_once_in_the_median() -> None:
    known = {name: Trust(-0.1, 1) for name in ("m.1", "m.2", "m.3", "m.4")} | {name: Trust(0.1, 1) for name in "abc"}
    assert factors(["a", "b", "c", "m.1", "m.2", "m.3", "m.4"], known) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_means_and_priors_are_the_oracles() -> None:
    history = (torch.randn(12, 7, generator=torch.Generator().manual_seed(1)) * 0.02 + 0.015).tolist()
    trust: dict[str, Trust] = {}
    for number, row in enumerate(history, 1):
        trust = after_scores(trust, dict(zip("abcdefg", row, strict=True)))
        found = factors("abcdefg", trust)
        wanted = reference.loss_priors(history[:number])
        assert [each / sum(found) for each in found] == pytest.approx(wanted, abs=1e-12)
    assert trust["a"].count == 12 and 0.0 in found


def test_the_scores_are_the_oracles_and_what_is_not_finite_is_passed_over() -> None:
    theta, deltas = rows(1)[0], rows(3, seed=4)

    def loss(parts: Sequence[Tensor]) -> float:
        return float(torch.cat(list(parts)).square().mean())

    sent = [
        ("a", {0: deltas[0, :100], 1: deltas[0, 100:]}),
        ("b", {1: deltas[1, 100:]}),
        ("c", {0: torch.full((100,), math.nan)}),
    ]
    found = scores([theta[:100], theta[100:]], sent, loss)
    partly = torch.cat([torch.zeros(100), deltas[1, 100:]])
    square = partial(lambda vector: float(vector.square().mean()))
    assert found == pytest.approx(
        {"a": reference.loss_score(square, theta, deltas[0]), "b": reference.loss_score(square, theta, partly)}
    )
    assert scores([theta], [("a", {0: deltas[0]})], lambda parts: math.nan) == {}
    assert scores([theta], [("a", {0: deltas[0]})], lambda parts: 0.0) == {}


def test_the_first_score_is_the_mean_and_seven_good_ones_bring_a_peer_back() -> None:
    trust = after_scores({}, {"a": 0.02, "b": 0.02, "c": -1.0})
    assert trust == {"a": Trust(0.02, 1), "b": Trust(0.02, 1), "c": Trust(-1.0, 1)}
    steps = 0
    while factors("abc", trust)[2] == 0:
        trust, steps = after_scores(trust, {"a": 0.02, "b": 0.02, "c": 0.02}), steps + 1
    assert steps == 7


def test_who_stays_away_keeps_no_more_than_the_median_of_the_others_and_stays_harmful() -> None:
    trust = after_scores({}, {"a": 0.3, "b": 0.3, "c": 0.3, "d": -0.3})
    for _ in range(12):
        trust = after_scores(trust, {"a": 0.01, "b": 0.01})
    assert factors("abc", trust) == pytest.approx([1.0, 1.0, 1.0], rel=0.01)
    assert factors("abd", trust)[2] == 0 and trust["d"] == Trust(-0.3, 1)
    away = after_scores(trust, {"a": -1.0, "b": -1.0})
    assert away["c"] == trust["c"]  # no median to hold it to


def test_several_scorers_are_heard_by_their_median() -> None:
    assert agreed([{"a": 0.1, "b": 0.1}, {"a": 0.2, "b": -1.0}, {"a": 0.3, "b": 0.2, "c": 0.5}]) == {
        "a": 0.2,
        "b": 0.1,
        "c": 0.5,
    }


@pytest.mark.parametrize("written", [[0.1], [0.1, 0], [0.1, True], [2.0, 1], [math.nan, 1], ["x", 1], None])
def test_what_is_no_trust_is_refused(written: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Trust.from_json(written)


# Merges.


@pytest.mark.parametrize("rule", ["none", "clip", "geometric_median", "centered_clip", "multi_krum"])
def test_who_is_harmful_has_no_weight_under_any_rule_and_the_order_changes_no_bit(rule: str) -> None:
    names = [*"abcdefg"]
    sent, trust = named(rows(7), names), dict.fromkeys(names, 0.01) | {"c": -0.01}
    found = merged(sent, trust, rule)
    assert weights(found)["c"] == 0 and said(found)["c"] is Verdict.HARMFUL
    assert found.merged is not None
    again = merged(sent[::-1], trust, rule)
    assert again.merged is not None and torch.equal(found.merged, again.merged) and found.verdicts == again.verdicts
    before = merged(sent, {}, rule)
    assert Verdict.HARMFUL not in said(before).values()
    level = merged(sent, dict.fromkeys(names, 0.01), rule)
    assert before.merged is not None and level.merged is not None and torch.equal(before.merged, level.merged)


def test_without_a_rule_the_weights_are_the_trust() -> None:
    deltas = rows(4)
    found = merged(named(deltas, "abcd"), {"a": 0.03, "b": 0.01, "c": 0.01, "d": -0.2})
    assert weights(found) == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2, "d": 0.0})
    assert found.merged is not None and torch.allclose(found.merged, deltas[:3].T @ torch.tensor([0.6, 0.2, 0.2]), atol=1e-5)


def test_freshness_multiplies_and_a_harmful_peer_of_an_organisation_takes_its_part_along() -> None:
    deltas = rows(4)
    sent = [contribution(deltas[0], "a", staleness=3), *named(deltas[1:], ["b", "o.1", "o.2"])]
    trust = dict.fromkeys(["a", "b", "o.1"], 0.01) | {"o.2": -0.001}
    found = weights(merged(sent, trust))
    assert found["a"] == pytest.approx(found["b"] * 4**-0.5) and found["o.2"] == 0
    assert found["o.1"] == pytest.approx(found["b"] / 2)
    alone = merged([*sent[:2], contribution(deltas[3], "o.2")], {"a": 0.01, "b": 0.01, "o.2": -0.01})
    assert weights(alone)["o.2"] == 0 and alone.merged is not None


def test_buffers_are_the_median_of_those_that_are_trusted() -> None:
    sent = [contribution(torch.full((4,), value), name) for value, name in zip((1.0, 3.0, 900.0, 901.0), "abcd", strict=True)]
    found = merged(sent, {"a": 0.1, "b": 0.1, "c": 0.1, "d": -0.1}, fragment=BUFFERS)
    assert found.merged is not None and found.merged.tolist() == [3.0] * 4 and said(found)["d"] is Verdict.HARMFUL


# A run in this process.


SCHEMA = Schema((FRAGMENT,))
TARGET = rows(1, seed=9)[0]
PEERS = [*"abcdef", "x", "y"]


def distance(parts: Sequence[Tensor]) -> float:
    """The held-out loss of the run below."""
    return float((parts[0] - TARGET).square().mean())


def run(trust: str, scorer: Scorer | None = None, steps: int = 12, **robust: Any) -> LocalRun:
    """Peers that go a part of the way to the target, each with noise; x and y send that with the sign flipped."""
    config = RunConfig(
        penalty=OFF,
        robust=RobustConfig(trust=trust, **robust),
        sync=SyncConfig(every=1, outer_steps=steps),
        outer=OuterConfig(optimizer="sgd", lr=0.5),
        rounds=RoundsConfig(quorum=1),
        storage=StorageConfig(keep_updates=20),
    )
    run = LocalRun(config, PEERS, [torch.zeros(NUMEL)], scorer=scorer)
    sides = [run.collective(name) for name in PEERS]
    for side in sides:
        side.join(SCHEMA, lambda: [torch.zeros(NUMEL)])
    random = torch.Generator().manual_seed(3)
    for step in range(steps):
        theta = run.state.theta[0].clone()
        for side in sides:
            delta = 0.5 * (theta - TARGET) + 0.2 * torch.randn(NUMEL, generator=random)
            sent = encode("fp32", -delta if side.peer_id in "xy" else delta)
            side.contribute(Contribution(outer_step=step, fragment_id=0, inner_steps=1, tokens=1, payload=sent))
    return run


def verdicts_of(run: LocalRun, outer_step: int) -> dict[str, tuple[Verdict, float]]:
    outcome = run.collective("a").outcome(outer_step - 1, block=False)
    assert isinstance(outcome, Committed)
    return {each.peer_id: (each.verdict, each.weight) for each in outcome.commit.fragments[0].verdicts}


def test_hostile_peers_lose_their_weight_within_three_outer_steps_and_without_trust_they_keep_it() -> None:
    scored = run("loss", partial(scores, loss=distance))
    for step in range(1, 13):
        said = verdicts_of(scored, step)
        weight = {name: round(each, 6) for name, (_, each) in said.items()}
        if step <= 2:  # the scores of the first come with the commit of the second
            assert set(weight.values()) == {0.125}
        else:
            assert weight["x"] == weight["y"] == 0 and said["x"][0] is Verdict.HARMFUL
    blind = run("none")
    assert {verdicts_of(blind, 12)[name] for name in "xy"} == {(Verdict.OK, 0.125)}
    assert distance(scored.state.theta) < 0.1 * distance(blind.state.theta)


def test_with_weights_for_the_whole_model_who_is_harmful_has_none_either() -> None:
    found = run("loss", partial(scores, loss=distance), steps=4, rule="clip", scope="model")
    assert {verdicts_of(found, 4)[name] for name in "xy"} == {(Verdict.HARMFUL, 0.0)}


@pytest.mark.parametrize("silent_from", [0, 3])
def test_a_scorer_that_dies_changes_nothing(silent_from: int) -> None:
    """Before it has said anything all count alike; afterwards what it has said stays."""
    calls = []

    def dies(theta: Sequence[Tensor], sent: Any) -> Mapping[str, float]:
        calls.append(1)
        return scores(theta, sent, distance) if len(calls) <= silent_from else {}

    found = run("loss", dies)
    blind = run("loss")
    if silent_from == 0:
        assert found.state.digest == blind.state.digest and not found.state.trust
    else:
        assert {verdicts_of(found, 12)[name] for name in "xy"} == {(Verdict.HARMFUL, 0.0)}


def test_a_lying_scorer_leaves_a_weight_to_half_of_the_peers() -> None:
    """It says the worst of the honest, and the best of the hostile: it cannot say that of more than half."""

    def lies(theta: Sequence[Tensor], sent: Any) -> Mapping[str, float]:
        return {name: 1.0 if name in "xy" else -1.0 for name, _ in sent}

    assert all(weight == 0.125 for _, weight in verdicts_of(run("loss", lies), 12).values())

    def lies_as_it_can(theta: Sequence[Tensor], sent: Any) -> Mapping[str, float]:
        worth = {"x": 1.0, "y": 1.0, "a": 0.01, "b": 0.01, "c": 0.01}
        return {name: worth.get(name, -1.0) for name, _ in sent}

    weight = {name: each for name, (_, each) in verdicts_of(run("loss", lies_as_it_can), 12).items()}
    assert [name for name in PEERS if weight[name] == 0] == [*"def"] and weight["x"] == pytest.approx(4 * weight["a"])


def test_a_scorer_without_trust_by_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"robust.trust = 'none': must be loss where a scorer is given"):
        run("none", partial(scores, loss=distance))


# The outer state and the settings.


def test_the_trust_is_in_a_checkpoint_to_the_bit_and_damage_is_said() -> None:
    scored = run("loss", partial(scores, loss=distance), steps=4)
    state = scored.state
    written = json.loads(json.dumps(state.metadata()))
    again = OuterState.restore(SCHEMA, state.config, state.to_tensors(), written)
    assert again.trust == state.trust and len(again.trust) == len(PEERS)
    assert "trust" not in OuterState(SCHEMA, state.config, [torch.zeros(NUMEL)]).metadata()
    for damage in ({"a": [2.0, 1]}, {"a": 1}, 3):
        with pytest.raises(StorageError, match="the trust in peers is damaged"):
            OuterState.restore(SCHEMA, state.config, state.to_tensors(), {**written, "trust": damage})


def test_the_settings_go_through_json() -> None:
    config = RunConfig.from_mapping({"robust": {"trust": "loss", "rule": "clip"}})
    assert RunConfig.from_json(config.to_json()) == config and config.robust.scored and config.robust.enabled


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"robust": {"anchors": ["a"]}}, 'robust.anchors has no effect with robust.trust = "loss"'),
        (
            {"robust": {"rule": "median", "hostile": 1}},
            "robust.rule = 'median': must not be median with robust.trust = \"loss\"",
        ),
        (
            {"robust": {"rule": "trimmed_mean", "hostile": 1}},
            "robust.rule = 'trimmed_mean': must not be trimmed_mean with robust",
        ),
        ({"penalty": {"temperature": 2.0}}, 'penalty.temperature has no effect with robust.trust = "loss"'),
        ({"outer": {"direction": "rda"}}, "outer.direction = 'rda': must be mean with robust.trust = \"loss\""),
        ({"outer": {"algorithm": "gossip"}}, "outer.algorithm = 'gossip': must be mean with robust.trust"),
        (
            {"rounds": {"merging": "arrivals", "max_staleness": 8}},
            "rounds.merging = 'arrivals': must be rounds with robust.trust",
        ),
        ({"sync": {"mode": "eager"}}, "sync.mode = 'eager': must not be eager with robust.trust"),
        ({"swarm": {}}, "robust.trust = 'loss': must not be loss with [swarm]: there is no coordinator that keeps"),
        (
            {"aggregators": {"addresses": ["h:1"]}},
            "robust.trust = 'loss': must not be loss with aggregators.addresses: each aggregator has a part",
        ),
        (
            {"secagg": {"enabled": True}, "rounds": {"quorum": 3, "start_peers": 3}},
            "robust.trust = 'loss': must be none with secagg.enabled: a contribution that nobody sees cannot be scored",
        ),
        (
            {"privacy": {"level": "organisation", "delta": 1e-3, "epsilon_max": 8.0}},
            'robust.trust = \'loss\': must be "none" with privacy.level = "organisation"',
        ),
    ],
)
def test_what_it_does_not_go_with_is_said_in_one_line(settings: dict[str, dict[str, Any]], words: str) -> None:
    written = {**SCORED, **settings, "robust": {**SCORED["robust"], **settings.get("robust", {})}}
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_mapping(written)
    assert words in str(refused.value) and "\n" not in str(refused.value)
