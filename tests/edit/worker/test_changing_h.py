"""H that changes during the run, at its peers: against the oracle by hand, over interruptions, for who joins later."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edit import reference
from edit.config.in_force import in_force
from edit.config.run import OuterConfig, PenaltyConfig, RunConfig, SyncConfig
from edit.local import LocalRun
from edit.replica.replica import Replica
from edit.worker.worker import EditWorker, WorkerConfig
from tests.edit.worker.test_checkpoint import MODES, trained
from tests.edit.worker.test_modes import PEERS, Loop, close
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.trainee import EXACT, config

MILESTONES = ((2, 5), (4, 2))


def run_of(outer: OuterConfig, every: int = 3, milestones: tuple[tuple[int, int], ...] = MILESTONES, **sync: Any) -> RunConfig:
    return config(sync=SyncConfig(every=every, milestones=milestones, outer_steps=7, **sync), outer=outer)


def by_hand(settings: RunConfig) -> list[list[Tensor]]:
    """theta after each outer step: H steps of each peer, their mean, Nesterov with what is in force."""
    loops = [Loop(seed) for seed in range(len(PEERS))]
    now, taken, history = Loop(0).replica.local(), 0, []
    momenta = [torch.zeros(()) for _ in now]
    for outer_step in range(settings.sync.outer_steps):
        values, local = in_force(settings, outer_step), [list(now) for _ in loops]
        for _ in range(values.every):
            taken += 1
            local = [loop.naive(own, taken) for loop, own in zip(loops, local, strict=True)]
        sent = [dict(zip(PEERS, each, strict=True)) for each in zip(*local, strict=True)]
        merged = [
            reference.diloco(theta, momentum, of, values.lr, values.momentum)
            for theta, momentum, of in zip(now, momenta, sent, strict=True)
        ]
        now, momenta = [theta for theta, _ in merged], [momentum for _, momentum in merged]
        history.append(list(now))
    return history


def ours(settings: RunConfig) -> tuple[list[list[Tensor]], str]:
    """theta after each outer step, by three workers; and the run's digest at the end."""
    run, seen = LocalRun(settings, PEERS, theta=Loop(0).replica.local()), list[list[Tensor]]()
    loops = [Loop(seed) for seed in range(len(PEERS))]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(EditWorker(loop.model, loop.optimizer, run.collective(name), WorkerConfig.of(settings)))
            for name, loop in zip(PEERS, loops, strict=True)
        ]
        for taken in range(1, settings.sync.inner_steps_before(7) + 1):
            for loop in loops:
                loop.step()
            assert run.state.outer_step == max(step for step in range(8) if settings.sync.inner_steps_before(step) <= taken)
            if len(seen) < run.state.outer_step:
                seen.append(run.state.theta)
        assert run.state.outer_step == 7
        for worker in workers:
            worker.synchronize()
        assert {worker.digest for worker in workers} == {run.state.digest}
    return seen, run.state.digest


@pytest.mark.parametrize(
    "outer",
    [OuterConfig(lr=0.7, momentum=0.5), OuterConfig(lr=0.7, momentum=0.5, mean_steps=2, correlation=0.4)],
    ids=["constant", "in force"],
)
def test_it_is_the_oracles(outer: OuterConfig) -> None:
    settings = run_of(outer)
    seen, digest = ours(settings)
    close(seen, by_hand(settings))
    assert ours(run_of(outer, mode="forward"))[1] == digest


@pytest.mark.parametrize("mix", ["replay", "lerp"])
def test_behind_an_overlap_each_outer_step_has_its_inner_steps(mix: str) -> None:
    ours(run_of(OuterConfig(lr=0.7, momentum=0.5), mode="delayed", delay=2, mix=mix))


def test_with_groups_too() -> None:
    settings = run_of(OuterConfig(lr=0.7, momentum=0.5), every=2, milestones=((2, 6), (4, 4)), groups=2)
    assert settings.sync.inner_steps_before(7) == 2 + 6 + 6
    ours(settings)


def test_an_average_at_every_step_is_data_parallel_descent() -> None:
    """The warm-up over the carrier: with plain inner descent the mean of all steps is one step with the mean gradient."""
    sync = SyncConfig(every=1, outer_steps=6, milestones=((4, 2),))
    outer = OuterConfig(lr=0.7, momentum=0.5, mean_steps=4)
    run = LocalRun(config(sync=sync, outer=outer), ("a", "b"))
    models = [small_mlp(seed=1) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    batches = [regression_batches(seed) for seed in (1, 2)]
    with ExitStack() as stack:
        for name, model, optimizer in zip(("a", "b"), models, optimizers, strict=False):
            settings = WorkerConfig.of(config(sync=sync, outer=outer))
            stack.enter_context(EditWorker(model, optimizer, run.collective(name), settings))
        for _ in range(4):
            drawn = [next(each) for each in batches]
            for model, optimizer, batch in zip(models, optimizers, drawn, strict=False):
                train_step(model, optimizer, batch)
            optimizers[2].zero_grad()
            for inputs, targets in drawn:
                (nn.functional.mse_loss(models[2](inputs), targets) / 2).backward()
            optimizers[2].step()
        assert run.state.outer_step == 4
        for mine, averaged in zip(Replica(models[2]).local(), run.state.theta, strict=True):
            torch.testing.assert_close(averaged, mine, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.covering
@pytest.mark.parametrize(("save_after", "die_after"), [(5, 9), (7, 7), (8, 16)])
@pytest.mark.parametrize("kind", ["blocking", "delayed"])
def test_an_interruption_around_a_change_does_not_show(kind: str, save_after: int, die_after: int) -> None:
    """H is 3 until inner step 6, 7 until step 13, then 2; the steps between saving and dying are made twice."""
    sync = SyncConfig(every=3, milestones=((2, 7), (3, 2)), strict=True, **MODES[kind])
    settings = RunConfig(sync=sync, outer=OuterConfig(lr=0.7, momentum=0.5), penalty=PenaltyConfig(), codec=EXACT)
    settings = dataclasses.replace(settings, storage=dataclasses.replace(settings.storage, keep_updates=8))
    losses, theta, local = trained(settings)
    again = trained(settings, save_after, die_after)
    assert (again[0], again[1]) == (losses, theta)
    assert all(torch.equal(a, b) for a, b in zip(again[2], local, strict=True))


def test_who_joins_after_a_change_takes_the_steps_in_force() -> None:
    sync = SyncConfig(every=2, outer_steps=9, milestones=((2, 4),))
    settings = config(sync=sync)
    run = LocalRun(settings, ("a", "b"))
    run.leave("b")
    with ExitStack() as stack:
        early, late = Loop(0), Loop(1)
        stack.enter_context(EditWorker(early.model, early.optimizer, run.collective("a"), WorkerConfig.of(settings)))
        for _ in range(2 * 2 + 4):
            early.step()
        assert run.state.outer_step == 3
        worker = EditWorker(late.model, late.optimizer, run.collective("b"), WorkerConfig.of(settings))
        stack.enter_context(worker)
        for _ in range(4):
            assert run.state.outer_step == 3
            early.step()
            late.step()
        assert run.state.outer_step == 4
        worker.synchronize()
        assert worker.last_commit is not None and worker.last_commit.has("b")
