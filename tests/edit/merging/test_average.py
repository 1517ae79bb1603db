"""The average of theta over outer steps: the oracle's, bit for bit after a restart, and training does not see it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from edit.config.average import AverageConfig
from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RunConfig
from edit.errors import ConfigError, StorageError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.average import Average
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import MergeRecord, OuterState
from edit.reference import averaged
from tests.support.encoded import encode

NUMELS = (70_000, 5)  # of more than one piece, and of less
SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"f{i}.w", shape=(numel,)),))
        for i, numel in enumerate(NUMELS)
    )
)
EMA, LAST = AverageConfig(kind="ema", decay=0.7), AverageConfig(kind="last", last=3)


def configured(average: AverageConfig) -> RunConfig:
    return RunConfig(
        penalty=PenaltyConfig(enabled=False),
        outer=OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.6),
        codec=CodecConfig(up="fp32", down="int8"),
        average=average,
    )


def begun(average: AverageConfig) -> OuterState:
    generator = torch.Generator().manual_seed(7)
    return OuterState(SCHEMA, configured(average), [torch.randn(numel, generator=generator) for numel in NUMELS])


def advance(state: OuterState) -> list[MergeRecord]:
    generator = torch.Generator().manual_seed(100 + state.outer_step)
    deltas = [encode("fp32", 0.1 * torch.randn(numel, generator=generator)) for numel in NUMELS]
    records = [state.record(state.reduce(i, [Measured("a", 1, 1, measure(d), d)])) for i, d in enumerate(deltas)]
    state.commit(state.outer_step + 1, "all in", list(records))
    return records


def restored(state: OuterState, average: AverageConfig) -> OuterState:
    tensors = {name: tensor.clone() for name, tensor in state.to_tensors().items()}
    return OuterState.restore(SCHEMA, configured(average), tensors, json.loads(json.dumps(state.metadata())))


@pytest.mark.parametrize(("average", "oracle"), [(EMA, {"decay": 0.7}), (LAST, {"last": 3})], ids=["ema", "last"])
def test_it_is_the_oracles_and_training_is_as_without_it(average: AverageConfig, oracle: dict[str, float]) -> None:
    state, without, seen = begun(average), begun(AverageConfig()), list[list[Tensor]]()
    assert all(map(torch.equal, state.averaged, state.theta)), "before the first outer step it is theta"
    for _ in range(5):
        advance(state)
        advance(without)
        seen.append([part.clone() for part in state.theta])
        for i, mean in enumerate(state.averaged):
            expected = averaged([thetas[i] for thetas in seen], **oracle)  # type: ignore[arg-type]
            torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)
    assert state.digest == without.digest
    assert not torch.equal(state.averaged[0], state.theta[0])
    assert not any(name.startswith("average") for name in without.to_tensors())
    assert "averaged" not in without.metadata()


@pytest.mark.parametrize("average", [EMA, LAST], ids=["ema", "last"])
@pytest.mark.parametrize("checkpoint", [0, 1, 4])
def test_checkpoint_and_replay_give_the_same_bits(average: AverageConfig, checkpoint: int) -> None:
    state, records = begun(average), list[list[MergeRecord]]()
    for _ in range(checkpoint):
        advance(state)
    again = restored(state, average)
    for _ in range(4):
        records.append(advance(state))
    for number, of_round in enumerate(records):
        again.commit(checkpoint + number + 1, "all in", list(of_round))
    assert again.digest == state.digest and again.metadata() == state.metadata()
    assert again.to_tensors().keys() == state.to_tensors().keys()
    assert all(torch.equal(tensor, again.to_tensors()[name]) for name, tensor in state.to_tensors().items())
    assert all(map(torch.equal, state.averaged, again.averaged))


def test_memory_is_what_the_setting_says() -> None:
    for average in (EMA, LAST):
        state = begun(average)
        for _ in range(6):
            advance(state)
        kept = [tensor for name, tensor in state.to_tensors().items() if name.startswith("average")]
        assert sum(4 * tensor.numel() for tensor in kept) == average.bytes_per_parameter * sum(NUMELS)


def test_an_outer_step_that_moves_nothing_is_not_counted() -> None:
    state = begun(LAST)
    for _ in range(3):
        advance(state)
    before = state.averaged
    nothing = [
        MergeRecord(
            outer_step=3, fragment_id=i, payload=None, residual=None, verdicts=(), statistics={}, merged_norm=0.0, clip=1.0
        )
        for i in range(len(NUMELS))
    ]
    state.commit(4, "rolled back", nothing)
    assert state.outer_step == 4 and all(map(torch.equal, state.averaged, before))
    assert state.metadata()["averaged"] == [3, 3]


def test_another_kind_begins_anew_after_a_restart() -> None:
    state = begun(EMA)
    advance(state)
    advance(state)
    other = restored(state, LAST)
    assert all(map(torch.equal, other.averaged, other.theta))
    off = restored(state, AverageConfig())
    assert not any(name.startswith("average") for name in off.to_tensors())
    with pytest.raises(ConfigError, match=r"average\.kind = 'none': keeps no average; set it to ema or last"):
        _ = off.averaged
    on = restored(off, EMA)
    advance(on)
    assert torch.equal(on.averaged[0], on.theta[0]), "of the one outer step since"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"averaged": [1]}, "averaged is not a list of 2"),
        ({"averaged": "much"}, "averaged is not a list of 2"),
        ({"averaged": [3, 2]}, "the average of fragment 0 is of 3 outer steps"),
        ({"averaged": [-1, 2]}, "the average of fragment 0 is of -1 outer steps"),
        ({"averaged": [2, 2.0]}, r"the average of fragment 1 is of 2\.0 outer steps"),
    ],
)
def test_a_damaged_count_is_refused(change: dict[str, object], says: str) -> None:
    state = begun(EMA)
    advance(state)
    advance(state)
    with pytest.raises(StorageError, match=says):
        OuterState.restore(SCHEMA, configured(EMA), state.to_tensors(), {**state.metadata(), **change})


@pytest.mark.parametrize(("average", "name"), [(EMA, "average.1"), (LAST, "average.1.0")], ids=["ema", "last"])
@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(5, dtype=torch.float64), torch.zeros(1, 5)])
def test_a_tensor_that_does_not_fit_is_refused(average: AverageConfig, name: str, wrong: Tensor) -> None:
    state = begun(average)
    advance(state)
    advance(state)
    with pytest.raises(StorageError, match=f"{name} is not 5 fp32 elements"):
        OuterState.restore(SCHEMA, configured(average), {**state.to_tensors(), name: wrong}, state.metadata())


@pytest.mark.parametrize("config", [EMA, LAST], ids=["ema", "last"])
def test_a_mean_of_the_largest_numbers_is_finite(config: AverageConfig) -> None:
    average, largest = Average(config, 3), torch.full((3,), torch.finfo(torch.float32).max)
    for theta in (largest, -largest, -largest, largest, largest):
        average.take(-theta if average.steps else None, theta)
        assert bool(average.of(theta).isfinite().all())


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r'average\.kind .*must be none with outer\.algorithm = "gossip"'):
        RunConfig.from_mapping({"outer": {"algorithm": "gossip"}, "average": {"kind": "ema"}})
    with pytest.raises(ConfigError, match=r'average\.last has no effect with average\.kind = "ema"'):
        RunConfig.from_mapping({"average": {"kind": "ema", "last": 3}})
    with pytest.raises(ConfigError, match=r'average\.decay has no effect with average\.kind = "none"'):
        RunConfig.from_mapping({"average": {"decay": 0.5}})
    with pytest.raises(ConfigError, match=r"average\.last"):
        RunConfig.from_mapping({"average": {"kind": "last", "last": 17}})


def test_where_it_is_off_peers_receive_the_configuration_that_they_always_did() -> None:
    assert "average" not in json.loads(RunConfig().to_json())
    config = dataclasses.replace(RunConfig(), average=LAST)
    assert RunConfig.from_json(config.to_json()) == dataclasses.replace(config, server=RunConfig().server)
