"""The outer state with RDA, HeLoCo, stale contributions and Delayed Nesterov: which rule a fragment gets, and what follows."""

import dataclasses

import pytest
import torch
from torch import Tensor

from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RoundsConfig, RunConfig
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState
from edit.reference import delayed_nesterov, heloco, rda
from tests.support.encoded import encode

SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=name, tensors=tuple(TensorSpec(name=f"{name}.{k}", shape=(40,)) for k in range(2)))
        for i, name in enumerate(("embedding", "blocks.0"))
    )
)

ARRIVALS = RoundsConfig(merging="arrivals", max_staleness=8)


def state_of(outer: OuterConfig, rounds: RoundsConfig | None = None, damping: float = 0.0) -> OuterState:
    config = RunConfig(
        outer=outer,
        penalty=PenaltyConfig(enabled=False, damping=damping),
        codec=CodecConfig(up="fp32", down="fp32"),
        rounds=rounds or RoundsConfig(),
    )
    return OuterState(SCHEMA, config, [torch.ones(80), torch.ones(80)])


def vectors(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(80, generator=generator) for _ in range(count)]


def contribution(peer_id: str, delta: Tensor, staleness: int = 0) -> Measured:
    payload = encode("fp32", delta)
    return Measured(peer_id, 10, 100, measure(payload), payload, staleness)


def advance(state: OuterState, contributions: list[Measured]) -> None:
    state.commit(1, "", [state.record(state.reduce(i, contributions)) for i in state.due])


def test_rda_merges_every_fragment_but_embeddings() -> None:
    state = state_of(OuterConfig(optimizer="sgd", lr=1.0, direction="rda"))
    deltas = vectors(3)
    advance(state, [contribution(peer_id, delta) for peer_id, delta in zip("abc", deltas, strict=True)])
    assert torch.allclose(state.theta[0], 1 - sum(deltas, torch.zeros(80)) / 3, atol=1e-6)
    assert torch.allclose(state.theta[1], 1 - rda(deltas, [1 / 3] * 3), atol=1e-6)


def test_heloco_compares_with_the_momentum_of_the_outer_steps_before() -> None:
    state = state_of(OuterConfig(optimizer="nesterov", lr=1.0, momentum=0.5, correct="heloco"))
    first = vectors(1)[0]
    second = torch.cat([-first[:40], first[40:]])
    advance(state, [contribution("a", first)])
    before = state.theta[1]
    assert torch.allclose(before, 1 - 1.5 * first, atol=1e-6), "no momentum before the first outer step: nothing to correct"
    advance(state, [contribution("a", second)])
    corrected = torch.cat([heloco(second[:40], 0.5 * first[:40]), second[40:]])
    assert torch.allclose(state.theta[1], before - (corrected + 0.5 * (0.5 * first + corrected)), atol=1e-5)
    assert not torch.allclose(corrected, second)


def test_arrivals_one_by_one_are_delayed_nesterov() -> None:
    outer = OuterConfig(optimizer="delayed_nesterov", lr=0.5, momentum=0.8, period=3, c=0.1)
    state, deltas = state_of(outer, ARRIVALS), vectors(7)
    for k, delta in enumerate(deltas):
        advance(state, [contribution("abc"[k % 3], delta)])
    assert torch.allclose(state.theta[1], delayed_nesterov(torch.ones(80), deltas, 0.5, 0.8, 3, 0.1)[-1], atol=1e-5)


@pytest.mark.parametrize(
    ("rounds", "damping", "share"), [(RoundsConfig(max_staleness=8), 0.5, 1.0), (ARRIVALS, 0.5, 0.5), (ARRIVALS, 0.0, 1.0)]
)
def test_a_stale_arrival_alone_counts_less_with_damping(rounds: RoundsConfig, damping: float, share: float) -> None:
    state, delta = state_of(OuterConfig(optimizer="sgd", lr=1.0), rounds, damping), vectors(1)[0]
    advance(state, [contribution("a", delta, staleness=3)])
    assert torch.allclose(state.theta[0], 1 - share * delta, atol=1e-6)


def test_a_rollback_does_not_count_as_an_arrival() -> None:
    outer = OuterConfig(optimizer="delayed_nesterov", lr=0.5, momentum=0.8, period=3)
    state, deltas = state_of(outer, ARRIVALS), vectors(3)
    for delta in deltas:
        advance(state, [contribution("a", torch.full((80,), torch.nan))])
        advance(state, [contribution("a", delta)])
    assert torch.allclose(state.theta[1], delayed_nesterov(torch.ones(80), deltas, 0.5, 0.8, 3, 0.0)[-1], atol=1e-5)


@pytest.mark.parametrize("outer", [OuterConfig(), OuterConfig(optimizer="delayed_nesterov"), OuterConfig(direction="rda")])
def test_in_rounds_fresh_contributions_give_the_same_bits_whatever_staleness_is_allowed(outer: OuterConfig) -> None:
    strict, lenient = state_of(outer), state_of(outer, RoundsConfig(max_staleness=8))
    for _ in range(3):
        for state in (strict, lenient):
            advance(state, [contribution(peer_id, delta) for peer_id, delta in zip("abc", vectors(3), strict=True)])
    assert strict.digest == lenient.digest
    aged = [dataclasses.replace(contribution("b", vectors(2)[1]), staleness=2), contribution("a", vectors(1)[0])]
    advance(strict, [dataclasses.replace(one, staleness=0) for one in aged])
    advance(lenient, aged)
    assert strict.digest != lenient.digest
