"""One simulated peer: trains, contributes, waits, fails, comes back; in virtual time.

What became of an outer step is decided by the peer's own `peers.carriers.hub.session.Session`, from views that reach it one
latency after they are published; what the peer does then by its own `edit.worker.exchange.Exchange`. Here its actions are
carried out, with counts in place of tensors and seconds on a link.

A peer's life is a generator. It yields the virtual time at which it goes on, or VIEW: when a new view has changed its mind.
Where training overlaps, an update is fetched as soon as there is one. `forward` does as `blocking`: it saves one forward at
most. A checkpoint is taken to be of the outer step at which the process died. Not simulated: a founding, damaged bytes, a link
that breaks while the process lives, and what is computed once more after an exact resumption.
"""

from __future__ import annotations

from collections.abc import Generator
from random import Random
from typing import Any, TypeVar

from edit.lab.simulation.accounting import Accounting
from edit.lab.simulation.coordinator import Coordinator
from edit.lab.simulation.event_queue import EventQueue
from edit.lab.simulation.link import Line
from edit.lab.simulation.pace import Pace
from edit.lab.simulation.presence import Presence
from edit.lab.simulation.scenario import Scenario
from edit.lab.simulation.sending import Pending, Sending
from edit.lab.simulation.training import Training, Work
from edit.records import Aborted, Finished, NeedsSnapshot
from edit.worker.catch_up import NotOfThisRun, ResumeExactly, ResumeForward, resume, updates_suffice
from edit.worker.exchange import (
    Action,
    Advanced,
    Answer,
    Apply,
    Ask,
    Contribute,
    Exchange,
    GiveUp,
    Moved,
    ReadClock,
    SendAgain,
    Steps,
    TakeSnapshot,
)
from editpb.messages import View, Welcome
from peers.carriers.hub.session import Decision, Session

__all__ = ["Peer"]

VIEW, NEVER = -1.0, -2.0
Life = Generator[float, None, None]
_T = TypeVar("_T")


class Peer:
    """parts: its speed, its link, its draws, its failures per hour. `finished`: knows that the run is over; `stuck`: waits."""

    __slots__ = (  # thousands of peers, each touched at every event of its own: what is small stays in the processor's cache
        "_accounting",
        "_alive_since",
        "_coordinator",
        "_down_bytes",
        "_due",
        "_exchange",
        "_failures_per_hour",
        "_kept",
        "_life",
        "_line",
        "_listener",
        "_pace",
        "_presence",
        "_queue",
        "_random",
        "_returns",
        "_scenario",
        "_seen",
        "_sending",
        "_session",
        "_sync",
        "_training",
        "_waiting",
        "_wake_up",
        "_wakes_at",
        "_work",
        "finished",
        "peer_id",
    )  # fmt: skip

    def __init__(
        self,
        peer_id: str,
        scenario: Scenario,
        queue: EventQueue,
        coordinator: Coordinator,
        accounting: Accounting,
        parts: tuple[Pace, Line, Random, float],
    ) -> None:
        self.peer_id = peer_id
        self.finished = False
        self._scenario, self._queue, self._coordinator, self._accounting = scenario, queue, coordinator, accounting
        self._pace, self._line, self._random, self._failures_per_hour = parts
        self._sync = scenario.run.sync
        self._exchange = Exchange(self._sync, scenario.run.rounds.max_staleness, scenario.size.fragments)
        self._due = coordinator.due
        self._down_bytes = scenario.down_bytes
        self._training = Training(self._pace)
        self._work = Work(scenario.size.fragments)
        self._kept = True  # whether this process begins with outer parameters and work of its own
        self._begin()
        self._life: Life | None = None
        self._wakes_at = NEVER  # a wakeup at another time was overtaken
        self._wake_up, self._listener = self._wake, (self._line.latency_s, self._see)  # made once, kept by thousands at a time
        self._waiting = False
        self._presence = Presence(peer_id, self._session.heartbeat_s, self._line.latency_s, queue, coordinator)
        self._returns = False

    @property
    def alive(self) -> bool:
        return self._life is not None

    @property
    def stuck(self) -> bool:
        return self.alive and self._waiting

    # -- life and death ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A process starts."""
        self._begin()
        self._life = self._live()
        self._arm()
        self._resume()

    def _begin(self) -> None:
        self._alive_since = self._queue.now
        self._seen: View | None = None
        run = self._scenario.run
        staleness = run.rounds.max_staleness
        self._session = Session(self._random.random, self._queue.now, run.membership.heartbeat_s, staleness)
        self._sending = Sending(self.peer_id, self._scenario.up_bytes, self._queue, self._coordinator, self._line, self._see)

    def stop(self) -> None:
        """Count the steps and seconds of this life: it or the simulation ends."""
        if self.alive:
            self._exchange.schedule.count_steps(self._end_training())
            self._accounting.alive_s += self._queue.now - self._alive_since
            self._alive_since = self._queue.now

    def so_far(self, now: float) -> tuple[int, float, float]:
        """What is not in the accounting yet: inner steps, seconds of training, seconds alive."""
        return (*self._training.so_far(now), now - self._alive_since) if self.alive else (0, 0.0, 0.0)

    def _arm(self) -> None:
        """Draw when this life ends: by a failure or by leaving."""
        faults = self._scenario.faults
        rates = self._failures_per_hour, faults.leaves_per_hour
        if not sum(rates):
            return
        life = self._life
        when = self._queue.now + 3600.0 * self._random.expovariate(sum(rates))
        polite = self._random.random() * sum(rates) >= rates[0]
        self._queue.at(when, lambda: self._end(polite) if self._life is life else None)

    def die(self, away_s: float) -> None:
        """The process dies, if it lives, and is started again after so many seconds."""
        self._end(polite=False, away_s=away_s)

    def _end(self, polite: bool, away_s: float | None = None) -> None:
        if self._life is None:
            return
        self.stop()
        self._life.close()
        self._life, self._waiting, self._wakes_at = None, False, NEVER
        self._coordinator.listeners.pop(self.peer_id, None)
        self._session.down(self._queue.now)
        self._accounting.leaves += polite
        self._accounting.failures += not polite
        silent = not polite and self._random.random() < self._scenario.faults.silent
        self._presence.hang_up("goodbye" if polite else "the stream broke", silent=silent, polite=polite)
        self._forget(polite)
        self._sending.drop()
        faults = self._scenario.faults
        mean = faults.away_s if polite else faults.repair_s
        away = max(0.1 * mean, self._random.expovariate(1.0 / mean)) if mean else 0.0
        self._queue.at(self._queue.now + (away if away_s is None else away_s), self._return)

    def _forget(self, polite: bool) -> None:
        """What was not contributed is lost, all of it or what came after the last checkpoint; what was, is in doubt."""
        every = 0 if polite else self._scenario.faults.checkpoint_steps
        training, pending = self._training, self._sending.pending
        lost = training.trained % every if every else training.trained
        self._work.in_doubt(pending.shares if pending else ())
        self._work.lose(lost, training.trained)
        schedule = self._exchange.schedule
        schedule.load({**schedule.state(), "round_inner_steps": max(0, schedule.round_inner_steps - lost)})
        self._exchange.pending = None
        self._kept = every > 0

    def _return(self) -> None:
        if self._coordinator.finished_at is None:
            self._accounting.returns += 1
            self._returns = True
            self.start()

    # -- the clockwork -----------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        assert self._life is not None
        self._wakes_at = NEVER
        when = next(self._life, None)
        self._waiting = when is VIEW
        if when is VIEW:
            self._listen()
        elif when is not None:
            self._wakes_at = when
            self._queue.at(when, self._wake_up)
        else:
            self.stop()
            self.finished, self._life = True, None
            self._coordinator.listeners.pop(self.peer_id, None)

    def _wake(self) -> None:
        if self._wakes_at == self._queue.now:
            self._resume()

    def _listen(self) -> None:
        """Be told of new views, and of those that are on their way already."""
        if self.peer_id in self._coordinator.listeners:
            return
        now, latency_s = self._queue.now, self._line.latency_s
        self._coordinator.listeners[self.peer_id] = self._listener
        if self._coordinator.newest[0] + latency_s > now:
            for arrives in self._coordinator.under_way(now, latency_s):
                self._queue.at(arrives, self._see)

    def _see(self) -> None:
        if self.peer_id not in self._coordinator.listeners:
            return
        self._look()
        self._sending.advance(self._session)
        if self._waiting:
            self._resume()
        elif self._sending.pending is not None:
            self._prefetch(self._sending.pending)

    def _look(self) -> None:
        published, view = self._coordinator.newest
        if view is self._seen:
            return
        now, latency_s = self._queue.now, self._line.latency_s
        if published + latency_s > now:
            view = self._coordinator.seen(now, latency_s)
        if view is not self._seen:
            self._session.viewed(view)
            self._seen = view

    # -- a life ------------------------------------------------------------------------------------------------------------

    def _live(self) -> Life:
        yield from self._enter()
        while not self._exchange.finished and self._exchange.outer_step < self._sync.outer_steps:
            yield from self._go_on()

    def _enter(self) -> Life:
        session = self._session
        session.connecting()
        if self._returns:
            yield self._queue.now + self._line.latency_s
        self._presence.attend()
        if self._returns:
            yield self._queue.now + self._line.latency_s
        session.welcomed(Welcome(run_id="simulated", peer_id=self.peer_id, config_json=""))
        self._look()
        if self._returns:
            yield from self._go_on_or_begin_anew()
        self._presence.report(self._exchange.outer_step)
        while not session.under_way:
            yield VIEW
            self._look()
        self._coordinator.listeners.pop(self.peer_id, None)

    def _go_on_or_begin_anew(self) -> Life:
        """Decide as a real peer does that enters with a checkpoint, or without one; fetch what it lacks."""
        exchange = self._exchange
        yield self._queue.now + self._line.latency_s
        way = self._way(self._coordinator.machine.outer_step)
        if isinstance(way, ResumeForward) and not way.by_updates:
            exchange.outer_step = yield from self._fetch_snapshot()
        else:
            yield self._queue.now + self._line.latency_s
        if isinstance(way, ResumeForward):
            exchange.schedule.abandoned()
            yield from self._run(exchange.catch_up())
            self._work.begin_anew(self._training.trained, exchange.outer_step)
            yield from self._run(exchange.begin(exchange.outer_step))

    def _way(self, run_step: int) -> ResumeExactly | ResumeForward:
        """How it goes on, where the run has reached `run_step`. The initial parameters are the same at all peers."""
        own_step, run = self._exchange.outer_step, self._scenario.run
        if not self._kept:
            return ResumeForward(by_updates=run_step == 0)
        way = resume(
            own_step,
            run_step,
            strict=self._sync.strict,
            max_staleness=run.rounds.max_staleness,
            updates_do=updates_suffice(
                own_step,
                run_step,
                kept_updates=run.kept_updates,
                update_bytes=self._update_bytes,
                all_bytes=self._scenario.snapshot_bytes,
            ),
        )
        assert not isinstance(way, NotOfThisRun)
        return way

    def _go_on(self) -> Life:
        """Train until an outcome or a contribution is due, and see to it."""
        exchange = self._exchange
        yield self._training.begin(self._steps_ahead(), self._queue.now)
        yield from self._run(exchange.stepped(self._end_training()))
        if (yield from self._run(exchange.contribute_if_due())):
            yield from self._run(exchange.take())

    def _steps_ahead(self) -> int:
        """How many steps to take at once: to the next one at which the exchange waits or contributes."""
        schedule, pending = self._exchange.schedule, self._exchange.pending
        since, stop = schedule.round_inner_steps, schedule.every
        if pending is not None and self._sync.overlap and not pending.outcome_overdue:
            stop = min(self._sync.delay, schedule.every)
        elif pending is not None:
            stop = (since // schedule.every + 1) * schedule.every
        return max(1, stop - since)  # nothing but an inner step starts an exchange

    def _end_training(self) -> int:
        """The phase of training is over: count it. Returns its steps."""
        steps, seconds = self._training.end(self._queue.now)
        self._accounting.trained += steps
        self._accounting.training_s += seconds
        return steps

    # -- the exchange ------------------------------------------------------------------------------------------------------

    def _run(self, steps: Steps[_T]) -> Generator[float, None, _T]:
        """Carry out one verb of the exchange, action by action."""
        result: Any = None
        while True:
            try:
                action = steps.send(result)
            except StopIteration as end:
                returned: _T = end.value
                return returned
            result = yield from self._carry_out(action)

    def _carry_out(self, action: Action) -> Generator[float, None, Answer | Moved | float]:
        match action:
            case Ask(_, block):
                while (answer := self._answer()) is None and block:
                    self._sending.advance(self._session)
                    yield VIEW
                return answer
            case Apply(answer, pending, carried):
                delayed = self._sync.mode == "delayed" and pending is not None and not pending.outcome_overdue
                replaced = delayed and self._sync.mix == "replace"
                return (yield from self._apply(answer, carried, dropped=replaced or answer.refused))
            case TakeSnapshot(_, reason):
                return (yield from self._move_to_snapshot(reason))
            case Contribute(pending):
                self._contribute(pending.began, pending.fragments)
            case SendAgain():
                self._sending.again(self._session)
            case GiveUp():
                self._drop()
            case ReadClock():
                return self._queue.now
        return None

    def _answer(self) -> Answer:
        """What became of the present outer step, by what is known now."""
        pending, outer_step = self._sending.pending, self._exchange.outer_step
        decision, reason = self._decide(pending)
        match decision:
            case Decision.WAIT:
                return None
            case Decision.COMMITTED:
                merged = pending is not None and self._coordinator.took_part(outer_step + 1, self.peer_id)
                refused = merged and self._coordinator.refused(outer_step + 1, self.peer_id)
                carried = pending is not None and self._session.carried_past(outer_step + 1, pending.sent)
                return Advanced(outer_step + 1, merged, carried and not merged, refused=refused)
            case Decision.ABORTED:
                return Aborted(reason)
            case Decision.BEHIND:
                return NeedsSnapshot(reason)
        return Finished(outer_step)

    def _decide(self, pending: Pending | None) -> tuple[Decision, str]:
        self._look()
        return self._session.decide(self._exchange.outer_step, pending.sent if pending is not None else None, self._queue.now)

    def _contribute(self, began: int, fragments: tuple[int, ...]) -> None:
        outer_step = self._exchange.outer_step
        if self._presence.outer_step < outer_step:
            self._presence.report(outer_step)
        self._listen()
        self._sending.begin(self._session, began, self._work.shares(fragments, self._training.trained))

    def _prefetch(self, pending: Pending) -> None:
        """Training goes on meanwhile: fetch the update as soon as there is one; an overdue outcome ends training early."""
        if pending.fetched_at is not None:
            return
        decision, _ = self._decide(pending)
        if decision is Decision.WAIT:
            return
        self._coordinator.listeners.pop(self.peer_id, None)
        known = self._queue.now
        if decision is Decision.COMMITTED:
            known = pending.fetched_at = self._fetch_update()
        if self._exchange.pending is not None and self._exchange.pending.outcome_overdue:
            self._cut_short(known)

    def _cut_short(self, when: float) -> None:
        """End the present training at the first step boundary from `when` on."""
        if (at := self._training.cut_short(when, self._queue.now)) is not None:
            self._wakes_at = at
            self._queue.at(at, self._wake_up)

    def _fetch_update(self) -> float:
        """When the update from the present outer step is here, asked for now."""
        count = self._update_bytes(self._exchange.outer_step)
        self._accounting.bytes_down += count
        return self._line.fetch(count, self._queue.now)

    def _update_bytes(self, outer_step: int) -> int:
        """Of the update from this outer step."""
        return len(self._due[outer_step % self._sync.groups]) * self._down_bytes

    def _apply(self, answer: Advanced, carried: bool, dropped: bool) -> Generator[float, None, Moved]:
        """Fetch the update and apply it. carried: what is pending is not part of it, and is pending still. dropped: the steps
        taken since sending do not count, either."""
        pending = self._sending.pending
        at = pending.fetched_at if pending is not None and pending.fetched_at is not None else self._fetch_update()
        if pending is None or at > self._queue.now:
            yield at
        if pending is not None and carried:
            pending.fetched_at = None
            self._listen()
        else:
            if pending is not None and answer.merged:
                self._work.merged(pending.shares, self._training.trained, answer.outer_step, dropped=dropped)
            self._drop()
        return self._moved(answer.outer_step, answer.reason)

    def _move_to_snapshot(self, reason: str) -> Generator[float, None, Moved]:
        """Take a snapshot; whether what is pending is in it cannot be known, so only the work since is kept."""
        yield self._queue.now + self._line.latency_s
        outer_step = yield from self._fetch_snapshot()
        self._work.in_doubt(self._sending.pending.shares if self._sending.pending else (), outer_step)
        self._drop()
        return self._moved(outer_step, reason)

    def _moved(self, outer_step: int, reason: str) -> Moved:
        """Say so, unless this peer is about to enter: it says where it is once it has."""
        if self._presence.outer_step >= 0:
            self._presence.report(outer_step, self._pace.step_s)
        return Moved(outer_step, reason)

    def _fetch_snapshot(self) -> Generator[float, None, int]:
        """Fetch all of them, as they are now; return their outer step."""
        outer_step = self._coordinator.machine.outer_step
        self._accounting.snapshots += 1
        self._accounting.bytes_down += self._scenario.snapshot_bytes
        yield self._line.fetch(self._scenario.snapshot_bytes, self._queue.now)
        return outer_step

    def _drop(self) -> None:
        if self._sending.pending is not None:
            self._sending.drop()
            self._coordinator.listeners.pop(self.peer_id, None)
