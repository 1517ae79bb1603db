"""What the outer state does where H changes: rates and momentum in force, norms that begin anew, after a restart too."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from edit.config.in_force import in_force
from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState
from edit.records import Verdict
from edit.reference import nesterov
from tests.support.encoded import encode

NUMEL = 50
SCHEMA = Schema(
    tuple(FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"f{i}.w", shape=(NUMEL,)),)) for i in range(2))
)


def configured(milestones: tuple[tuple[int, int], ...] = ((4, 64),), groups: int = 1, **sections: object) -> RunConfig:
    values: dict[str, object] = {
        "sync": SyncConfig(every=2, groups=groups, milestones=milestones),
        "penalty": PenaltyConfig(enabled=False),
        "outer": OuterConfig(lr=0.7, momentum=0.8, mean_steps=2, correlation=0.3 if milestones else 0.0),
        "codec": CodecConfig(up="fp32", down="fp32"),
    }
    return RunConfig(**values | sections)  # type: ignore[arg-type]


def begun(config: RunConfig) -> OuterState:
    generator = torch.Generator().manual_seed(3)
    return OuterState(SCHEMA, config, [torch.randn(NUMEL, generator=generator) for _ in range(2)])


def delta(outer_step: int, i: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * outer_step + i))


def advance(state: OuterState, longer: float = 1.0) -> set[Verdict]:
    steps = state.config.sync.every_at(state.outer_step)
    encoded = {i: encode("fp32", longer * delta(state.outer_step, i)) for i in state.due}
    merged = [state.record(state.reduce(i, [Measured("a", steps, 1, measure(each), each)])) for i, each in encoded.items()]
    verdicts = {verdict.verdict for record in merged for verdict in record.verdicts}
    state.commit(state.outer_step + 1, "all in", merged)
    return verdicts


def again(state: OuterState) -> OuterState:
    tensors = {name: tensor.clone() for name, tensor in state.to_tensors().items()}
    return OuterState.restore(SCHEMA, state.config, tensors, json.loads(json.dumps(state.metadata())))


def test_each_step_is_the_oracles_with_the_rate_and_momentum_in_force() -> None:
    config = configured()
    state = begun(config)
    oracle = [(part.clone(), torch.zeros(NUMEL)) for part in state.theta]
    rates = []
    for step in range(7):
        now = in_force(config, step)
        rates.append(now.lr)
        advance(state)
        for i in range(2):
            oracle[i] = nesterov(*oracle[i], delta(step, i), now.lr, now.momentum)
            torch.testing.assert_close(state.theta[i], oracle[i][0], rtol=1e-5, atol=1e-5)
    assert rates[:2] == [1.0, 1.0] and rates[4:] == [0.7] * 3, "H 64 is that of most outer steps"
    assert rates[2] == rates[3] > 0.7


def test_mean_steps_are_the_plain_mean() -> None:
    warm, plain = begun(configured()), begun(configured((), outer=OuterConfig(optimizer="sgd", lr=1.0)))
    for equal in (True, True, False):
        advance(warm)
        advance(plain)
        assert (warm.digest == plain.digest) is equal


@pytest.mark.parametrize("checkpoint", [1, 2, 4, 5])
def test_a_restart_goes_on_with_the_same_bits(checkpoint: int) -> None:
    state = begun(configured(penalty=PenaltyConfig(observations=2)))
    for _ in range(checkpoint):
        advance(state)
    restarted = again(state)
    for _ in range(3):
        advance(state)
        advance(restarted)
        assert restarted.metadata() == state.metadata()


@pytest.mark.parametrize("groups", [1, 2])
def test_norms_that_follow_h_are_no_anomaly(groups: int) -> None:
    """32 times the steps give 32 times the norm: alone, without a round's median, the detector would take it for a fault."""
    state = begun(configured(((8, 64),), groups, penalty=PenaltyConfig(observations=2), outer=OuterConfig()))
    verdicts = [advance(state) for _ in range(8)]
    for _ in range(2):
        state = again(state)
        verdicts += [advance(state, longer=32.0) for _ in range(groups)]
    assert all(each == {Verdict.OK} for each in verdicts)


def test_without_a_milestone_they_are() -> None:
    state = begun(configured((), penalty=PenaltyConfig(observations=2), outer=OuterConfig()))
    for _ in range(8):
        assert advance(state) == {Verdict.OK}
    assert advance(state, longer=32.0) == {Verdict.ANOMALOUS}
