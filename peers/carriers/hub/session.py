"""The peer's view of the run: what it knows, and what follows from it.

Sans-IO: it takes `now`, and its randomness is injected. Only the methods under "what changes it" change a session; everything
else reads it.

Link                     event           next
-----------------------  --------------  -----------------------------------------------------------
OFFLINE                  connecting      GREETING   (Hello is on its way)
GREETING                 welcome         WELCOMED   (backoff starts again; the configuration is known)
WELCOMED, ATTENDING      view            ATTENDING  (a view older than the newest of this connection is dropped)
any but EXPELLED         down            OFFLINE    (the view is kept, but no longer believed)
any                      expel           EXPELLED   (final: no reconnection)
EXPELLED                 down            EXPELLED

Decision about outer step t, this peer having sent a contribution that names round R and was computed against outer step s; the
first line that holds wins. S: the run's max_staleness; with S > 0 contributions outlive their rounds.
-----------------------  --------------------------------------------------------------------------------------------
EVICTED                  expelled by the operator
REFUSED                  expelled otherwise
CUT_OFF                  not attending for longer than two heartbeats (what was sent is then in doubt; the rest is not sent)
WAIT                     not attending
BEHIND                   `edit.worker.catch_up` says TakeSnapshot (resync: the view says so, and no snapshot was taken since)
COMMITTED                `edit.worker.catch_up` says ApplyUpdates
FINISHED                 the phase is FINISHED
ABORTED                  S = 0: round R is closed (last_round_id >= R), or a newer one is open
ABORTED                  S > 0: the coordinator has refused it, before or at outer step t; or t - s > S
WAIT                     otherwise

Where the aggregator moves from host to host (a swarm), a contribution FOLLOWS it: round R of an earlier host (`outlived`) is
not lost but over, and rank 0 names a round of the present one instead. With S > 0 not before this peer has looked at every
commit that the present host has: the contribution is then in none of them, and in no other that an earlier host may have made,
since a host serves what is agreed on, and only the present one adds to it.

A commit to outer step t + 1 may be without a contribution that a later one brings: that one is CARRIED, as long as the
coordinator has not refused it before or at t + 1, and t + 1 - s <= S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from edit.errors import EditError, EvictedError, LocalProtocolError, RefusedError
from edit.records import round_name, round_number
from edit.worker.catch_up import ApplyUpdates, TakeSnapshot, catch_up
from editpb.limits import MAX_COUNT
from editpb.messages import Expel, RunPhase, View, Welcome

__all__ = ["HAS_PARAMETERS", "MOST_PASSED_OVER", "NEVER", "Asked", "Decision", "Link", "Sent", "Session"]

FIRST_DELAY_S, LAST_DELAY_S = 0.2, 5.0
CHANGES_S = 4.0  # within which another host takes the aggregator's place in a swarm
QUICK_TRIES = 20  # after the first delay each, where another host takes the aggregator's place within seconds
MOST_PASSED_OVER = 20  # Welcomes in a row of hosts that served earlier than one that was heard; one of them may have lied


class Link(Enum):
    """The control connection, as the table above has it."""

    OFFLINE = "offline"
    GREETING = "greeting"
    WELCOMED = "welcomed"
    ATTENDING = "attending"
    EXPELLED = "expelled"


class Decision(Enum):
    """What became of an outer step."""

    WAIT = "wait"
    CUT_OFF = "cut off"
    COMMITTED = "committed"
    ABORTED = "aborted"
    BEHIND = "behind"
    FINISHED = "finished"
    EVICTED = "evicted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, order=True)
class Asked:
    """When this peer was asked to found the run; a later question is greater."""

    connection: int  # see `Session.connections`
    sequence: int  # of the view that asked

    def end_of_connection(self) -> Asked:
        """Return what is greater than every question of the same connection."""
        return Asked(self.connection, 1 << 64)


class Sent(NamedTuple):
    """This peer's contribution."""

    round_id: int  # the round that it names; 0 before a byte was sent
    outer_step: int  # of the outer parameters that it was computed against
    refused_at: int | None = (
        None  # an outer step that the run had reached when the coordinator refused it; no later commit has it
    )
    reason: str = ""  # of the refusal

    def refused_by(self, outer_step: int) -> bool:
        """Return whether the coordinator has said that no commit after the one to `outer_step` can have it."""
        return self.refused_at is not None and self.refused_at <= outer_step


_WAITING = {phase: f"the run is {phase.value}" for phase in RunPhase}
NEVER = Asked(-1, 0)  # before every question
HAS_PARAMETERS = Asked(1 << 64, 0)  # no question: the run has been founded


class Session:
    """One peer's session with the coordinator, over any number of connections.

    Args:
        random: draws from [0, 1); spreads the reconnections of many peers.
        now: monotonic seconds.
        heartbeat_s: seconds between heartbeats, until `configure` says what the run uses.
        max_staleness: the bound on staleness in outer steps, likewise.
        follows: whether the aggregator may move to another host, and contributions follow it.
    """

    def __init__(
        self,
        random: Callable[[], float],
        now: float,
        heartbeat_s: float = 2.0,
        max_staleness: int = 0,
        *,
        follows: bool = False,
    ) -> None:
        self.follows = follows
        self._random = random
        self._heartbeat_s = heartbeat_s
        self._max_staleness = max_staleness
        self._link = Link.OFFLINE
        self._offline_since = now
        self._attempts = 0  # to connect, since the last Welcome
        self._connections = 0
        self._welcome: Welcome | None = None
        self._view: View | None = None
        self._expel: Expel | None = None
        self._passed_over = 0  # Welcomes in a row of earlier hosts
        self._resynced_at = -1  # sequence of the newest view when a snapshot was taken; -1: no resync has been obeyed

    # ---- what it knows -------------------------------------------------------------------------------------------------------

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats."""
        return self._heartbeat_s

    @property
    def carries(self) -> bool:
        """Whether contributions outlive their rounds."""
        return self._max_staleness > 0

    @property
    def ahead_bytes(self) -> int:
        """How many bytes of the contribution may be on their way without a receipt."""
        return (self._view.ahead_bytes if self._view is not None else 0) or MAX_COUNT

    @property
    def connections(self) -> int:
        """Welcomes so far: tells one connection from the next."""
        return self._connections

    @property
    def welcome(self) -> Welcome | None:
        """The last Welcome, also while offline."""
        return self._welcome

    @property
    def view(self) -> View | None:
        """The newest view of the present connection; None while not attending."""
        return self._view if self._link is Link.ATTENDING else None

    @property
    def last_view(self) -> View | None:
        """The newest view, also of a connection that is gone."""
        return self._view

    @property
    def expulsion(self) -> EditError | None:
        """Why the coordinator has expelled this peer, as an EvictedError or a RefusedError; None: it has not."""
        if (expel := self._expel) is None:
            return None
        return (EvictedError if expel.evicted else RefusedError)(expel.reason)

    @property
    def under_way(self) -> bool:
        """Whether training may start: a round is or was open, so all peers start together."""
        view = self.view
        return view is not None and (
            view.outer_step > 0 or view.phase in (RunPhase.COLLECTING, RunPhase.COMMITTING, RunPhase.FINISHED)
        )

    def founding(self, answered: Asked) -> Asked | None:
        """Return what founding asks of this peer: HAS_PARAMETERS, a question newer than `answered`, or None (wait)."""
        view = self.view
        if view is None:
            return None
        if view.phase is not RunPhase.FOUNDING:
            return HAS_PARAMETERS
        asked = Asked(self._connections, view.sequence)
        return asked if view.found and asked > answered else None

    def reconnect_delay(self) -> float | None:
        """Return the seconds to wait before the next attempt to connect; None: do not connect again.

        0.2 s doubling to 5 s, jittered over the upper half so that many peers do not come back at once. In a swarm it begins to
        grow after four seconds.
        """
        if self._link is Link.EXPELLED:
            return None
        attempts = max(0, self._attempts - QUICK_TRIES) if self.follows else self._attempts
        ceiling = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempts, 10))
        return max(FIRST_DELAY_S, ceiling * (1 + self._random()) / 2)

    def cut_off(self, now: float) -> bool:
        """Return whether there has been no connection for longer than two heartbeats; in a swarm, than four seconds, too."""
        connected = self._link in (Link.WELCOMED, Link.ATTENDING)
        return not connected and now - self._offline_since > max(2 * self._heartbeat_s, CHANGES_S if self.follows else 0.0)

    def open_round(self, outer_step: int, after: int = 0) -> int:
        """Return the round, newer than `after`, that takes contributions computed against `outer_step`; 0: there is none."""
        view = self.view
        if (
            view is None
            or not 0 <= view.outer_step - outer_step <= self._max_staleness
            or view.phase is not RunPhase.COLLECTING
            or _resync_due(view, self._resynced_at)
        ):
            return 0
        return view.round_id if view.round_id > after else 0

    def outlived(self, round_id: int) -> bool:
        """Return whether this round was of an earlier host, so that what names it will name another one; never at a hub."""
        return self.follows and self._welcome is not None and 0 < round_id < self._welcome.first_round_id

    def name_round(self, sent: Sent, after: int, position: int = 0, *, leads: bool = True, named: int = 0) -> int:
        """Return the round that a contribution names from now on; 0: none is open for it yet.

        With S = 0 rank 0 stays with the round it named first; another rank cannot know which one that is (it may have seen one
        that was lost meanwhile), so it follows to each newer round of the same outer step. With S > 0 the name stays, and the
        other ranks name what rank 0 says. The name of a round that is `outlived` does not stay.

        Args:
            sent: the contribution.
            after: the newest round that an earlier contribution named: this one names a newer one.
            position: the outer step that this peer has come to, and no commit up to it has the contribution. Where it follows.
            leads: whether this is rank 0.
            named: S > 0: the round that rank 0 says; 0: it has not said any.
        """
        if sent.round_id and (leads or self.carries) and not self.outlived(sent.round_id):
            return sent.round_id
        after = max(after, sent.round_id)
        if self.carries and named > after:
            return named
        if self.carries and (not leads or (sent.round_id and not self._has_seen_all(position))):
            return sent.round_id
        return self.open_round(sent.outer_step, after) or sent.round_id

    def _has_seen_all(self, position: int) -> bool:
        return self.view is not None and self.view.outer_step == position

    def takes(self, round_id: int) -> bool:
        """Return whether sending what names round `round_id` is still worth trying; while offline it is."""
        if self._expel is not None or self.outlived(round_id):
            return False
        return self.carries or self.view is None or self.view.round_id == round_id

    def aborted_since(self, round_id: int) -> int:
        """Return the round that was closed last, if it came to nothing and is not older than `round_id`; else 0."""
        view = self.view
        return view.last_round_id if view is not None and not view.last_committed and view.last_round_id >= round_id else 0

    def decide(self, outer_step: int, sent: Sent | None, now: float) -> tuple[Decision, str]:
        """Return what became of the attempt to advance from `outer_step`, and why.

        sent: what this peer contributed to it, if anything.
        """
        if self._expel is not None:
            return (Decision.EVICTED if self._expel.evicted else Decision.REFUSED), self._expel.reason
        view = self._view if self._link is Link.ATTENDING else None
        if view is None:
            if self.cut_off(now):
                return Decision.CUT_OFF, "no connection to the coordinator"
            return Decision.WAIT, f"the control connection is {self._link.value}"
        if (known := _of_the_run(view, outer_step, self._resynced_at)) is not None:
            return known
        if sent is not None and (lost := self._lost(view, sent)):
            return Decision.ABORTED, lost
        return Decision.WAIT, _WAITING[view.phase]

    def carried_past(self, outer_step: int, sent: Sent | None) -> bool:
        """Return whether a contribution that the commit TO `outer_step` does not have may be part of a later one."""
        return sent is not None and self.carries and not sent.refused_by(outer_step) and not self._stale(sent, outer_step)

    def _stale(self, sent: Sent, outer_step: int) -> bool:
        return outer_step - sent.outer_step > self._max_staleness

    def _lost(self, view: View, sent: Sent) -> str:
        """Return why no commit will have what was sent, or ''."""
        if self.carries:
            if self._stale(sent, view.outer_step):
                return f"computed against outer step {sent.outer_step}, too stale at {view.outer_step}"
            return sent.reason if sent.refused_by(view.outer_step) else ""
        if self.outlived(sent.round_id):
            return ""
        if sent.round_id and view.last_round_id >= sent.round_id:
            return view.last_reason or f"round {round_number(sent.round_id)} was lost"
        if sent.round_id and view.round_id > sent.round_id:
            return f"{round_name(sent.round_id, view.round_id)} was lost; round {round_number(view.round_id)} is open"
        return ""

    # ---- what changes it -----------------------------------------------------------------------------------------------------

    def configure(self, heartbeat_s: float, max_staleness: int = 0) -> None:
        """Take the heartbeat interval (seconds) and the bound on staleness (outer steps) of the run's configuration."""
        self._heartbeat_s, self._max_staleness = heartbeat_s, max_staleness

    def connecting(self) -> None:
        """Note that a connection is being tried. Raises LocalProtocolError unless offline."""
        if self._link is not Link.OFFLINE:
            raise LocalProtocolError(f"connecting while {self._link.value}")
        self._link = Link.GREETING
        self._attempts += 1

    def welcomed(self, welcome: Welcome) -> str | None:
        """Take the Welcome; return what is wrong with it, or None."""
        if self._link is not Link.GREETING:
            return f"a Welcome while {self._link.value}"
        if self._welcome is not None and self._welcome.run_id != welcome.run_id:
            return f"the coordinator runs {welcome.run_id}, this peer belongs to {self._welcome.run_id}"
        if self.outlived(welcome.first_round_id) and self._passed_over < MOST_PASSED_OVER:
            self._passed_over += 1
            return "it has not heard yet that another host serves the run"
        self._passed_over = 0
        self._link, self._welcome = Link.WELCOMED, welcome
        self._connections += 1
        self._attempts, self._resynced_at = 0, -1
        return None

    def viewed(self, view: View) -> str | None:
        """Take a view, unless it is older than the newest; return what is wrong with it, or None."""
        if self._link not in (Link.WELCOMED, Link.ATTENDING):
            return f"a View while {self._link.value}"
        if self.view is None or view.sequence >= self.view.sequence:
            self._link, self._view = Link.ATTENDING, view
            if not view.resync:
                self._resynced_at = -1
        return None

    def expelled(self, expel: Expel) -> None:
        """Take the Expel; the first one counts."""
        self._expel = self._expel or expel
        self._link = Link.EXPELLED

    def down(self, now: float) -> None:
        """Note that the connection, or the attempt to connect, is over."""
        if self._link in (Link.WELCOMED, Link.ATTENDING):
            self._offline_since = now
        if self._link is not Link.EXPELLED:
            self._link = Link.OFFLINE

    def resynced(self) -> None:
        """Note that a snapshot was taken: a resync that was asked for before is obeyed."""
        if self._view is not None:
            self._resynced_at = self._view.sequence


def _resync_due(view: View, resynced_at: int) -> bool:
    return bool(view.resync) and view.sequence > resynced_at


def _of_the_run(view: View, outer_step: int, resynced_at: int) -> tuple[Decision, str] | None:
    """Return what the view says of `outer_step`, whatever this peer has sent; None: nothing."""
    resync = view.resync if _resync_due(view, resynced_at) else ""
    match catch_up(outer_step, view.outer_step, oldest_update=view.oldest_update, resync=resync):
        case TakeSnapshot(reason):
            return Decision.BEHIND, reason
        case ApplyUpdates():
            return Decision.COMMITTED, f"the run is at outer step {view.outer_step}"
    if view.phase is RunPhase.FINISHED:
        return Decision.FINISHED, f"the run finished at outer step {view.outer_step}"
    return None
