"""What one peer does in its exchange with the run: when it contributes, asks and waits, and what follows from each answer.

Sans-IO. Every verb of `Exchange` is a generator: it yields an action, is sent what came of it, and returns when it is done.
`edit.worker.apply` carries the actions out on a model and a collective, the simulator (`edit.lab.simulation`) in virtual time.

Answer about the outer step      a contribution is pending                        nothing is pending
-------------------------------  -----------------------------------------------  ---------------------------------------
Advanced, merged                 Apply; catch up; go on                           Apply (after a restart: see `restore`)
Advanced, carried                Apply; it stays pending; ask about the next      Apply
Advanced otherwise (too late)    Apply; catch up; Contribute again, overdue       Apply
Aborted                          GiveUp; with `strict` SendAgain and wait on      no news
NeedsSnapshot                    TakeSnapshot; the contribution is given up       TakeSnapshot
Finished                         finished; GiveUp                                 finished
Evicted                          GiveUp; EvictedError                             EvictedError
None                             KeepLocal: training goes on, it is overdue       nothing more to catch up with

A contribution is FRESH until its outcome is known or training has gone on without it for longer than planned; then it is
OVERDUE and asked for after every optimizer step. In a replica of several ranks every rank gets the same answers, so all decide
alike.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from edit.config.algorithm import SyncConfig
from edit.errors import EvictedError
from edit.fragments.groups import fragments_due
from edit.records import Aborted, Evicted, Finished, NeedsSnapshot
from edit.worker.schedule import SyncSchedule, Work

__all__ = [
    "WRONG_DIGEST",
    "Action",
    "Advanced",
    "Answer",
    "Apply",
    "ApplyLazily",
    "Ask",
    "Contribute",
    "Exchange",
    "Failed",
    "GiveUp",
    "KeepLocal",
    "Moved",
    "Pending",
    "ReadClock",
    "SendAgain",
    "Steps",
    "TakeSnapshot",
]

WRONG_DIGEST = "theta after the outer step has another digest than the run's; taking a snapshot"
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Pending:
    """A contribution whose outcome is not known."""

    # theta's outer step when the contribution was made.
    outer_step: int
    # The outer step where its work began, the same or earlier. The contribution names this one.
    began: int
    # The fragments it exchanges, ascending.
    fragments: tuple[int, ...]
    # The inner steps and tokens behind it.
    work: Work
    # The fragments whose update is applied already.
    applied: set[int] = field(default_factory=set)
    # Whether training has gone on without the outcome for longer than planned: cut off, sent late, or carried.
    outcome_overdue: bool = False

    @property
    def missing(self) -> list[int]:
        """The fragments whose update is not applied yet."""
        return [i for i in self.fragments if i not in self.applied]


# What a peer learns.


@dataclass(frozen=True, slots=True)
class Advanced:
    """The run has advanced from the outer step asked about."""

    # The outer step reached: that asked about plus 1.
    outer_step: int
    # Whether this peer's contribution is part of the commit.
    merged: bool
    # If not: whether a later commit may still bring it.
    carried: bool = False
    # How the round was closed.
    reason: str = ""
    # Inner steps to take until the next contribution (DyLU), from now on; 0: as before.
    inner_steps: int = 0
    # Whether it is part of the commit but counts for nothing in all of its fragments: what was done since is dropped, too.
    refused: bool = False


Answer = Advanced | Aborted | NeedsSnapshot | Finished | Evicted | None  # None: nothing is known


@dataclass(frozen=True, slots=True)
class Moved:
    """theta is now at this outer step. reason: why, for the log."""

    outer_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing was changed. wrong_digest: a carried contribution's commit does not give the run's digest."""

    reason: str
    wrong_digest: bool = False


# What a peer does.


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask what became of the attempt to advance from `outer_step`; the result is an `Answer`."""

    outer_step: int
    # Whether to wait for it. With True the answer is None only when the carrier is cut off.
    block: bool


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the commit that was answered last to theta, the local parameters and residuals, all or nothing.

    The result is Moved or Failed. carried: `pending` is not part of the commit and stays pending.
    """

    answer: Advanced
    pending: Pending | None
    carried: bool


@dataclass(frozen=True, slots=True)
class ApplyLazily:
    """Begin to apply the commit that was answered last, each fragment when a forward needs it (see `Exchange.applied`)."""

    answer: Advanced


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Move onto the run's latest outer parameters with what was done since sending `pending`; the result is Moved or Failed.

    Whether the snapshot contains `pending` cannot be known, so its work may be lost here, but is never counted twice.
    """

    pending: Pending | None
    reason: str


@dataclass(frozen=True, slots=True)
class Contribute:
    """Make the contribution, and hand it over if `send`; then training goes on. The result is None, or Failed: not made."""

    pending: Pending
    send: bool
    # Whether to make the same contribution once more, from what is left of it in a checkpoint.
    again: bool = False


@dataclass(frozen=True, slots=True)
class SendAgain:
    """Send the same bytes once more: their round was lost."""

    pending: Pending


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Forget the contribution: residuals stay as before it. aborted: an estimate that training went on from is void, too."""

    pending: Pending
    aborted: bool


@dataclass(frozen=True, slots=True)
class KeepLocal:
    """Training goes on before the outcome: keep the local parameters as they were sent, where that has not been done."""

    pending: Pending


@dataclass(frozen=True, slots=True)
class ReadClock:
    """Read this peer's clock; the result is in seconds. Asked for only where the schedule is by time."""


Action = Ask | Apply | ApplyLazily | TakeSnapshot | Contribute | SendAgain | GiveUp | KeepLocal | ReadClock
Steps = Generator[Action, Any, _T]


class Exchange:
    """The state of one peer's exchange with one aggregator, without any tensor.

    fragments: how many the aggregator has of the model.
    alone: whether the worker has no exchange with another aggregator. If it has, a contribution that came too late is not made
        again at once, but with the next ones: who waits for its outcome gives nothing to the other aggregator, where a peer may
        wait for just that before it gives anything here.

    Raises ConfigError when the fragments are fewer than the groups.
    """

    __slots__ = (
        "_alone", "_fragments", "_max_staleness", "_outer_step", "_stepped_at", "_sync",
        "applying", "began", "finished", "last_reason", "pending", "replaying_checkpoint", "schedule",
    )  # fmt: skip

    def __init__(self, sync: SyncConfig, max_staleness: int, fragments: int, *, alone: bool = True) -> None:
        self._sync = sync
        self._max_staleness = max_staleness
        self._fragments = fragments
        self._alone = alone
        # theta's outer step where the work of the next contribution began.
        self.began = 0
        self._stepped_at = 0.0
        self.schedule = SyncSchedule(sync.interval, sync.groups, sync.interval_s if sync.schedule == "time" else None)
        self._outer_step = 0
        self.pending: Pending | None = None
        # Whether a commit is being applied fragment by fragment.
        self.applying = False
        # Whether this peer goes on from a checkpoint and has not caught up yet with what it contributed after that.
        self.replaying_checkpoint = False
        # Whether the run has reached its last outer step.
        self.finished = False
        # Why the last attempt ended as it did.
        self.last_reason = ""
        self.due(0)

    @property
    def outer_step(self) -> int:
        """The committed outer step of theta. With a new one H is what is in force from there on."""
        return self._outer_step

    @outer_step.setter
    def outer_step(self, outer_step: int) -> None:
        self._outer_step = outer_step
        if self._sync.milestones:
            self.schedule.adopt(self._sync.interval_at(outer_step))

    def due(self, outer_step: int) -> tuple[int, ...]:
        """Return the fragments that the advance from `outer_step` exchanges."""
        return fragments_due(outer_step, self._fragments, self._sync.groups, self._sync.pattern)

    def begin(self, outer_step: int, *, anew: bool = True) -> Steps[None]:
        """Training begins, from theta at this outer step. anew: no work stands behind a difference to it."""
        self.outer_step = outer_step
        if anew:
            self.began = outer_step
        self.schedule.completed((yield from self._now()))

    # At an optimizer step.

    def stepped(self, steps: int = 1) -> Steps[bool]:
        """So many optimizer steps were taken: ask for the outcome if it is time. False: a contribution needs more steps."""
        self.schedule.count_steps(steps)
        if self.finished:
            return True
        self._stepped_at = now = yield from self._now()
        if (pending := self.pending) is not None and self._asks_now(pending):
            planned = self._sync.overlap > 0 and not pending.outcome_overdue
            block = self.schedule.at_boundary(now) or planned
            yield from self.resolve(block=block)
            if block and self.pending is pending:
                self.schedule.waited(now)
        return self.finished or self.schedule.due(now)

    def contribute_if_due(self) -> Steps[bool]:
        """After `stepped`: catch up and contribute, unless that is not due. Return whether it contributed."""
        if self.finished or self.pending is not None or not self.schedule.due(self._stepped_at):
            return False
        if not (yield from self.catch_up()) or self.finished:
            return False
        made_before = yield from self._made_before()
        yield from self._contribute(send=not made_before)
        return True

    def take(self, *, lazily: bool = False) -> Steps[None]:
        """Wait for the outcome of a fresh contribution, where training does not overlap. lazily: its updates are applied as
        they are needed."""
        pending = self.pending
        if pending is not None and not (self.applying or pending.outcome_overdue or self._sync.overlap):
            yield from self.resolve(block=True, lazily=lazily)

    def leave(self) -> Steps[None]:
        """Wait for the pending outcome, but contribute no more; nor wait for a contribution that is carried."""
        if self.pending is not None:
            yield from self.resolve(block=True, again=False)

    def _asks_now(self, pending: Pending) -> bool:
        enough = self.schedule.round_inner_steps >= min(self._sync.delay, self.schedule.every)
        return enough or pending.outcome_overdue or self._sync.overlap == 0

    # Contributing.

    def _contribute(self, *, send: bool) -> Steps[None]:
        """send: False when the run has this contribution already, from before this peer was interrupted."""
        outer_step = self.outer_step
        now = yield from self._now()
        work = self.schedule.contributed(outer_step % self._sync.groups, now)
        began = max(self.began, outer_step - self._max_staleness // 2)  # half of what is allowed is left for the way
        self.pending = Pending(outer_step=outer_step, began=began, fragments=self.due(outer_step), work=work)
        yield from self._made(Contribute(self.pending, send))

    def _made(self, contribute: Contribute) -> Steps[None]:
        """Make a contribution; give it up where that fails."""
        result: Failed | None = yield contribute
        if result is not None:
            self.last_reason = result.reason
            yield from self.drop_pending(aborted=True)

    def restore(self, pending: Pending | None) -> Steps[None]:
        """Go on from a checkpoint. pending: the contribution that waited for its outcome then; it is made again, and sent if
        the run does not have it."""
        self.replaying_checkpoint = True
        if pending is None:  # a run that is over, at this very outer step, expects nothing more
            answer = yield Ask(self.outer_step, block=False)
            self.finished = isinstance(answer, Finished) and answer.outer_step == self.outer_step
            return
        self.pending = pending
        if self._max_staleness:
            yield from self._pass_over(pending)
        made_before = yield from self._made_before()
        yield from self._made(Contribute(pending, send=not made_before, again=True))

    def _pass_over(self, pending: Pending) -> Steps[None]:
        """Apply what was committed before the contribution was, or while it was carried, unless the carrier is cut off."""
        answer = yield Ask(self.outer_step, block=False)
        while isinstance(answer, Advanced) and not answer.merged:
            moved = yield from self._advance(replace(answer, carried=True), pending)
            if not moved or self.pending is None:
                return
            answer = yield Ask(self.outer_step, block=False)

    def _made_before(self) -> Steps[bool]:
        """Whether the run has committed the contribution now due already, made before this peer was interrupted."""
        if self.replaying_checkpoint:
            answer = yield Ask(self.outer_step, block=False)
            self.replaying_checkpoint = isinstance(answer, Advanced) and answer.merged
        return self.replaying_checkpoint

    # Learning the outcome.

    def resolve(self, *, block: bool, again: bool = True, lazily: bool = False) -> Steps[None]:
        """Ask for the pending contribution's outcome and act on it; without one it stays pending and training goes on.

        again: contribute again at once to the outer step now open, should this contribution have come too late; if `alone`.
        """
        while (pending := self.pending) is not None:
            outer_step = self.outer_step
            answer: Answer = yield Ask(outer_step, block)
            if (yield from self._act(answer, pending, again, lazily)):
                return
            if self.pending is pending and self.outer_step > outer_step:
                block = False  # it is carried: train on meanwhile
            elif not (block and self._sync.strict):
                yield from self._overlap()
                return

    def _act(self, answer: Answer, pending: Pending, again: bool, lazily: bool) -> Steps[bool]:
        """Return False when a contribution is still, or again, pending without an outcome."""
        match answer:
            case Advanced() if lazily and not pending.applied and answer.merged:
                yield ApplyLazily(answer)
                self.applying, self.last_reason = True, answer.reason
                return True
            case Advanced():
                return (yield from self._apply(answer, pending, again))
            case Aborted(reason):
                self.last_reason = reason
                if self._sync.strict:
                    yield SendAgain(pending)
                    return False
                yield from self.drop_pending(aborted=True)
                return True
            case NeedsSnapshot(reason):
                return (yield from self.take_snapshot(reason))
            case Finished(outer_step):
                yield from self._finish(outer_step)
                return True
            case Evicted(reason):
                yield from self._evicted(reason)
        return False

    def _apply(self, answer: Advanced, pending: Pending, again: bool) -> Steps[bool]:
        if not (yield from self._advance(answer, pending)):
            return False
        if answer.carried and not answer.merged:
            return self.pending is None
        caught_up = yield from self.catch_up()
        if caught_up and again and self._alone and not self.finished and not answer.merged:
            yield from self._contribute(send=True)
            return False
        return True

    def catch_up(self) -> Steps[bool]:
        """Apply the commits already known. Return False when this peer cannot get to the run's outer step for now."""
        while not self.finished:
            answer: Answer = yield Ask(self.outer_step, block=False)
            match answer:
                case Advanced():
                    if self.replaying_checkpoint and answer.merged:
                        break  # this peer's own contribution to it is yet to be made once more
                    if not (yield from self._advance(answer, None)):
                        return False
                case NeedsSnapshot(reason):
                    return (yield from self.take_snapshot(reason))
                case Finished(outer_step):
                    yield from self._finish(outer_step)
                case Evicted(reason):
                    yield from self._evicted(reason)
                case Aborted() | None:
                    break
        return True

    # Moving on.

    def applied(self, answer: Advanced) -> Steps[None]:
        """Every fragment of the commit that was to be applied lazily is in."""
        self.applying, self.outer_step = False, answer.outer_step
        yield from self._committed(answer, self.pending)

    def interrupted(self, reason: str) -> Steps[None]:
        """Some fragments of the commit did not arrive. What is applied stays; the rest is asked for again."""
        self.applying, self.last_reason = False, reason
        yield from self._overlap()
        if self._sync.strict:
            yield from self.resolve(block=True)

    def take_snapshot(self, reason: str) -> Steps[bool]:
        """Move onto the run's latest outer parameters. Return False, and change nothing, when the carrier is cut off."""
        pending = self.pending
        result: Moved | Failed = yield TakeSnapshot(pending, reason)
        self.last_reason = result.reason
        if isinstance(result, Failed):
            return False
        if pending is not None:
            self.schedule.merged(pending.work, pending.outer_step % self._sync.groups)
        self.replaying_checkpoint = False
        yield from self.drop_pending()
        yield from self.begin(result.outer_step)
        return True

    def drop_pending(self, *, aborted: bool = False) -> Steps[None]:
        """Give up the pending contribution, if there is one."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.applying = False
            yield GiveUp(pending, aborted)

    def _advance(self, answer: Advanced, pending: Pending | None) -> Steps[bool]:
        """Apply one commit. Return False, with nothing changed, when neither it nor a snapshot in its place can be had.

        A contribution that is carried stays pending: theta moves, and what was sent and the local parameters move with it.
        """
        carried = answer.carried and pending is not None and not answer.merged
        result: Moved | Failed = yield Apply(answer, pending, carried)
        self.last_reason = result.reason
        if isinstance(result, Failed):
            return (yield from self.take_snapshot(result.reason)) if result.wrong_digest else False
        self.outer_step = result.outer_step
        if not carried:
            yield from self._committed(answer, pending)
        return True

    def _committed(self, answer: Advanced, pending: Pending | None) -> Steps[None]:
        sync, schedule = self._sync, self.schedule
        if pending is not None and answer.merged:
            group = pending.outer_step % sync.groups
            replaced = sync.mode == "delayed" and sync.mix == "replace" and not pending.outcome_overdue
            schedule.merged(schedule.work(group) if replaced else pending.work, group)
            self.began = answer.outer_step
        if answer.inner_steps:
            schedule.adopt(answer.inner_steps)
        if pending is not None and answer.refused:
            schedule.dropped(pending.outer_step % sync.groups)
        schedule.completed((yield from self._now()))
        self.pending = None

    def _overlap(self) -> Steps[None]:
        if (pending := self.pending) is not None:
            pending.outcome_overdue = True
            yield KeepLocal(pending)

    def _finish(self, outer_step: int) -> Steps[None]:
        self.finished = True
        if outer_step != self.outer_step:
            taken = yield from self.take_snapshot(f"the run finished at outer step {outer_step}")
            if taken:
                return
        yield from self.drop_pending()

    def _evicted(self, reason: str) -> Generator[Action, Any, NoReturn]:
        yield from self.drop_pending()
        raise EvictedError(reason)

    def _now(self) -> Steps[float]:
        """Rank 0's clock, at all ranks: they contribute together. Not read where nothing depends on it."""
        if self._sync.schedule != "time":
            return 0.0
        now: float = yield ReadClock()
        return now
