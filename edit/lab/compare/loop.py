"""All peers' inner steps in one process, in the order of a virtual clock; bytes counted at each peer's own collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from torch import Tensor

from edit.collective import Collective
from edit.config.run import RunConfig
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.local import LocalRun
from edit.records import Contribution, Lacks, Outcome, Progress, Snapshot
from edit.trust.mask_plan import FragmentPlan
from edit.worker.masked import PlansRounds
from edit.worker.worker import EditWorker, WorkerConfig
from peers.training.trainer import Trainer

__all__ = ["Counting", "Peer", "enter", "step_together"]


@dataclass(slots=True)
class Counting:
    """A Collective that counts the bytes of all payloads that pass it."""

    inner: Collective
    sent: int = 0
    received: int = 0
    # Of each outer step that it contributed to: what was sent for it.
    contributions: dict[int, int] = field(default_factory=dict)
    # Outer steps whose updates were counted.
    steps: set[int] = field(default_factory=set)

    @property
    def peer_id(self) -> str:
        """Of this peer."""
        return self.inner.peer_id

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        """See `Collective.join`."""
        return self.inner.join(schema, found, shards, lacks)

    def report(self, progress: Progress) -> None:
        """See `Collective.report`."""

    def contribute(self, contribution: Contribution) -> None:
        """See `Collective.contribute`."""
        size = memoryview(contribution.payload.data).nbytes
        self.sent += size
        self.contributions[contribution.outer_step] = self.contributions.get(contribution.outer_step, 0) + size
        self.inner.contribute(contribution)

    def plan(self, outer_step: int) -> tuple[FragmentPlan, ...] | None:
        """See `PlansRounds.plan`."""
        return cast(PlansRounds, self.inner).plan(outer_step)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """See `Collective.outcome`."""
        outcome = self.inner.outcome(outer_step, block=block)
        commit = getattr(outcome, "commit", None)
        if commit is not None and commit.outer_step not in self.steps:
            self.steps.add(commit.outer_step)
            payloads = [one.payload for one in commit.fragments if one.payload is not None]
            self.received += sum(memoryview(payload.data).nbytes for payload in payloads)
        return outcome

    def snapshot(self) -> Snapshot:
        """See `Collective.snapshot`."""
        return self.inner.snapshot()


@dataclass(slots=True)
class Peer:
    """One peer: its trainer, its worker, and where it is on the virtual clock."""

    peer_id: str
    trainer: Trainer
    worker: EditWorker
    # Virtual seconds that an inner step takes.
    step_s: float
    now_s: float = 0.0
    steps: int = 0


def enter(
    trainers: Sequence[Trainer], collectives: Sequence[Collective], config: RunConfig, steps_s: Sequence[float] | None = None
) -> list[Peer]:
    """Join the run with every trainer's model, in order. steps_s: virtual seconds of an inner step, by peer; None: 1."""
    settings, peers = WorkerConfig.of(config), list[Peer]()

    def clock_of(i: int) -> Callable[[], float]:
        return lambda: peers[i].now_s if i < len(peers) else 0.0

    for i, (trainer, collective) in enumerate(zip(trainers, collectives, strict=True)):
        worker = EditWorker(trainer.model, trainer.optimizers, collective, settings, clock=clock_of(i))
        peers.append(Peer(collective.peer_id, trainer, worker, steps_s[i] if steps_s is not None else 1.0))
    for peer in peers:
        peer.worker.__enter__()
    return peers


def step_together(
    peers: Sequence[Peer],
    is_over: Callable[[Peer], bool],
    *,
    run: LocalRun | None = None,
    tokens: int = 0,
    position: Callable[[Peer], int] | None = None,
    after: Callable[[Peer], None] | None = None,
) -> None:
    """Take inner steps until `is_over` says so of every peer: always the one whose clock is least, except those that wait.

    With equal step times the peers take turns.

    Args:
        run: whose rounds block: a peer whose contribution is complete waits until the round is closed, and goes on at the time
            of the last contribution. None: nobody has to wait, because training goes on during an exchange, or because all
            take turns.
        tokens: of an inner step, before a batch has grown, to weigh contributions by; 0: they are not counted.
        position: returns the inner step that the learning rate follows; None: the peer's own.
        after: called with the peer after each inner step.
    """
    waiting: list[Peer] = []
    while ready := [peer for peer in peers if peer not in waiting and not is_over(peer)]:
        peer = min(ready, key=lambda one: one.now_s)
        factor = peer.trainer.batch_factor
        if tokens:
            peer.worker.count_tokens(tokens * factor)
        peer.now_s += peer.step_s * factor  # before the step, which ends with the exchange
        peer.trainer.step(partial(position, peer) if position is not None else None)
        peer.steps += 1
        if run is not None:
            if peer.peer_id in run.complete:
                waiting.append(peer)
            for other in [one for one in waiting if one.peer_id not in run.complete]:
                other.now_s = max(other.now_s, peer.now_s)
                waiting.remove(other)
        if after is not None:
            after(peer)
        if peer.worker.round_inner_steps == 0:
            peer.trainer.exchanged()
