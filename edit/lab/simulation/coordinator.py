"""The coordinator in virtual time: feed the real round machine and the real membership, and carry out what they decide.

It stands for `aggregator.control.run` and `aggregator.data.round_runner`, without connections, tensors and disk. It decides
nothing about rounds (`edit.rounds.machine`) or leases (`aggregator.control.membership`).

Two things are done less often than in a real run, with the same result. The real coordinator looks at the clock every quarter
of a second; this one only at those of these moments at which a deadline or a lease may be over. A heartbeat that repeats the
last one only renews the lease; such heartbeats are recorded just before leases are looked at.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from aggregator.control.membership import Change, Membership
from edit.errors import RefusedError
from edit.fragments.groups import fragments_due
from edit.lab.simulation.accounting import Accounting, Share
from edit.lab.simulation.event_queue import EventQueue
from edit.lab.simulation.merging import SyntheticMerger
from edit.lab.simulation.scenario import Scenario
from edit.rounds import events
from edit.rounds.events import Phase
from edit.rounds.machine import RoundMachine
from editpb.messages import Heartbeat, PeerState, RunPhase, View

__all__ = ["Coordinator", "Listener"]

TICK_S = 0.25  # as `aggregator.control.run`
KEPT_VIEWS = 64  # the oldest is older than any latency
_PHASES = {phase: RunPhase[phase.name] for phase in Phase}
_HASTEN = (events.Arrived, events.MemberLost, events.Tick)  # after other events no deadline is nearer than before
Listener = tuple[float, Callable[[], None]]  # seconds until a view reaches it, what it does then


class _Held(NamedTuple):
    """A fragment of a contribution that is in."""

    round_id: int  # the round that the contribution names
    share: Share


class Coordinator:
    """The simulated run: its machine, its members, and the views that it publishes."""

    def __init__(self, scenario: Scenario, queue: EventQueue, accounting: Accounting, merger: SyntheticMerger | None) -> None:
        sync, fragments = scenario.run.sync, scenario.size.fragments
        self.due = [fragments_due(group, fragments, sync.groups, sync.pattern) for group in range(sync.groups)]  # by group
        self.carries = scenario.run.rounds.max_staleness > 0  # whether contributions may outlive their rounds
        self.listeners: dict[str, Listener] = {}  # the peers that a new view concerns, in the order in which they began
        self.finished_at: float | None = None  # None until the last commit
        self.membership = Membership(scenario.run.membership)
        self.machine = RoundMachine(
            scenario.run.rounds,
            due=lambda step: self.due[step % sync.groups],
            outer_step=0,
            outer_steps=sync.outer_steps,
            first_round_id=1,
            overlap=sync.overlap,
        )
        self._scenario, self._queue, self._accounting, self._merger = scenario, queue, accounting, merger
        self._groups, self._up_bytes = sync.groups, scenario.up_bytes
        self._here: set[str] = set()  # the peers that attend and report
        self._vanished: dict[str, float] = {}  # the peers that fell silent, and when they were heard last
        self._held: list[dict[str, _Held]] = [{} for _ in range(fragments)]  # by fragment and peer
        self._merging: dict[int, tuple[str, ...]] = {}  # by fragment, the peers in the open round's Reduce
        self._merged: dict[int, frozenset[str]] = {}  # by outer step, the peers in the commit TO it
        self._refused: dict[int, frozenset[str]] = {}  # those of them of which it has nothing but refused fragments
        self._last_closed: tuple[int, bool, str] = (0, False, "")  # round_id, committed, reason
        self._busy_until = 0.0  # the worker thread
        self._tick_at = math.inf  # the next look at the clock
        self._report = Heartbeat(state=PeerState.TRAINING)
        self._round_id, self._phase = self.machine.round_id, self.machine.phase  # as the newest view has them
        self.newest = 0.0, self._view(0)  # when it was published, and the view
        self._views: deque[tuple[float, View]] = deque([self.newest], maxlen=KEPT_VIEWS)

    # -- what peers see ----------------------------------------------------------------------------------------------------

    def seen(self, now: float, latency_s: float) -> View:
        """Return the newest view that has arrived. (Not what was published at now - latency_s: rounding would miss it.)"""
        for published, view in reversed(self._views):
            if published + latency_s <= now:
                return view
        return self._views[0][1]

    def under_way(self, now: float, latency_s: float) -> list[float]:
        """Return when the views arrive that are on their way."""
        arrivals = (published + latency_s for published, _ in self._views)
        return [arrives for arrives in arrivals if arrives > now]

    def took_part(self, outer_step: int, peer_id: str) -> bool:
        """Return whether the commit TO `outer_step` has a verdict on this peer."""
        return peer_id in self._merged.get(outer_step, ())

    def refused(self, outer_step: int, peer_id: str) -> bool:
        """Return whether the commit TO `outer_step` has verdicts on this peer, none of them OK."""
        return peer_id in self._refused.get(outer_step, ())

    # -- what peers say ----------------------------------------------------------------------------------------------------

    def attend(self, peer_id: str) -> int:
        """Open a connection of this peer; return the number of its attendance."""
        number, changes = self.membership.attended(peer_id, self._queue.now)
        self._changed(changes)
        return number

    def heartbeat(self, peer_id: str, attendance: int, outer_step: int, step_s: float) -> None:
        """Take a report of a peer that trains, with another outer step than its last one. Ignored when the peer is gone."""
        if self._report.outer_step != outer_step:
            self._report = Heartbeat(state=PeerState.TRAINING, outer_step=outer_step)
        try:
            changes = self.membership.heartbeat(peer_id, attendance, self._report, self._queue.now)
        except RefusedError:
            return
        self._changed(changes)
        self._feed(events.MemberReady(peer_id, outer_step, step_s))

    def hung_up(self, peer_id: str, attendance: int, reason: str, polite: bool) -> None:
        """The connection ended."""
        self._changed(self.membership.closed(peer_id, attendance, reason, polite=polite))

    def here(self, peer_id: str) -> None:
        """This peer attends and reports from now on."""
        self._here.add(peer_id)
        self._vanished.pop(peer_id, None)

    def vanished(self, peer_id: str, last_heartbeat: float) -> None:
        """A peer is silent from now on: leases have to be looked at when its own is over."""
        self._vanished[peer_id] = last_heartbeat
        over = last_heartbeat + self._scenario.run.membership.lease_s
        self._queue.at(max(_next_tick(over), self._queue.now), self._look_at_leases)

    def offered(self, peer_id: str, round_id: int, outer_step: int, fragment_id: int) -> bool:
        """Take the header of a contribution; False: refused."""
        return self._feed(events.Offered(peer_id, round_id, outer_step, fragment_id))

    def arrived(self, peer_id: str, round_id: int, fragment_id: int, share: Share) -> bool:
        """Take a fragment of a contribution; False: it is too late. What is in already stays, as in a real run."""
        self._accounting.bytes_up += self._up_bytes
        if not self._feed(events.Arrived(peer_id, round_id, fragment_id)):
            self._accounting.late += 1
            return False
        known = self._held[fragment_id].get(peer_id)
        if known is None or known.round_id != round_id:
            self._held[fragment_id][peer_id] = _Held(round_id, share)
        return True

    # -- carrying out ------------------------------------------------------------------------------------------------------

    def _changed(self, changes: list[Change]) -> None:
        for change in changes:
            if not change.live:
                self._here.discard(change.peer_id)
                self._vanished.pop(change.peer_id, None)
                self._feed(events.MemberLost(change.peer_id, change.reason))

    def _look_at_leases(self) -> None:
        """Check the leases of the vanished peers. All others were heard less than a heartbeat ago: less than a lease."""
        for peer_id, last_heartbeat in self._vanished.items():
            self.membership.progress(peer_id, last_heartbeat)
        self._changed(self.membership.tick(self._queue.now, self._vanished))

    def _tick(self) -> None:
        self._tick_at = math.inf
        self._feed(events.Tick())

    def _feed(self, event: events.Event) -> bool:
        """Hand an event to the round machine and carry out the effects; False when the machine refused.

        A contribution that is refused later needs nothing here: RoundClosed says whose are kept.
        """
        machine, taken = self.machine, True
        for effect in machine.handle(event, self._queue.now):
            if isinstance(effect, events.Refused):
                taken = False
            else:
                self._carry_out(effect)
        round_id, phase = machine.round_id, machine.phase
        if changed := phase is not self._phase or round_id != self._round_id:
            self._phase, self._round_id = phase, round_id
            self._publish()
        if changed or isinstance(event, _HASTEN):
            self._watch_deadlines(machine)
        return taken

    def _watch_deadlines(self, machine: RoundMachine) -> None:
        wakeup = machine.next_wakeup()
        if wakeup is not None and wakeup < self._tick_at and (at := _next_tick(wakeup)) < self._tick_at:
            self._tick_at = at
            self._queue.at(max(at, self._queue.now), self._tick)

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.RoundOpened():
                self._merging.clear()
            case events.Reduce():
                self._reduce(effect)
            case events.Commit():
                self._work(self._scenario.hub.commit_s, partial(self._commit, effect))
            case events.RoundClosed():
                self._last_closed = effect.round_id, effect.committed, effect.reason
                self._keep(effect.carried)
                if not effect.committed:
                    self._accounting.close(committed=False)
            case events.RunFinished():
                self.finished_at = self._queue.now
                self._queue.end()

    def _keep(self, carried: Collection[str]) -> None:
        """A round is over: drop what is not carried over to the next one."""
        for held in self._held:
            for peer_id in held.keys() - carried:
                del held[peer_id]

    def _reduce(self, effect: events.Reduce) -> None:
        self._merging[effect.fragment_id] = effect.peers
        seconds = self._scenario.hub.merge_s * len(effect.peers) / self._scenario.size.fragments
        self._work(seconds, partial(self._feed, events.Reduced(effect.round_id, effect.fragment_id)))

    def _work(self, seconds: float, then: Callable[[], object]) -> None:
        """Let the one worker thread do this: one thing after the other."""
        self._busy_until = max(self._busy_until, self._queue.now) + seconds
        self._queue.at(self._busy_until, then)

    def _commit(self, effect: events.Commit) -> None:
        newest, contributors, merged = effect.outer_step - 1, set[str](), set[str]()
        for fragment_id, peers in self._merging.items():
            shares = {peer_id: self._held[fragment_id][peer_id].share for peer_id in peers}
            bad = self._merger.rejected(fragment_id, shares) if self._merger is not None else frozenset()
            self._accounting.count(fragment_id, shares, bad, lambda based: (newest - based) // self._groups)
            contributors.update(peers)
            merged.update(set(peers) - bad)
        self._merged[effect.outer_step] = frozenset(contributors)
        self._refused[effect.outer_step] = frozenset(contributors - merged)
        for by_step in (self._merged, self._refused):
            by_step.pop(effect.outer_step - 2 * self._scenario.run.kept_updates, None)
        self._accounting.close(committed=True, contributors=len(contributors), live=len(self._here))
        self.membership.count(merged=merged, rejected=contributors - merged, absent=effect.missing)
        self._feed(events.CommitSucceeded(effect.round_id))

    def _publish(self) -> None:
        now, view = self._queue.now, self._view(self._views[-1][1].sequence + 1)
        self.newest = now, view
        self._views.append(self.newest)
        if view.phase is RunPhase.COMMITTING:
            return  # no peer decides anything because of it
        together: dict[float, list[Callable[[], None]]] = {}
        for latency_s, see in self.listeners.values():
            together.setdefault(latency_s, []).append(see)
        for latency_s, all_see in together.items():
            self._queue.all_at(now + latency_s, all_see)

    def _view(self, sequence: int) -> View:
        machine = self.machine
        last_round, committed, reason = self._last_closed
        return View(
            sequence=sequence,
            phase=_PHASES[machine.phase],
            outer_step=machine.outer_step,
            round_id=machine.round_id,
            oldest_update=self._oldest_update(),
            last_round_id=last_round,
            last_committed=committed,
            last_reason=reason,
        )

    def _oldest_update(self) -> int:
        """The outer step of the oldest update that is kept, as the store counts; 0 when none is."""
        newest = self.machine.outer_step
        return max(1, newest + 1 - self._scenario.run.kept_updates) if newest else 0


def _next_tick(when: float) -> float:
    """Return the first tick that finds `when` over. A lease is over only after its last moment."""
    return (math.floor(when / TICK_S) + 1) * TICK_S
