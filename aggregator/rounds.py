"""The round machine: which round is open, whom it waits for, when it reduces, commits or gives up. Sans-IO.

Owns: round ids, the outer step (it advances on CommitSucceeded only), quorum, deadline, grace. Must not know: time (every
call takes `now`, seconds of one monotonic clock), tensors, files, sockets, logging. `handle(event, now)` returns the effects
that the shell carries out, in order; their results come back as events.

Rules
 1. A round is one attempt to advance from outer step t to t + 1, with the fragments that are DUE at t (streaming exchanges
    one group of them per outer step). An aborted round is tried again with the same fragments, a commit leads to the next
    ones. Round ids strictly increase. After a commit or an abort the next round opens in the same call.
 2. READY peers are live and last reported outer step t, or t - 1: that one was told of the commit that led to t and applies
    it at its next step boundary. A contribution to t reports t, too. A peer whose last report is older is hung or takes a
    snapshot; nobody waits for it. A round opens with one ready peer (the first outer step: `start_peers`) and EXPECTS all
    that are ready at that moment, whether they were part of the last commit or not: a slower peer that missed one round would
    miss all of them otherwise, and the fastest peer would train alone.
 3. A round that opened out of GATHERING (start, restart, everybody lost) also expects those who report t within floor_s of
    its opening: the run is still assembling. Any other latecomer is OPTIONAL: what it delivers before the close counts, but
    nobody waits for it. It is expected from the next round on.
 4. A lost peer is expected no more, at once; a replica that lost a rank is lost, too. What it delivered whole stays in. If
    it returns, it is optional, or expected again when its contribution to this round was under way.
 5. A peer whose bytes were bad is out of the round: what it delivered is dropped where it is not reduced yet. If the ready
    peers that are left cannot make a quorum with what is in, the round is aborted at once.
 6. A fragment is reduced as soon as every expected peer has it in and at least a quorum has; each Reduce has a quorum.
 7. COMPLETE: has delivered all fragments that are due. The collection closes with a quorum of complete peers when (a) no
    expected peer is missing, or (b) the deadline is reached, or (c) every missing peer is overdue by its own times and then
    grace_s is over. Missing peers' fragments that are in and not yet reduced are used.
 8. The deadline is the largest expected_s of the expected peers, counted from the opening (see `deadlines`). With fewer than
    a quorum complete there, the round is aborted. With no ready peer there is nobody to give up on: the round stays, the
    phase is GATHERING, and the deadline is counted anew from the first peer that is ready again.
 9. A peer's time is recorded when it is complete, and, when a close leaves it out, as the time it was given: so the deadline
    grows with a peer that has become slower. Only peers that were expected from the opening on and never lost are measured.
10. A pause aborts an open collection. A collection that is closed already is being merged and journalled: it ends first.

phase       event                             condition                      effects                      next
----------  --------------------------------  -----------------------------  ---------------------------  ----------
GATHERING   MemberReady, Resume               enough are ready               RoundOpened                  COLLECTING
GATHERING   MemberReady                       a round is kept (rule 8)                                    COLLECTING
COLLECTING  Offered                           this round, this outer step                                 COLLECTING
COLLECTING  Arrived, MemberLost, Faulted      a fragment is in from all      Reduce                       COLLECTING
COLLECTING  any                               closes (rule 7)                Reduce ...                   COMMITTING
COLLECTING  any                               deadline without quorum        RoundClosed (aborted)        opens
COLLECTING  Faulted, MemberLost               faults leave no quorum         RoundClosed (aborted)        opens
COLLECTING  MemberLost                        none ready, no quorum                                       GATHERING
COMMITTING  Reduced                           it was the last fragment       Commit                       COMMITTING
COMMITTING  CommitSucceeded                                                  RoundClosed (committed)      opens
COMMITTING  CommitSucceeded                   it was the last outer step     RoundClosed, RunFinished     FINISHED
COLL, COMM  RoundFailed                                                      RoundClosed (aborted)        opens
COLL, GATH  Pause                                                            RoundClosed if one is open   PAUSED
PAUSED      Resume                                                                                        opens
any         Offered, Arrived                  other round, not due, closed   Refused                      same
any         results of another round                                                                      same
opens:      PAUSED when a pause was asked for; COLLECTING with RoundOpened when enough are ready; else GATHERING.
"""

from __future__ import annotations

from collections.abc import Callable

from aggregator.deadlines import Deadlines
from aggregator.open_round import OpenRound
from aggregator.round_events import (
    Arrived,
    Commit,
    CommitSucceeded,
    Effect,
    Event,
    Faulted,
    MemberLost,
    MemberReady,
    Offered,
    Pause,
    Phase,
    Reduced,
    Refused,
    Resume,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunFinished,
    Tick,
)
from edit.config import RoundsConfig
from edit.errors import LocalProtocolError

__all__ = ["RoundMachine"]


class RoundMachine:
    """One run's rounds. `first_round_id` must be larger than any id of an earlier process; `due`: the ids of the fragments that
    the advance from an outer step exchanges (`edit.schedule.fragments_due`), at least one."""

    def __init__(
        self,
        config: RoundsConfig,
        *,
        due: Callable[[int], tuple[int, ...]],
        outer_step: int,
        outer_steps: int,
        first_round_id: int,
    ) -> None:
        if first_round_id < 1:
            raise LocalProtocolError(f"first_round_id = {first_round_id}: must be at least 1")
        self._config = config
        self._due = due
        self._outer_step = outer_step
        self._outer_steps = outer_steps
        self._next_round_id = first_round_id
        self._live: dict[str, int] = {}  # peer_id -> the outer step it last reported
        self._able: set[str] = set()  # the ready ones of them (rule 2)
        self._round: OpenRound | None = None
        self._pausing = False
        self._deadlines = Deadlines(config)

    @property
    def phase(self) -> Phase:
        """See the table."""
        if self._outer_step >= self._outer_steps:
            return Phase.FINISHED
        if self._round is None:
            return Phase.PAUSED if self._pausing else Phase.GATHERING
        if self._round.close_reason:
            return Phase.COMMITTING
        return Phase.GATHERING if self._abandoned(self._round) else Phase.COLLECTING

    @property
    def round_id(self) -> int:
        """The open round, or 0."""
        return self._round.round_id if self._round else 0

    @property
    def outer_step(self) -> int:
        """The last committed outer step."""
        return self._outer_step

    @property
    def expected(self) -> frozenset[str]:
        """Whom the open round waits for or waited for; without the lost and the faulted."""
        return frozenset(self._round.expected) if self._round else frozenset()

    @property
    def arrived(self) -> frozenset[str]:
        """Whose contribution to the open round is complete."""
        return frozenset(self._round.complete) if self._round else frozenset()

    @property
    def deadline(self) -> float | None:
        """Of the open collection; None when none is open or nobody is left to wait for."""
        return self._round.deadline if self._round and self.phase is Phase.COLLECTING else None

    @property
    def opened_at(self) -> float | None:
        """When the open round opened."""
        return self._round.opened_at if self._round else None

    def expected_s(self, peer_id: str) -> float | None:
        """How long a round waits for this peer, in seconds from its opening; None before measurements."""
        return self._deadlines.expected_s(peer_id) if self._deadlines.measured(peer_id) else None

    def next_wakeup(self) -> float | None:
        """When a Tick can change something; None: only other events can."""
        if self._round is None or self.phase is not Phase.COLLECTING:
            return None
        return min(self._round.deadline, self._grace_over(self._round))

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at `now`; the effects are to be carried out in order.

        Raises LocalProtocolError for a result nobody asked for and a fragment of the open round that is not due.
        """
        match event:
            case MemberReady():
                return self._ready(event, now)
            case MemberLost():
                self._lost(event)
            case Offered():
                return self._offered(event)
            case Arrived():
                return self._arrived(event, now)
            case Faulted():
                self._faulted(event)
            case Reduced():
                return self._reduced(event)
            case CommitSucceeded():
                return self._committed(event, now)
            case RoundFailed():
                return self._failed(event, now)
            case Pause():
                return self._pause(now)
            case Resume():
                self._pausing = False
                return self._open(now, assembling=True)
            case Tick():
                pass
        return self._settle(now)

    # -- events -----------------------------------------------------------------------------------------------------------

    def _ready(self, event: MemberReady, now: float) -> list[Effect]:
        current = self._round
        abandoned = current is not None and self._abandoned(current)
        self._reports(event.peer_id, event.outer_step)
        if current is None:
            return self._open(now, assembling=True)
        if current.close_reason:
            return []
        if not self._is_ready(event.peer_id):
            current.expect_no_more(event.peer_id)
        elif abandoned:
            current.counted_from, current.welcome_until, current.deadline = now, now + self._config.floor_s, now
            current.expect(event.peer_id, self._deadlines.expected_s(event.peer_id))
        elif now <= current.welcome_until or (event.peer_id in current.wanted and event.peer_id in current.offered):
            current.expect(event.peer_id, self._deadlines.expected_s(event.peer_id))
        return self._settle(now)

    def _lost(self, event: MemberLost) -> None:
        self._live.pop(event.peer_id, None)
        self._able.discard(event.peer_id)
        if self._round and not self._round.close_reason:
            self._round.expect_no_more(event.peer_id)

    def _offered(self, event: Offered) -> list[Effect]:
        refusal = self._refusal(event.peer_id, event.round_id, event.fragment_id, event.outer_step)
        if refusal:
            return [refusal]
        if self._round:
            self._note_sending(self._round, event.peer_id)
        return []

    def _arrived(self, event: Arrived, now: float) -> list[Effect]:
        current = self._round
        if current and event.round_id == current.round_id and event.fragment_id not in current.delivered:
            raise LocalProtocolError(f"Arrived with fragment {event.fragment_id}; due are {current.due}")
        refusal = self._refusal(event.peer_id, event.round_id, event.fragment_id, self._outer_step)
        if refusal or current is None:
            return [refusal] if refusal else []
        was_complete = event.peer_id in current.complete
        self._note_sending(current, event.peer_id)
        current.deliver(event.peer_id, event.fragment_id)
        if not was_complete and event.peer_id in current.complete and event.peer_id in current.punctual:
            self._deadlines.record(event.peer_id, now - current.opened_at)
        return self._settle(now)

    def _faulted(self, event: Faulted) -> None:
        if self._round and event.round_id == self._round.round_id and not self._round.close_reason:
            self._round.fault(event.peer_id, event.reason)

    def _reduced(self, event: Reduced) -> list[Effect]:
        current = self._round
        if current is None or event.round_id != current.round_id:
            return []
        if event.fragment_id not in current.asked:
            raise LocalProtocolError(f"round {event.round_id}: nobody asked to reduce fragment {event.fragment_id}")
        current.reduced.add(event.fragment_id)
        return self._commit_if_reduced(current)

    def _committed(self, event: CommitSucceeded, now: float) -> list[Effect]:
        current = self._round
        if current is None or event.round_id != current.round_id:
            return []
        if not current.commit_asked:
            raise LocalProtocolError(f"round {event.round_id}: nobody asked to commit it")
        self._outer_step += 1
        self._able = {peer_id for peer_id in self._live if self._is_ready(peer_id)}
        effects = self._close(current, now, committed=True, reason=current.close_reason)
        if self._outer_step >= self._outer_steps:
            return [*effects, RunFinished(self._outer_step)]
        return [*effects, *self._open(now)]

    def _failed(self, event: RoundFailed, now: float) -> list[Effect]:
        if self._round is None or event.round_id != self._round.round_id:
            return []
        return self._abort(self._round, now, event.reason)

    def _pause(self, now: float) -> list[Effect]:
        self._pausing = True
        if self._round is None or self._round.close_reason:
            return []
        return self._abort(self._round, now, "paused")

    # -- the life of a round ----------------------------------------------------------------------------------------------

    def _open(self, now: float, *, assembling: bool = False) -> list[Effect]:
        enough = self._config.start_peers if self._outer_step == 0 else 1
        if self._round or self.phase is not Phase.GATHERING or len(self._able) < enough:
            return []
        current = self._round = OpenRound(
            round_id=self._next_round_id,
            outer_step=self._outer_step,
            quorum=self._config.quorum,
            opened_at=now,
            counted_from=now,
            welcome_until=now + self._config.floor_s if assembling else float("-inf"),
            deadline=now,
            delivered=self._nothing_in(),
        )
        current.open_with({peer_id: self._deadlines.expected_s(peer_id) for peer_id in self._able})
        self._next_round_id += 1
        return [RoundOpened(current.round_id, current.outer_step, frozenset(self._able), current.deadline)]

    def _nothing_in(self) -> dict[int, set[str]]:
        if due := self._due(self._outer_step):
            return {fragment_id: set() for fragment_id in due}
        raise LocalProtocolError(f"no fragment is due at outer step {self._outer_step}")

    def _close(self, current: OpenRound, now: float, *, committed: bool, reason: str) -> list[Effect]:
        self._round = None
        step, seconds = current.outer_step + 1, now - current.opened_at
        return [RoundClosed(current.round_id, step, committed, reason, current.absent, seconds)]

    def _abort(self, current: OpenRound, now: float, reason: str) -> list[Effect]:
        return [*self._close(current, now, committed=False, reason=reason), *self._open(now)]

    def _settle(self, now: float) -> list[Effect]:
        """Reduce what can be reduced; close the collection or give the round up, if it is time."""
        current = self._round
        if current is None or current.close_reason:
            return []
        current.note_quorum(now)
        if reason := self._closing_reason(current, now):
            self._record_absent(current, now)
            current.close_reason = reason
            return [*current.reduce(current.due), *self._commit_if_reduced(current)]
        if reason := self._abort_reason(current, now):
            self._record_absent(current, now)
            return self._abort(current, now, reason)
        return [*current.reduce(current.in_from_all())]

    def _closing_reason(self, current: OpenRound, now: float) -> str:
        """Why the collection closes now with what is in, or '' (rule 7)."""
        if current.quorum_at is None:
            return ""
        if not current.missing:
            present = len(current.complete)
            return f"{f'all {present} contributors' if present > 1 else 'the only contributor'} in{current.without()}"
        if now >= current.deadline:
            return f"deadline: {current.tally()}"
        return f"grace over: {current.tally()}" if now >= self._grace_over(current) else ""

    def _abort_reason(self, current: OpenRound, now: float) -> str:
        """Why the round is given up now, or '' (rules 5 and 8)."""
        late = now >= current.deadline
        if len(current.complete) >= self._config.quorum or not (current.faults or late):
            return ""
        few = f"too few: {len(current.complete)} of quorum {self._config.quorum}"
        able = self._able.difference(current.faults)
        if current.faults and len(current.complete | able) < self._config.quorum:
            return f"{few}{current.without()}"
        return f"{few} at the deadline{current.without()}" if late and able else ""

    def _commit_if_reduced(self, current: OpenRound) -> list[Effect]:
        if not current.close_reason or current.commit_asked or len(current.reduced) < len(current.due):
            return []
        current.commit_asked = True
        return [Commit(current.round_id, current.outer_step + 1, current.close_reason, current.absent)]

    def _note_sending(self, current: OpenRound, peer_id: str) -> None:
        current.offered.add(peer_id)
        if peer_id in self._live:  # rounds may be shorter than the time between two reports
            self._reports(peer_id, current.outer_step)

    def _reports(self, peer_id: str, outer_step: int) -> None:
        self._live[peer_id] = outer_step
        (self._able.add if self._is_ready(peer_id) else self._able.discard)(peer_id)

    def _record_absent(self, current: OpenRound, now: float) -> None:
        for peer_id in sorted(current.missing & current.punctual):
            self._deadlines.record(peer_id, now - current.opened_at)

    # -- questions --------------------------------------------------------------------------------------------------------

    def _is_ready(self, peer_id: str) -> bool:
        return self._outer_step - 1 <= self._live.get(peer_id, -2) <= self._outer_step

    def _abandoned(self, current: OpenRound) -> bool:
        """Nobody can contribute and what is in does not suffice (rule 8)."""
        return len(current.complete) < self._config.quorum and not self._able

    def _grace_over(self, current: OpenRound) -> float:
        """When every missing peer is overdue by its own times and the grace is over, too; inf before the quorum."""
        if current.quorum_at is None:
            return float("inf")
        return max(current.quorum_at, current.counted_from + current.patience_s) + self._config.grace_s

    def _refusal(self, peer_id: str, round_id: int, fragment_id: int, outer_step: int) -> Refused | None:
        current = self._round
        if current is None:
            return Refused(peer_id, f"no round is open: the run is {self.phase.value}", stale=True)
        if round_id != current.round_id:
            return Refused(peer_id, f"round {round_id} is not open; round {current.round_id} is", stale=True)
        if outer_step != current.outer_step:
            reason = f"computed against outer step {outer_step}; the run is at {current.outer_step}"
            return Refused(peer_id, reason, stale=True)
        if fragment_id not in current.delivered:
            due = f"{', '.join(map(str, current.due))} {'are' if len(current.due) > 1 else 'is'}"
            return Refused(peer_id, f"fragment {fragment_id} is not exchanged from outer step {outer_step}; {due}", stale=False)
        if peer_id in current.faults:
            return Refused(peer_id, f"out of round {round_id}: {current.faults[peer_id]}", stale=False)
        if current.close_reason and peer_id not in current.delivered[fragment_id]:
            return Refused(peer_id, f"round {round_id} is closed: {current.close_reason}", stale=True)
        return None
