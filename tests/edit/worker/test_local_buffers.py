"""Buffers that a peer keeps as its own, after a contribution with NaN."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from edit.config.run import OuterConfig, SyncConfig
from edit.local import LocalRun
from edit.records import Verdict
from edit.worker.local_buffers import LocalBuffers
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.trainee import config

NAN, INF = math.nan, math.inf


def module(**buffers: Tensor) -> nn.Module:
    made = nn.Module()
    for name, buffer in buffers.items():
        made.register_buffer(name, buffer)
    return made


@pytest.mark.parametrize("overlap", [{}, {"mode": "forward"}, {"mode": "delayed", "delay": 1}])
def test_buffers_are_finite_again_after_a_contribution_with_nan(overlap: dict[str, Any]) -> None:
    settings = config(sync=SyncConfig(every=2, outer_steps=50, **overlap), outer=OuterConfig(optimizer="sgd", lr=1.0))
    run, peers = LocalRun(settings, ["good", "bad"]), []
    with ExitStack() as entered:
        for name in ("good", "bad"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), spectral_norm(nn.Linear(8, 3)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            worker = EditWorker(model, optimizer, run.collective(name), WorkerConfig.of(settings))
            peers.append((model, optimizer, entered.enter_context(worker)))
        verdicts = []
        for step in range(8):
            for model, optimizer, worker in peers:
                bad = step == 2 and worker is peers[1][2]
                (model(torch.randn(16, 6)).square().mean() * (NAN if bad else 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            verdicts.append(worker.last_verdict)
        lost = [name for name, buffer in model.named_buffers() if not buffer.isfinite().all()]
    assert Verdict.NONFINITE in verdicts and (verdicts[-1], lost) == (Verdict.OK, [])


def test_each_buffer_is_again_as_at_the_last_contribution_at_which_it_was_finite(caplog: pytest.LogCaptureFixture) -> None:
    mean, mask, least = torch.zeros(2), torch.tensor([0.0, -INF]), torch.full((2,), INF)
    buffers = LocalBuffers(module(mean=mean, mask=mask, least=least, count=torch.zeros(1, dtype=torch.int64)))
    mean.fill_(1.0)
    least.fill_(2.0)
    buffers.keep()
    mean.fill_(NAN)
    buffers.keep()
    least.fill_(-INF)
    buffers.restore()
    assert (mean.tolist(), least.tolist(), mask.tolist()) == ([1.0, 1.0], [2.0, 2.0], [0.0, -INF])
    mean.fill_(3.0)
    buffers.restore()
    assert mean.tolist() == [3.0, 3.0] and not caplog.records


def test_nan_of_the_first_round_is_undone_too() -> None:
    mean = torch.ones(2)
    buffers = LocalBuffers(module(mean=mean))
    mean.fill_(NAN)
    buffers.keep()
    buffers.restore()
    assert mean.tolist() == [1.0, 1.0]


def test_a_buffer_of_which_nothing_finite_is_kept_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """One that was NaN on entering, and a large one that was constant, of which no copy is kept."""
    mean, exchanged = torch.ones(1), torch.ones(1)
    model = module(entered=torch.tensor([NAN]), cache=torch.ones(1 << 17), exchanged=exchanged, mean=mean)
    buffers = LocalBuffers(model, {id(exchanged)})
    mean.zero_()
    buffers.keep()
    for buffer in model.buffers():
        buffer.fill_(NAN)
    buffers.restore()
    buffers.restore()
    assert [record.getMessage().split(": ")[1].split(";")[0] for record in caplog.records] == ["entered, cache"]
    assert mean.item() == 0.0


def test_a_buffer_of_another_shape_or_type_than_its_copy_is_copied_anew() -> None:
    model = module(cache=torch.ones(2), mean=torch.ones(2))
    buffers = LocalBuffers(model)
    model.register_buffer("cache", torch.ones(3))
    model.to(torch.float64)
    buffers.keep()
    for buffer in model.buffers():
        buffer.fill_(NAN)
    buffers.restore()
    assert [buffer.tolist() for buffer in model.buffers()] == [[1.0] * 3, [1.0] * 2]


def test_statistics_that_are_first_written_in_a_later_round_are_kept_too() -> None:
    mean = torch.zeros(2)
    buffers = LocalBuffers(module(mean=mean))
    buffers.keep()  # frozen until here, as in a warm-up
    mean.fill_(1.0)
    buffers.keep()
    mean.fill_(NAN)
    buffers.restore()
    assert mean.tolist() == [1.0, 1.0]


def test_an_expanded_buffer_and_one_without_a_shape_yet() -> None:
    lazy, other = nn.LazyBatchNorm1d(affine=False), module(scale=torch.ones(1).expand(1 << 20))
    buffers = LocalBuffers(nn.Sequential(lazy, other))
    other.scale = torch.tensor(2.0).expand(1 << 20)
    buffers.keep()
    lazy(torch.ones(4, 2))
    buffers.keep()
    assert isinstance(lazy.running_mean, Tensor)
    means = lazy.running_mean.tolist()
    other.scale = torch.tensor(NAN).expand(1 << 20)
    lazy.running_mean.fill_(NAN)
    buffers.restore()
    assert (other.scale[-1].item(), lazy.running_mean.tolist()) == (2.0, means)


def test_a_buffer_that_shares_a_parameters_memory_is_left_to_the_outcome() -> None:
    """A write to it would count as one to the parameter after it was sent, and mode `forward` would refuse to go on."""
    model = nn.Linear(2, 2)
    model.register_buffer("table", model.weight.detach())
    buffers = LocalBuffers(model, {id(model.weight), id(model.bias)})
    with torch.no_grad():
        model.weight.fill_(NAN)
        version = model.weight._version
        buffers.restore()
    assert model.weight._version == version and model.weight.isnan().all()
