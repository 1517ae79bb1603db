"""One peer's exchange with the run: contribute, learn the outcome, move on. `EditWorker` says when.

Owns: the contribution that is pending, and how theta, local parameters and residuals follow its outcome: together, on a commit,
and only then. A commit is applied all at once, or (`lazily`) fragment by fragment, as each is needed: then the outer step and
the digest advance with the last one. Every decision is the same at all ranks of a replica, so their calls match.
Must not know: hooks, how a carrier works, what a merge computes, any clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NoReturn

from torch.optim import Optimizer

from edit.codecs.error_feedback import ErrorFeedback
from edit.collective import Collective
from edit.errors import EvictedError, TransportError
from edit.records import Aborted, Commit, Committed, Evicted, Finished, NeedsSnapshot, Outcome
from edit.replica.replica import Outer, Replica
from edit.worker.config import WorkerConfig
from edit.worker.contribution import ContributionMaker
from edit.worker.estimator import Estimator
from edit.worker.local_progress import kept, unmerged, unsent
from edit.worker.pending import PartialCommit, Pending
from edit.worker.schedule import SyncSchedule
from edit.worker.settlement import Settlement
from edit.worker.updates import Updates, without_payloads

__all__ = ["Exchange"]


class Exchange:
    """The exchange of one entered worker. Every method is called by all ranks of a replica together.

    replaying_checkpoint: this peer goes on from a checkpoint and has not yet caught up with what it did before
    (`edit.worker.checkpoint`). Raises ConfigError when the model has fewer fragments than the run has groups.
    """

    def __init__(
        self, replica: Replica, collective: Collective, optimizer: Optimizer, config: WorkerConfig, clock: Callable[[], float]
    ) -> None:
        self.replica = replica
        self.config = config
        sync = config.sync
        self.schedule = SyncSchedule(sync.interval, sync.groups, sync.interval_s if sync.schedule == "time" else None)
        self.feedback = ErrorFeedback(config.codec.up, replica.layout.owned)
        self.estimator = Estimator(config.outer) if sync.mode == "eager" else None
        self.pending: Pending | None = None
        self.replaying_checkpoint = False
        self.finished = False
        self.last_commit: Commit | None = None
        self.last_reason = ""
        self._sender = ContributionMaker(replica, self.feedback, collective, config, self.estimator)
        self._receiver = Updates(replica, collective, config)
        self._collective = collective
        self._settlement = Settlement(replica, self.feedback, optimizer)
        self._clock = clock
        self._began = 0  # theta's outer step where the present inner steps began
        self._stepped_at = 0.0
        self._partial: PartialCommit | None = None
        self._unchecked = False  # whether something has applied since this peer last looked whether the run has moved on

    @property
    def outer_step(self) -> int:
        """The committed outer step of theta."""
        return self.replica.outer.outer_step

    def _now(self) -> float:
        """Rank 0's clock, at all ranks: they contribute together. Not read where nothing depends on it."""
        return self.replica.layout.ranks.lead(self._clock) if self.config.sync.schedule == "time" else 0.0

    def begin(self) -> None:
        """Training begins, from theta or from a checkpoint."""
        self._began = self.outer_step
        self.schedule.completed(self._now())

    def stepped(self) -> bool:
        """An optimizer step was taken: look for an outcome if it is time. False: a contribution is to have more inner steps."""
        self.schedule.count_step()
        if self.finished:
            return True
        self._stepped_at = now = self._now()
        if (pending := self.pending) is not None and self._asks_now(pending):
            self.resolve(block=self.schedule.at_boundary(now) or (self.config.sync.overlap > 0 and not pending.outcome_overdue))
        return self.finished or self.schedule.due(now)

    def contribute_if_due(self) -> bool:
        """After `stepped`: contribute, unless that is not due. Says whether it did."""
        due = not self.finished and self.pending is None and self.schedule.due(self._stepped_at)
        if due := due and self.catch_up() and not self.finished:
            self.contribute(send=not self._made_before())
        return due

    def take(self, *, lazily: bool) -> None:
        """Wait for the outcome of a fresh contribution. lazily: its updates are applied by `apply_fragment`."""
        if (
            self.pending is not None
            and self._partial is None
            and not self.pending.outcome_overdue
            and not self.config.sync.overlap
        ):
            self.resolve(block=True, lazily=lazily)

    def settle(self) -> None:
        """An optimizer step is about to be taken: no update may still wait for a forward."""
        self.take(lazily=False)
        if self._partial is not None:
            self.apply_fragment(tuple(self._partial.waiting))
        if self._unchecked:
            self._check_applied()
            self.catch_up()

    def synchronize(self, *, block: bool = True) -> bool:
        """Take the pending outcome, waiting for it if told to, and every commit already known. False while there is none."""
        pending, outer_step = self.pending, self.outer_step
        if pending is None:
            self._check_applied()
            return self.catch_up()
        if self._partial is not None:
            self.settle()
        else:
            self.resolve(block=block)
        return self.pending is not pending or self.outer_step > outer_step

    def leave(self) -> None:
        """Wait for the pending outcome and apply it, but contribute no more; nor wait for a contribution that is carried."""
        if self._partial is not None:
            self.settle()
        if self.pending is not None:
            self.resolve(block=True, again=False)
        self._check_applied()

    def _check_applied(self) -> None:
        """Take a snapshot where what has applied is not what the run has; not in a forward, which has used it."""
        unchecked, self._unchecked = self._unchecked, False
        if unchecked and self.last_commit is not None and self.replica.outer.digest != self.last_commit.digest:
            self._resync(_WRONG_DIGEST)

    def _asks_now(self, pending: Pending) -> bool:
        enough = self.schedule.round_inner_steps >= min(self.config.sync.delay, self.schedule.every)
        return enough or pending.outcome_overdue or self.config.sync.overlap == 0

    # Contributing.

    def contribute(self, *, send: bool = True) -> None:
        """Contribute what is due. send: False when the run has it already from before this peer was interrupted."""
        outer_step = self.outer_step
        work = self.schedule.contributed(self._group(outer_step), self._now())
        began = max(
            self._began, outer_step - self.config.rounds.max_staleness // 2
        )  # half of what is allowed is left for the way
        self.pending = Pending(outer_step=outer_step, began=began, fragments=self._receiver.due(outer_step), work=work)
        self._sender.contribute(self.pending, send=send)

    def restore(self, pending: Pending) -> None:
        """Go on waiting for a contribution from before this peer was interrupted: stage it again, and send it if need be."""
        self.pending = pending
        if self.config.rounds.max_staleness:
            self._pass_over(pending)
        self._sender.contribute_again(pending, send=not self._made_before())

    def _pass_over(self, pending: Pending) -> None:
        """Apply what was committed before the contribution was, or while it was carried, unless the carrier is cut off."""
        outcome = self._collective.outcome(self.outer_step, block=False)
        while isinstance(outcome, Committed) and not self._receiver.takes_part(outcome.commit):
            if not self._advance(dataclasses.replace(outcome, carried=True), pending) or self.pending is None:
                return
            outcome = self._collective.outcome(self.outer_step, block=False)

    # Learning the outcome.

    def resolve(self, *, block: bool, again: bool = True, lazily: bool = False) -> None:
        """Ask for the pending contribution's outcome and act on it; without one it stays pending and overlaps with training.

        again: contribute again at once to the outer step now open, should this contribution have come too late.
        """
        while (pending := self.pending) is not None:
            outer_step = self.outer_step
            if self._act(self._collective.outcome(outer_step, block=block), pending, again, lazily):
                return
            if self.pending is pending and self.outer_step > outer_step:
                block = False  # it is carried: train on meanwhile
            elif not (block and self.config.sync.strict):
                self._overlap()
                return

    def _act(self, outcome: Outcome | None, pending: Pending, again: bool, lazily: bool) -> bool:
        """False when a contribution is still, or again, pending without an outcome."""
        match outcome:
            case Committed(commit):
                if lazily and not pending.applied and self._receiver.takes_part(commit):
                    self._begin_partial(outcome)
                    return True
                return self._apply(outcome, pending, again)
            case Aborted(reason):
                self.last_reason = reason
                return self._aborted(pending)
            case NeedsSnapshot(reason):
                return self._resync(reason)
            case Finished(outer_step):
                self._finish(outer_step)
                return True
            case Evicted(reason):
                self._evicted(reason)
        return False

    def _apply(self, outcome: Committed, pending: Pending, again: bool) -> bool:
        if not self._advance(outcome, pending):
            return False
        if outcome.carried and not self._receiver.takes_part(outcome.commit):
            return self.pending is None
        if self.catch_up() and again and not self.finished and not self._receiver.takes_part(outcome.commit):
            self.contribute()
            return False
        return True

    def _aborted(self, pending: Pending) -> bool:
        if self.config.sync.strict:
            self._sender.send_again(pending)
            return False
        self.drop_pending()
        if pending.deltas:  # the estimate that training went on from is void
            self.replica.move(self.replica.outer, lambda i: unmerged(self.replica, i, pending), pending.fragments)
        return True

    def catch_up(self) -> bool:
        """Apply the commits already known, with replay. False when this peer cannot get to the run's outer step for now."""
        while not self.finished:
            outcome = self._collective.outcome(self.outer_step, block=False)
            match outcome:
                case Committed(commit):
                    if self.replaying_checkpoint and self._receiver.takes_part(commit):
                        break  # this peer's own contribution to it is yet to be made once more
                    if not self._advance(outcome, None):
                        return False
                case NeedsSnapshot(reason):
                    return self._resync(reason)
                case Finished(outer_step):
                    self._finish(outer_step)
                case Evicted(reason):
                    self._evicted(reason)
                case Aborted() | None:
                    break
        return True

    def look_whether_over(self) -> None:
        """After a restart: a run that is over, at this very outer step, expects nothing more."""
        outcome = self._collective.outcome(self.outer_step, block=False)
        self.finished = isinstance(outcome, Finished) and outcome.outer_step == self.outer_step

    def _made_before(self) -> bool:
        """Whether the run has committed the contribution now due already, made before this peer was interrupted."""
        if self.replaying_checkpoint:
            outcome = self._collective.outcome(self.outer_step, block=False)
            self.replaying_checkpoint = isinstance(outcome, Committed) and self._receiver.takes_part(outcome.commit)
        return self.replaying_checkpoint

    def _overlap(self) -> None:
        """Training goes on before the outcome: keep the local parameters as they were sent."""
        if (pending := self.pending) is not None:
            pending.outcome_overdue = True
            for i in pending.missing:
                if i not in pending.sent_from:
                    pending.sent_from[i] = self.replica.local_fragment(i)

    # StallTimeout on.

    def _advance(self, outcome: Committed, pending: Pending | None) -> bool:
        """Apply one commit. False (and nothing is changed) when it cannot be fetched, or neither its digest reached nor a
        snapshot fetched.

        A contribution that is carried stays pending: theta moves, and what was sent and the local parameters move with it.
        """
        steps = self._receiver.updates(outcome, pending.applied if pending else ())
        if steps is None:
            self.last_reason = self._receiver.failure
            return False
        commit, before = outcome.commit, self.replica.outer
        carried = outcome.carried and pending is not None and not self._receiver.takes_part(commit)
        self.last_reason = commit.reason
        target: Outer | None = self.replica.after(commit.outer_step, steps)
        moved: Iterable[int] = steps
        if target is None or target.digest != commit.digest:
            if carried:
                return self._resync(_WRONG_DIGEST)
            if (target := self._receiver.snapshot()) is None:
                self.last_reason = f"{_WRONG_DIGEST}; {self._receiver.failure}"
                return False
            moved, self.last_reason = range(len(target.fragments)), _WRONG_DIGEST
        verdicts = {part.fragment_id: self._receiver.verdict(part) if pending else None for part in commit.fragments}
        if self.estimator is not None and target.digest == commit.digest:
            distances = {i: before.fragments[i] - target.fragments[i] for i in verdicts}
            self.estimator.committed(commit, self._collective.peer_id, distances, pending.deltas if pending else {})
        elif self.estimator is not None:
            self.estimator.last.clear()  # a snapshot may be further: that was not this commit's step alone
        theta = target.fragments
        self.replica.move(target, lambda i: kept(self.config, self.replica, theta[i], i, verdicts.get(i), pending), moved)
        if carried and pending is not None:
            pending.sent_from = {i: (sent - before.fragments[i]).add_(theta[i]) for i, sent in pending.sent_from.items()}
            self.last_commit = without_payloads(commit)
            return True
        for i in steps:
            self._settlement.settle(i, verdicts[i])
        self._committed(outcome, pending)
        return True

    def _committed(self, outcome: Committed, pending: Pending | None) -> None:
        commit = outcome.commit
        if pending is not None and self._receiver.takes_part(commit):
            group = self._group(pending.outer_step)
            replaced = self.config.sync.mode == "delayed" and self.config.sync.mix == "replace" and not pending.outcome_overdue
            self.schedule.merged(self.schedule.work(group) if replaced else pending.work, group)
            self._began = commit.outer_step
        if outcome.inner_steps:
            self.schedule.adopt(outcome.inner_steps)
        self.schedule.completed(self._now())
        self.pending = None
        self.last_commit = without_payloads(commit)

    def _resync(self, reason: str) -> bool:
        """Take a snapshot and replay the local progress onto it. False (and nothing is changed) when the carrier is cut off.

        Whether a pending contribution is in the snapshot cannot be known, so only what was done since sending it is replayed:
        work may be lost here, never counted twice.
        """
        self.last_reason = reason
        if (target := self._receiver.snapshot()) is None:
            self.last_reason = f"{reason}; {self._receiver.failure}"
            return False
        pending = self.pending
        self.replica.move(target, lambda i: unsent(self.replica, i, pending))
        if pending is not None:
            self.schedule.merged(pending.work, self._group(pending.outer_step))
        if self.estimator is not None:
            self.estimator.last.clear()
        self.replaying_checkpoint = False
        self.drop_pending()
        self.begin()
        return True

    def _finish(self, outer_step: int) -> None:
        self.finished = True
        if outer_step == self.outer_step or not self._resync(f"the run finished at outer step {outer_step}"):
            self.drop_pending()

    def _evicted(self, reason: str) -> NoReturn:
        self.drop_pending()
        raise EvictedError(reason)

    def drop_pending(self) -> None:
        """Give up the pending contribution: residuals stay as they were before it."""
        if self.pending is not None:
            self._settlement.give_up(self.pending.missing)
        self.pending = None

    def _group(self, outer_step: int) -> int:
        return outer_step % self.config.sync.groups

    # Applying a commit fragment by fragment.

    def _begin_partial(self, outcome: Committed) -> None:
        self._partial = PartialCommit(outcome, self._receiver.waiting(outcome))
        self.last_reason = outcome.commit.reason
        self.replica.transfers.settled()

    def apply_fragment(self, fragments: Iterable[int]) -> None:
        """Apply the updates of these fragments, as far as they still wait; returns when they are in."""
        for i in fragments:
            if self._partial is not None and i in self._partial.waiting:
                self._apply_one(self._partial, i)

    def _apply_one(self, partial: PartialCommit, i: int) -> None:
        pending = self.pending
        assert pending is not None
        try:
            step = self._receiver.wait(partial.waiting[i])
        except TransportError as error:
            self._interrupt_partial(str(error))
            return
        part = next(part for part in partial.outcome.commit.fragments if part.fragment_id == i)
        verdict = self._receiver.verdict(part)
        theta = self.replica.outer.fragments[i]
        self.replica.apply_fragment(i, step, lambda i: kept(self.config, self.replica, theta, i, verdict, pending))
        self._settlement.settle(i, verdict)
        del partial.waiting[i]
        pending.applied.add(i)
        if not partial.waiting:
            self._end_partial()
            self.replica.applied(partial.outcome.commit.outer_step)
            self._committed(partial.outcome, pending)
            self._unchecked = True

    def _interrupt_partial(self, reason: str) -> None:
        """What has applied stays; the rest is asked for again, and then applied with what was done meanwhile."""
        self._end_partial()
        self.last_reason = reason
        self._overlap()
        if self.config.sync.strict:
            self.resolve(block=True)

    def _end_partial(self) -> None:
        self._partial = None
        self.replica.transfers.unsettled()


_WRONG_DIGEST = "theta after the outer step has another digest than the run's; taking a snapshot"
