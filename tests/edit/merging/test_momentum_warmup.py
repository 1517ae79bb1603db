"""Warm-up and restarts of the outer momentum: the oracle's steps, from any checkpoint on, for each group of fragments."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.errors import ConfigError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState
from edit.reference import co2, nesterov, planned_momentum
from tests.support.encoded import encode

NUMEL, WARMUP = 50, 4
SCHEMA = Schema(
    tuple(FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"f{i}.w", shape=(NUMEL,)),)) for i in range(2))
)


def configured(optimizer: str = "nesterov", warmup: int = WARMUP, groups: int = 1, restarts: tuple[int, ...] = ()) -> RunConfig:
    return RunConfig(
        sync=SyncConfig(every=4, groups=groups),
        penalty=PenaltyConfig(enabled=False),
        outer=OuterConfig(optimizer=optimizer, lr=0.7, momentum=0.8, momentum_warmup=warmup, momentum_restarts=restarts),
        codec=CodecConfig(up="fp32", down="fp32"),
    )


def begun(config: RunConfig) -> OuterState:
    generator = torch.Generator().manual_seed(3)
    return OuterState(SCHEMA, config, [torch.randn(NUMEL, generator=generator) for _ in range(2)])


def delta(outer_step: int, i: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * outer_step + i))


def advance(state: OuterState, value: float | None = None) -> None:
    """Take an outer step with `delta`, or with these values."""
    vectors = {i: delta(state.outer_step, i) if value is None else torch.full((NUMEL,), value) for i in state.due}
    encoded = {i: encode("fp32", vector) for i, vector in vectors.items()}
    merged = [state.record(state.reduce(i, [Measured("a", 1, 1, measure(each), each)])) for i, each in encoded.items()]
    state.commit(state.outer_step + 1, "all in", merged)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("optimizer", ["nesterov", "co2"])
@pytest.mark.parametrize(("warmup", "restarts"), [(WARMUP, ()), (0, (2, 5)), (2, (3, 6)), (WARMUP, (1,))])
def test_each_step_is_the_oracles_with_the_momentum_in_force(
    optimizer: str, groups: int, warmup: int, restarts: tuple[int, ...]
) -> None:
    state = begun(configured(optimizer, warmup, groups, restarts))
    oracle = [(part.clone(), torch.zeros(NUMEL)) for part in state.theta]
    exchanges = [0, 0]
    for _ in range(7 * groups):
        step, due = state.outer_step, state.due
        advance(state)
        for i in due:
            mu, anew = planned_momentum(0.8, exchanges[i], warmup, restarts)
            exchanges[i] += 1
            theta, momentum = oracle[i]
            momentum = torch.zeros(NUMEL) if anew else momentum
            if optimizer == "nesterov":
                oracle[i] = nesterov(theta, momentum, delta(step, i), 0.7, mu)
            else:
                oracle[i] = co2(theta, momentum, delta(step, i), 0.7, mu, gap=1.0, clip=0.0)
            torch.testing.assert_close(state.theta[i], oracle[i][0], rtol=1e-5, atol=1e-5)
    assert exchanges == [7, 7]


@pytest.mark.parametrize("checkpoint", [1, 3, 6])
@pytest.mark.parametrize("restarts", [(), (3, 4)])
def test_what_is_restored_goes_on_with_the_same_bits(checkpoint: int, restarts: tuple[int, ...]) -> None:
    config = configured(restarts=restarts)
    state = begun(config)
    for _ in range(checkpoint):
        advance(state)
    tensors = {name: tensor.clone() for name, tensor in state.to_tensors().items()}
    again = OuterState.restore(SCHEMA, config, tensors, json.loads(json.dumps(state.metadata())))
    for _ in range(3):
        advance(state)
        advance(again)
        assert again.digest == state.digest


def test_a_restart_counts_where_the_outer_step_is_rolled_back() -> None:
    config = configured(warmup=0, restarts=(2,))
    state = begun(config)
    advance(state)
    advance(state)
    advance(state, value=float("nan"))
    expected = nesterov(state.theta[0].clone(), torch.zeros(NUMEL), delta(3, 0), 0.7, 0.8)[0]
    advance(state)
    torch.testing.assert_close(state.theta[0], expected, rtol=1e-5, atol=1e-5)


def test_it_changes_the_run_and_without_it_the_configuration_is_as_before() -> None:
    warm, cold = begun(configured()), begun(configured(warmup=0))
    for _ in range(3):
        advance(warm)
        advance(cold)
    assert warm.digest != cold.digest
    assert not {"momentum_warmup", "momentum_restarts"} & json.loads(configured(warmup=0).to_json())["outer"].keys()
    again = RunConfig.from_json(configured(restarts=(3, 9)).to_json()).outer
    assert (again.momentum_warmup, again.momentum_restarts) == (WARMUP, (3, 9))


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"outer": {"momentum_warmup": 3, "preset": "auto"}}, r'momentum_warmup .*must be 0 with outer\.preset = "auto"'),
        ({"outer": {"momentum_warmup": 3, "correct": "heloco"}}, r'momentum_warmup .*must be 0 with outer\.correct = "heloco"'),
        (
            {"outer": {"momentum_warmup": 3}, "sync": {"mode": "eager"}, "codec": {"up": "int8"}},
            r'momentum_warmup .*must be 0 with sync\.mode = "eager"',
        ),
        ({"outer": {"momentum_warmup": 3, "optimizer": "sgd"}}, r'momentum_warmup has no effect with outer\.optimizer = "sgd"'),
        ({"outer": {"momentum_warmup": -1}}, r"outer\.momentum_warmup"),
        (
            {"outer": {"momentum_restarts": [3], "preset": "auto"}},
            r"momentum_restarts = \[3\]: must be \[\] with outer\.preset",
        ),
        ({"outer": {"momentum_restarts": [3], "correct": "heloco"}}, r"momentum_restarts .*must be \[\] with outer\.correct"),
        (
            {"outer": {"momentum_restarts": [3]}, "sync": {"mode": "eager"}, "codec": {"up": "int8"}},
            r'momentum_restarts .*must be \[\] with sync\.mode = "eager"',
        ),
        ({"outer": {"momentum_restarts": [3], "optimizer": "adam"}}, r"momentum_restarts has no effect with outer\.optimizer"),
        ({"outer": {"momentum_restarts": [0]}}, r"momentum_restarts .*from 1 on, ascending"),
        ({"outer": {"momentum_restarts": [4, 4]}}, r"momentum_restarts .*from 1 on, ascending"),
        ({"outer": {"momentum_restarts": list(range(1, 1002))}}, r"momentum_restarts .*at most 1000"),
        ({"outer": {"momentum_restarts": ["3"]}}, r"momentum_restarts: must be a list of whole numbers"),
        ({"outer": {"momentum_restarts": 3}}, r"momentum_restarts: must be a list of whole numbers"),
    ],
)
def test_what_it_does_not_go_with_is_named(mapping: dict[str, dict[str, object]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig.from_mapping(mapping)
