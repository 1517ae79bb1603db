"""The peer daemon: attends a run, trains, exchanges, until the run has finished or a signal says stop.

Owns: the order of starting and ending, the training loop, signals. Must not know: how anything is sent, what a
round computes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch

from edit.config import RunConfig
from edit.errors import ConfigError
from edit.worker import EditWorker, WorkerConfig
from editpb.identity import Identity
from editpb.messages import Heartbeat, PeerState
from peers.bridge import Bridge, Interrupted
from peers.data import Batches, open_tokens, stream_seed
from peers.dial import Dial
from peers.faults import Fault, FaultInjector
from peers.grpc_collective import GrpcCollective
from peers.home import Home
from peers.metrics import Metrics
from peers.models import build
from peers.trainer import StepResult, Trainer, choose_device

__all__ = ["PeerOptions", "attend", "run_peer"]

WINDOW = 20
_log = logging.getLogger("peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """What is local to this peer; everything else is the run's and comes from the coordinator.

    threads: of torch, None leaves torch's own choice; metrics: JSON-lines file; throttle: how many times longer a step takes;
    allowed_models: entry points that this peer's operator trusts.
    """

    home: Path
    data: Path
    device: str | None = None
    threads: int | None = None
    metrics: Path | None = None
    throttle: float = 1.0
    faults: tuple[Fault, ...] = ()
    allowed_models: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.throttle >= 1 or not math.isfinite(self.throttle):
            raise ConfigError(f"--throttle {self.throttle}: must be a finite number of at least 1")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: must be at least 1")
        if not self.data.exists():
            raise ConfigError(f"--data {self.data}: does not exist; give a text file, a folder of text or a token file")


def run_peer(options: PeerOptions) -> None:
    """Run one peer to the end of its run, or to the first SIGINT or SIGTERM (a second one ends the process at once).

    Raises ConfigError, RefusedError, EvictedError.
    """
    enrolled = Home(options.home).load(time.time())
    if enrolled.identity.role != "peer":
        raise ConfigError(f"{options.home}: enrolled as {enrolled.identity.role}; training needs an invitation with role peer")
    device = choose_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    attend(options, Dial(enrolled.endpoints, enrolled.credentials), enrolled.identity, device)


def attend(options: PeerOptions, dial: Dial, identity: Identity, device: torch.device) -> None:
    """Train as `identity` in the run at the other end of `dial`; as `run_peer`, which looks these up in the peer's folder."""
    with Bridge() as bridge, Metrics(options.metrics) as metrics, _stopping(bridge):
        collective = GrpcCollective(bridge, dial, identity)
        goodbye = "the peer failed"
        try:
            config = collective.configuration()
            _log.info("%s of run %s: %s", identity.peer_id, identity.run_id, config.model.name)
            _Training(options, config, collective, bridge, metrics).run(device)
            goodbye = "the run has finished"
        except Interrupted:
            goodbye = "the peer was told to stop"
            _log.info("stopping as told")
        finally:
            collective.close(goodbye)


@contextlib.contextmanager
def _stopping(bridge: Bridge) -> Iterator[None]:
    """The first signal ends waits and, after it, the loop; then the default action is back, so a second one kills."""

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        bridge.interrupt()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Pace:
    """Loss and speed over the last steps; waits for exchanges and throttling do not count as speed."""

    def __init__(self, throttle: float) -> None:
        self._throttle = throttle
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._tokens = 0

    def add(self, result: StepResult) -> None:
        self._losses.append(result.loss)
        self._seconds.append(result.seconds)
        self._tokens = result.tokens

    @property
    def loss(self) -> float:
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        return fmean(finite) if finite else math.nan

    @property
    def rest_s(self) -> float:
        """How long to idle after a step so that it takes `throttle` times as long."""
        return (self._throttle - 1) * median(self._seconds)

    @property
    def step_s(self) -> float:
        return self._throttle * median(self._seconds) if self._seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self.step_s if self.step_s > 0 else 0.0


class _Training:
    """The loop of one peer, once the configuration is known."""

    def __init__(
        self, options: PeerOptions, config: RunConfig, collective: GrpcCollective, bridge: Bridge, metrics: Metrics
    ) -> None:
        self._options = options
        self._config = config
        self._collective = collective
        self._bridge = bridge
        self._metrics = metrics
        self._pace = _Pace(options.throttle)
        self._told = ""

    def run(self, device: torch.device) -> None:
        """Train until the run is over. Raises Interrupted, EvictedError, RefusedError, ConfigError."""
        config = self._config
        trainer = self._trainer(device)
        worker = EditWorker(
            trainer.model,
            trainer.optimizer,
            self._collective,
            WorkerConfig(sync_every=config.sync.every, codec=config.codec.up),
        )
        faults = FaultInjector(trainer.model, worker, config.sync.every, self._options.faults, _log.warning)
        trainer.optimizer.register_step_post_hook(faults.damage)  # before the worker's own hook
        with worker:
            _log.info("joined at outer step %d, digest %s", worker.outer_step, worker.digest[:12])
            trainer.position = lambda: worker.outer_step * config.sync.every + worker.round_inner_steps
            while not self._over(worker):
                self._collective.check()
                self._step(trainer, worker)
        _log.info("the run has finished at outer step %d, digest %s", worker.outer_step, worker.digest[:12])

    def _trainer(self, device: torch.device) -> Trainer:
        config, options = self._config, self._options
        tokens = open_tokens(options.data, context=config.model.context, vocabulary=config.model.vocabulary)
        seed = stream_seed(config.seed, self._collective.peer_id)
        return Trainer(
            build(config.model, config.seed, options.allowed_models),
            Batches(tokens, config.model.context, config.inner.batch_size, seed),
            config.inner,
            total_steps=config.sync.every * config.sync.outer_steps,
            device=device,
            clock=time.perf_counter,
        )

    def _over(self, worker: EditWorker) -> bool:
        done = worker.finished or worker.outer_step >= self._config.sync.outer_steps
        return done or self._collective.over(worker.outer_step)

    def _step(self, trainer: Trainer, worker: EditWorker) -> None:
        inner, before = self._config.inner, worker.outer_step
        worker.count_tokens(inner.batch_size * inner.accumulation * self._config.model.context)
        result = trainer.step()
        self._pace.add(result)
        self._report(worker)
        if worker.outer_step != before or worker.last_reason != self._told:
            self._tell(worker)
        self._metrics.step(worker.inner_steps, result.loss, self._pace.tokens_per_s, worker.outer_step)
        if self._options.throttle > 1:
            self._bridge.wait(lambda: None, timeout=self._pace.rest_s)

    def _report(self, worker: EditWorker) -> None:
        self._collective.report(
            Heartbeat(
                state=PeerState.EXCHANGING if worker.pending else PeerState.TRAINING,
                outer_step=worker.outer_step,
                digest=worker.digest,
                inner_steps=worker.inner_steps,
                round_inner_steps=worker.round_inner_steps,
                loss=self._pace.loss,
                tokens_per_s=self._pace.tokens_per_s,
                step_s=self._pace.step_s,
            )
        )

    def _tell(self, worker: EditWorker) -> None:
        self._told = worker.last_reason
        _log.info("outer step %d, loss %.4f: %s", worker.outer_step, self._pace.loss, worker.last_reason)
        self._metrics.outer(worker.outer_step, worker.digest, worker.last_reason)
