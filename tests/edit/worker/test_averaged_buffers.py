"""Averaged buffers where a peer moves onto outer parameters that it did not train from: they stay, or become the run's."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from edit.collective import Collective
from edit.config.run import CodecConfig, OuterConfig, RunConfig, StorageConfig, SyncConfig
from edit.errors import ConfigError
from edit.local import LocalRun
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.sparing import SparingCollective
from tests.support.trainee import config


class Peer:
    def __init__(self, settings: RunConfig, carrier: Collective, saved: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(64)
        self.model = nn.Sequential(nn.Linear(64, 64), self.norm)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        own = dataclasses.replace(WorkerConfig.of(settings), buffers="average")
        self.carrier, self.worker = carrier, EditWorker(self.model, self.optimizer, carrier, own)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.worker.load_state_dict(saved["worker"])
        self.worker.__enter__()

    def steps(self, count: int, scale: float) -> None:
        for _ in range(count):
            self.model(scale * (torch.randn(32, 64) + 1)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def leave(self) -> None:
        self.worker.__exit__(KeyboardInterrupt, None, None)


def run_of(every: int, down: str, keep_updates: int) -> tuple[LocalRun, RunConfig]:
    settings = config(
        sync=SyncConfig(every=every, outer_steps=50),
        outer=OuterConfig(optimizer="sgd", lr=1.0),
        codec=CodecConfig(up="fp32", down=down),
        storage=StorageConfig(keep_updates=keep_updates),
    )
    return LocalRun(settings, ["a", "b"]), settings


def test_a_snapshot_in_the_middle_of_training_leaves_no_negative_variance() -> None:
    """Its own variance is small, that of the run has fallen far: the sum of both changes would be below 0."""
    run, settings = run_of(every=4, down="fp32", keep_updates=1)
    a, b = (Peer(settings, run.collective(name)) for name in "ab")
    a.steps(3, scale=0.01)
    own, before = a.norm.running_var.clone(), a.worker.outer_state_dict()["1.running_var"]
    run.leave("a")
    b.steps(12, scale=0.01)
    b.worker.synchronize()
    assert torch.all(0.9 * own + b.worker.outer_state_dict()["1.running_var"] - before < 0)
    a.steps(1, scale=0.01)
    assert "no longer kept" in a.worker.last_reason and a.worker.outer_step == 3
    assert torch.all(a.norm.running_var > 0)
    for peer in (a, b):
        peer.leave()


@pytest.mark.parametrize("by_updates", [False, True])
def test_who_begins_with_the_runs_parameters_begins_with_its_buffers(by_updates: bool) -> None:
    run, settings = run_of(every=1, down="int8", keep_updates=8)
    first = Peer(settings, run.collective("a")), Peer(settings, run.collective("b"))
    for each in first:
        each.steps(1, scale=1.0)
    for each in first:
        each.worker.synchronize()
    saved = copy.deepcopy({"model": first[0].model.state_dict(), "worker": first[0].worker.state_dict()})
    first[0].leave()
    run.leave("a")
    for scale in (3.0, 5.0, 7.0):
        first[1].steps(1, scale)
        first[1].worker.synchronize()
    carrier = run.collective("a")
    back = Peer(settings, SparingCollective(carrier) if by_updates else carrier, saved)
    if isinstance(back.carrier, SparingCollective):
        assert (back.carrier.begins_at, back.carrier.fetched, back.carrier.snapshots) == (1, [], 0)
    theta = back.worker.outer_state_dict()
    assert back.worker.outer_step == 4 and back.worker.digest == run.state.digest
    assert all(torch.equal(value, theta[name]) for name, value in back.model.state_dict().items() if name in theta)
    assert "1.running_mean" in theta and not torch.equal(theta["1.running_mean"], saved["model"]["1.running_mean"])
    for each in (back, first[1]):
        each.leave()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_exchanged_and_not_finite_is_refused_on_entering(persistent: bool) -> None:
    """A causal mask of -inf: no peer's buffers would ever be merged, BatchNorm's neither."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1), persistent=persistent)
    run, settings = run_of(every=1, down="fp32", keep_updates=1)
    own = dataclasses.replace(WorkerConfig.of(settings), buffers="average")
    worker = EditWorker(model, torch.optim.SGD(model.parameters(), lr=1e-3), run.collective("a"), own)
    if not persistent:
        with worker:
            assert "1.running_mean" in worker.outer_state_dict() and "mask" not in worker.outer_state_dict()
            run.leave("a")
        return
    with pytest.raises(
        ConfigError, match=r'^buffers = "average": mask is not finite, .* persistent=False .* buffers = "local"$'
    ):
        worker.__enter__()
