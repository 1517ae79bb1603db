"""Modes of exchange against the naive oracle: whole trainings of several peers through LocalRun, in one thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from edit import reference
from edit.config.run import CodecConfig, FragmentCodec, OuterConfig, PrivacyConfig, RunConfig, SyncConfig
from edit.errors import ConfigError
from edit.local import LocalRun
from edit.replica.replica import Replica
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.models import TinyTransformer, token_batches, train_step
from tests.support.settings import worker_config
from tests.support.trainee import config

PEERS, EVERY, STEPS = ("a", "b", "c"), 6, 24


class Loop:
    """One peer's own loop: model, AdamW, non-IID data."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.model = TinyTransformer().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.batches = token_batches(seed)
        self.replica = Replica(self.model)  # to read and write fragments

    def step(self) -> float:
        return train_step(self.model, self.optimizer, next(self.batches))

    def naive(self, own: Any, step: int) -> list[Tensor]:
        """One inner step from these fragments."""
        for i, fragment in enumerate(own):
            self.replica.load_local(i, fragment)
        self.step()
        return self.replica.local()


def expected(**settings: Any) -> list[list[Tensor]]:
    """theta after each outer step, by the oracle."""
    groups = settings.get("groups", 1)
    loops = {name: Loop(seed).naive for seed, name in enumerate(PEERS)}
    return reference.streaming(Loop(0).replica.local(), loops, every=EVERY, outer_steps=STEPS // (EVERY // groups), **settings)


def ours(run_config: RunConfig, before_step: Callable[[Loop], None] = lambda _: None) -> tuple[list[list[Tensor]], set[str]]:
    """theta after each outer step, by three workers; and the digests that the peers ended with."""
    run = LocalRun(run_config, PEERS, theta=Loop(0).replica.local())
    loops, seen = [Loop(seed) for seed in range(len(PEERS))], []
    with ExitStack() as stack:
        workers = [
            stack.enter_context(EditWorker(loop.model, loop.optimizer, run.collective(name), WorkerConfig.of(run_config)))
            for name, loop in zip(PEERS, loops, strict=True)
        ]
        for _ in range(STEPS):
            for loop in loops:
                before_step(loop)
                loop.step()
            if len(seen) < run.state.outer_step:
                seen.append(run.state.theta)
    assert {worker.digest for worker in workers} == {run.state.digest}
    return seen, {worker.digest for worker in workers}


def run_of(lr: float = 0.7, mu: float = 0.5, **sync: Any) -> RunConfig:
    return config(sync=SyncConfig(every=EVERY, **sync), outer=OuterConfig(lr=lr, momentum=mu))


def close(actual: list[list[Tensor]], oracle: list[list[Tensor]]) -> None:
    assert len(actual) == len(oracle)
    for ours_, theirs in zip(actual, oracle, strict=True):
        for a, b in zip(ours_, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.covering
@pytest.mark.parametrize("mode", ["blocking", "forward"])
@pytest.mark.parametrize(("groups", "pattern"), [(1, "strided"), (3, "strided"), (2, "sequential")])
def test_at_once_with_groups_is_the_oracles(mode: str, groups: int, pattern: str) -> None:
    actual, _ = ours(run_of(mode=mode, groups=groups, pattern=pattern))
    close(actual, expected(groups=groups, pattern=pattern, lr=0.7, mu=0.5))


@pytest.mark.parametrize("groups", [1, 3])
def test_forward_gives_the_same_bits_as_blocking(groups: int) -> None:
    blocking, forward = (ours(run_of(mode=mode, groups=groups)) for mode in ("blocking", "forward"))
    assert blocking[1] == forward[1]


@pytest.mark.covering
@pytest.mark.parametrize(("mix", "alpha"), [("replay", 0.5), ("replace", 0.5), ("lerp", 0.5), ("lerp", 0.0), ("lerp", 1.0)])
@pytest.mark.parametrize(("groups", "delay"), [(1, 1), (1, 4), (1, EVERY), (3, 1), (3, 2)])
def test_delayed_is_the_oracles(mix: str, alpha: float, groups: int, delay: int) -> None:
    settings: dict[str, Any] = {"groups": groups, "delay": delay, "mix": mix, "alpha": alpha}
    if delay == EVERY and (mix, alpha) in (("replace", 0.5), ("lerp", 0.0)):
        with pytest.raises(
            ConfigError, match=r"^sync\.delay = 6: H \(6\) must be above sync\.delay \(6\) with sync\.mix = .*contribute$"
        ):
            run_of(mode="delayed", **settings)
        return
    actual, _ = ours(run_of(mode="delayed", **settings))
    close(actual, expected(lr=0.7, mu=0.5, **settings))


@pytest.mark.covering
@pytest.mark.parametrize("delay", [1, 3, EVERY])
@pytest.mark.parametrize(("lr", "mu"), [(1.0, 0.0), (0.7, 0.5)])
def test_eager_is_the_oracles(delay: int, lr: float, mu: float) -> None:
    actual, _ = ours(run_of(mode="eager", delay=delay, lr=lr, mu=mu))
    close(actual, expected(mix="eager", delay=delay, lr=lr, mu=mu))


def test_more_groups_than_fragments_is_refused_on_entering() -> None:
    loop = Loop(0)
    of_run = config(sync=SyncConfig(every=6, groups=6))
    with pytest.raises(ConfigError, match="groups = 6: the model has 5 fragments"):
        EditWorker(loop.model, loop.optimizer, LocalRun(of_run, ["a"]).collective("a"), WorkerConfig.of(of_run)).__enter__()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": 5}, r"sync.groups = 5: must divide sync.every \(6\)"),
        ({"mode": "sometimes"}, "sync.mode = 'sometimes': must be one of blocking, forward, delayed, eager"),
        ({"mode": "delayed", "delay": 7}, "sync.delay = 7: must not exceed sync.every / sync.groups"),
        ({"mode": "delayed", "groups": 2, "delay": 4}, "sync.delay = 4: must not exceed"),
        ({"delay": 0}, "sync.delay = 0: must be between 1"),
        ({"mode": "delayed", "delay": 2, "mix": "replace", "dylu": True}, "sync.dylu = True: must be false with sync.mix = "),
        (
            {"mode": "delayed", "delay": 2, "mix": "replace", "milestones": ((4, 2),)},
            r"sync.milestones = '\[4, 2\]': H \(2\) must be above sync.delay \(2\) with sync.mix = \"replace\"",
        ),
        ({"mix": "most"}, "sync.mix = 'most'"),
        ({"alpha": 1.5}, "sync.alpha = 1.5: must be between 0 and 1"),
        ({"pattern": "random"}, "sync.pattern = 'random'"),
        ({"mode": "eager", "outer": OuterConfig(optimizer="adam")}, "outer.optimizer = 'adam': must be one of sgd, nesterov"),
        ({"mode": "eager", "outer": OuterConfig(), "groups": 2}, 'sync.groups = 2: must be 1 with sync.mode = "eager"'),
        ({"buffers": "lowest"}, "buffers = 'lowest': a merge weighs all peers"),
        ({"buffers": "mine"}, "buffers = 'mine': must be one of local, average"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker_config(**({"every": 6} | settings))


def test_a_loop_without_private_gradients_does_not_join_a_run_that_asks_for_them() -> None:
    noise = PrivacyConfig(level="example", delta=1e-6, epsilon_max=8, noise_multiplier=1.0)
    run = RunConfig(privacy=noise)
    assert WorkerConfig.of(run).private
    model = torch.nn.Linear(2, 2)
    worker = EditWorker(model, torch.optim.SGD(model.parameters()), LocalRun(run, ["a"]).collective("a"), WorkerConfig.of(run))
    with pytest.raises(ConfigError, match=r'^privacy\.level = "example": this loop has no private gradients'):
        worker.__enter__()
    with pytest.raises(ConfigError, match=r'^buffers = \'average\': must be "local" with privacy\.level'):
        WorkerConfig(private=True, buffers="average")


OF_ANOTHER_RUN: dict[str, tuple[RunConfig, WorkerConfig]] = {
    "sync.groups = 1: the run has 2": (RunConfig(sync=SyncConfig(every=6, groups=2)), WorkerConfig(sync=SyncConfig(every=6))),
    "sync.groups = 2: the run has 1": (RunConfig(), WorkerConfig(sync=SyncConfig(groups=2))),
    "sync.pattern = 'sequential': the run has 'strided'": (
        RunConfig(sync=SyncConfig(groups=2)),
        WorkerConfig(sync=SyncConfig(groups=2, pattern="sequential")),
    ),
    "codec.up = 'fp32': the run has 'int8'": (RunConfig(), WorkerConfig(codec=CodecConfig(up="fp32"))),
    "codec.fragments = {}: the run has {'w*': 'fp32'}": (
        RunConfig(codec=CodecConfig(fragments={"w*": FragmentCodec(up="fp32")})),
        WorkerConfig(),
    ),
    "secagg.enabled = True: the run has False": (RunConfig(), WorkerConfig(masked=True)),
    "privacy.level = 'none': the run has 'example'": (
        RunConfig(privacy=PrivacyConfig(level="example", delta=1e-6, epsilon_max=8, noise_multiplier=1.0)),
        WorkerConfig(),
    ),
}


@pytest.mark.parametrize("message", OF_ANOTHER_RUN)
def test_settings_of_another_run_are_named_on_entering(message: str) -> None:
    of_run, own = OF_ANOTHER_RUN[message]
    model, run = torch.nn.Linear(2, 2), LocalRun(of_run, ["a"])
    worker = EditWorker(model, torch.optim.SGD(model.parameters()), run.collective("a"), own)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}; give the EditWorker WorkerConfig.of\\(run\\)$"):
        worker.__enter__()
    assert run.round_id == 0  # it has not joined


def test_what_a_peer_may_have_of_its_own_is_not_compared() -> None:
    run = RunConfig(sync=SyncConfig(every=6, pattern="sequential"), codec=CodecConfig(down="fp32", up_residual="bf16"))
    own = WorkerConfig(sync=SyncConfig(every=7, mode="delayed", delay=2), only_steps_write=True)
    model = torch.nn.Linear(2, 2)
    with EditWorker(model, torch.optim.SGD(model.parameters()), LocalRun(run, ["a"]).collective("a"), own) as worker:
        assert worker.outer_step == 0


def test_a_worker_takes_its_settings_from_the_runs() -> None:
    sync = SyncConfig(every=8, groups=2, pattern="sequential", mode="delayed", delay=3, mix="lerp", alpha=0.25, strict=True)
    run = config(sync=sync)
    rest = {"codec": run.codec, "rounds": run.rounds, "outer": run.outer}
    assert WorkerConfig.of(run) == WorkerConfig(sync=sync, **rest, buffers="local", kept_updates=8)
