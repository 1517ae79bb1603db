"""The round machine: which round is open, whom it waits for, when it reduces, commits or gives up. Sans-IO.

Owns: round ids, the outer step (it advances on CommitSucceeded only), quorum, deadline, grace, the end of the run. Must not
know: time (every call takes `now`, seconds of one monotonic clock), tensors, files, sockets, logging. `handle(event, now)`
returns the effects that the shell carries out, in order; their results come back as events.

Rules
 1. A round is one attempt to advance from outer step t to t + 1, with the fragments that are DUE at t (streaming exchanges
    one group of them per outer step). An aborted round is tried again with the same fragments, a commit leads to the next
    ones. Round ids strictly increase. After a commit or an abort the next round opens in the same call.
 2. READY peers are live and last reported outer step t, or t - 1: that one was told of the commit that led to t and applies
    it at its next step boundary; with max_staleness S down to t - 1 - S. A contribution to t reports t, too. A peer whose last
    report is older is hung or takes a snapshot; nobody waits for it. A round opens with one ready peer (the first outer step:
    `start_peers`) and EXPECTS all that are ready at that moment, whether they were part of the last commit or not: a slower
    peer that missed one round would miss all of them otherwise, and the fastest peer would train alone.
 3. A round that opened out of GATHERING (start, restart, everybody lost) also expects those who report t within floor_s of
    its opening: the run is still assembling. Any other latecomer is OPTIONAL: what it delivers before the close counts, but
    nobody waits for it. It is expected from the next round on.
 4. A lost peer is expected no more, at once; a replica that lost a rank is lost, too. What it delivered whole stays in. If
    it returns, it is optional, or expected again when its contribution was under way.
 5. A peer whose bytes were bad is out of the round: what it delivered is dropped where it is not reduced yet. If the ready
    peers that are left cannot make a quorum with what is in, the round is aborted at once.
 6. A fragment is reduced as soon as every expected peer has it in and at least a quorum has; each Reduce has a quorum.
 7. COMPLETE: has delivered all fragments that are due. The collection closes with a quorum of complete peers when (a) no
    expected peer is missing, or (b) the deadline is reached, or (c) every missing peer is overdue by its own times and then
    grace_s is over; with wait = "slack" instead: grace_s is over and those who are in have to wait (they train `overlap` inner
    steps meanwhile). Missing peers' fragments that are in and not yet reduced are used: those peers are in the commit in part.
 8. The deadline is the largest expected_s of the expected peers, counted from the opening (see `deadlines`). A transfer that
    moves extends it, if at its rate it ends before ceiling_s. With fewer than a quorum complete there, the round is aborted.
    With no ready peer there is nobody to give up on: the round stays, the phase is GATHERING, and the deadline is counted anew
    from the first peer that is ready again.
 9. A peer's times are recorded when they end, and, when a close leaves it out that is overdue, as the time it was given: so
    the deadline grows with a peer that has become slower. Measured is who was expected from the opening on and never lost.
10. A pause aborts an open collection. A collection that is closed already is being merged and journalled: it ends first. A
    drain lets an open collection come to its end, as long as somebody is ready; then the run is FINISHED, until a Resume.
11. max_staleness S > 0: contributions outlive their rounds and are merged whole (see `in_hand`): nothing is reduced before the
    close, what is not complete then is carried over, whatever became of the round, and counts in the round in which it is
    complete. Only a merge that failed drops what was in it: its bytes may be the reason.
12. merging = "arrivals": a round expects nobody and closes with the first complete contribution, and all others that are
    complete then. There is no deadline. Bad bytes abort the round, so that their sender may begin anew in the next one.

phase       event                             condition                      effects                      next
----------  --------------------------------  -----------------------------  ---------------------------  ----------
GATHERING   MemberReady, Resume               enough are ready               RoundOpened                  COLLECTING
GATHERING   MemberReady                       a round is kept (rule 8)                                    COLLECTING
COLLECTING  Offered, Progress                 taken (S = 0: this round)                                   COLLECTING
COLLECTING  Arrived, MemberLost, Faulted      a fragment is in from all      S = 0: Reduce                COLLECTING
COLLECTING  any                               closes (rules 7, 12)           Reduce ...                   COMMITTING
COLLECTING  any                               deadline without quorum        RoundClosed (aborted)        opens
COLLECTING  Faulted, MemberLost               faults leave no quorum         RoundClosed (aborted)        opens
COLLECTING  MemberLost                        none ready, no quorum                                       GATHERING
COMMITTING  Reduced                           it was the last fragment       Commit                       COMMITTING
COMMITTING  CommitSucceeded                   S > 0: some are too stale now  Refused ..., RoundClosed     opens
COMMITTING  CommitSucceeded                   the last outer step or token   RoundClosed, RunFinished     FINISHED
COLL, COMM  RoundFailed                                                      RoundClosed (aborted)        opens
COLL, GATH  Pause                                                            RoundClosed if one is open   PAUSED
PAUSED      Resume                                                                                        opens
COLL, COMM  Drain                                                                                         same
GATH, PAUS  Drain                                                            RoundClosed, RunFinished     FINISHED
FINISHED    Resume                            it was drained                                              opens
any         Offered, Arrived                  not taken (see `acceptance`)   Refused                      same
any         Faulted                           S > 0: it was not in a merge   Refused                      as above
any         results of another round                                                                      same
opens:      FINISHED with RunFinished when a drain was asked for; PAUSED when a pause was; COLLECTING with RoundOpened when
            enough are ready, and at once COMMITTING if what was carried over closes it; else GATHERING.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from edit.config.run import RoundsConfig
from edit.errors import LocalProtocolError
from edit.rounds.acceptance import Standing
from edit.rounds.closing import closing_reason, giving_up_reason, grace_over
from edit.rounds.contributions import ContributionBook
from edit.rounds.deadlines import Deadlines, PeerPhase
from edit.rounds.events import (
    Arrived,
    Commit,
    CommitSucceeded,
    Drain,
    Effect,
    Event,
    Faulted,
    MemberLost,
    MemberReady,
    Offered,
    Pause,
    Phase,
    Progress,
    Reduced,
    Refused,
    Resume,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunFinished,
    Tick,
)
from edit.rounds.open_round import OpenRound
from edit.rounds.peer_timing import PeerTimer
from edit.rounds.ready_peers import ReadyPeers
from edit.rounds.taking import Taking

__all__ = ["RoundMachine"]


class RoundMachine:
    """One run's rounds. `first_round_id` must be larger than any id of an earlier process; `due`: the ids of the fragments that
    the advance from an outer step exchanges (`edit.fragments.groups.fragments_due`), at least one; `stop_tokens`: the run
    ends when so
    many are merged (0: no bound), `tokens`: so many were merged before; `overlap`: that of SyncConfig."""

    def __init__(
        self,
        config: RoundsConfig,
        *,
        due: Callable[[int], tuple[int, ...]],
        outer_step: int,
        outer_steps: int,
        first_round_id: int,
        stop_tokens: int = 0,
        tokens: int = 0,
        overlap: int = 0,
    ) -> None:
        if first_round_id < 1:
            raise LocalProtocolError(f"first_round_id = {first_round_id}: must be at least 1")
        self._config = config
        self._due = due
        self._due_now = due(outer_step)
        self._outer_step, self._outer_steps = outer_step, outer_steps
        self._tokens, self._stop_tokens = tokens, stop_tokens
        self._next_round_id = first_round_id
        self._round: OpenRound | None = None
        self._pausing = self._draining = False
        self._waits = config.merging == "rounds"  # whether a round waits for anybody (rule 12)
        self._hand = ContributionBook(config.max_staleness, first_round_id)
        self._ready = ReadyPeers(outer_step, 1 + config.max_staleness)
        self.deadlines = Deadlines(config)
        self._phases = PeerTimer(self.deadlines, self._hand, overlap)
        self._taking = Taking(config, self._hand, self._phases, self._ready)
        self._stands: Standing | None = None  # None: to be found out again

    @property
    def phase(self) -> Phase:
        """See the table."""
        current = self._round
        if current is not None:
            if current.close_reason:
                return Phase.COMMITTING
            return Phase.COLLECTING if self._ready.able or not self._abandoned(current) else Phase.GATHERING
        reached = self._outer_step >= self._outer_steps or 0 < self._stop_tokens <= self._tokens
        if reached or self._draining:
            return Phase.FINISHED
        return Phase.PAUSED if self._pausing else Phase.GATHERING

    @property
    def round_id(self) -> int:
        """The open round, or 0."""
        return self._round.round_id if self._round else 0

    @property
    def outer_step(self) -> int:
        """The last committed outer step."""
        return self._outer_step

    @property
    def tokens(self) -> int:
        """Merged so far."""
        return self._tokens

    @property
    def draining(self) -> bool:
        """The operator asked for the end; it has come when the phase is FINISHED."""
        return self._draining

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
        """Of the open collection; None when none is open or nobody is waited for."""
        return self._round.deadline if self._round and self._waits and self.phase is Phase.COLLECTING else None

    def expected_s(self, peer_id: str) -> float | None:
        """How long a round waits for this peer, in seconds from its opening; None before measurements."""
        return self.deadlines.expected_s(peer_id) if self.deadlines.measured(peer_id) else None

    def peer_phase(self, peer_id: str) -> PeerPhase | None:
        """What this peer does; None when it is not live."""
        reported = self._ready.reported(peer_id)
        return None if reported is None else self._phases.phase_of(peer_id, reported, self._outer_step)

    def next_wakeup(self) -> float | None:
        """When a Tick can change something; None: only other events can."""
        current = self._round
        if current is None or current.close_reason or not self._waits or self._abandoned(current):
            return None
        return current.deadline if current.quorum_at is None else min(current.deadline, grace_over(current, self._config))

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at `now`; the effects are to be carried out in order.

        Raises LocalProtocolError for a result nobody asked for and a fragment of the open round that is not due.
        """
        match event:
            case Offered():
                refused = self._taking.offered(event, self._stands or self._standing(), now)
                return [refused] if refused else []
            case Arrived():
                if refused := self._taking.arrived(event, self._stands or self._standing(), now):
                    return [refused]
            case MemberReady():
                return self._reported(event, now)
            case MemberLost():
                self._lost(event)
            case Progress():
                self._taking.progress(event, self._standing(), now)
            case Faulted():
                refused = self._taking.faulted(event, self._standing())
                return [*([refused] if refused else []), *self._settle(now)]
            case Reduced():
                return self._reduced(event)
            case CommitSucceeded():
                return self._committed(event, now)
            case RoundFailed():
                return self._failed(event, now)
            case Pause():
                return self._pause(now)
            case Drain():
                return self._drain(now)
            case Resume():
                self._pausing = self._draining = False
                self._stands = None
                return self._open(now, assembling=True)
            case Tick():
                pass
        return self._settle(now)

    # -- events -----------------------------------------------------------------------------------------------------------

    def _reported(self, event: MemberReady, now: float) -> list[Effect]:
        peer_id, current = event.peer_id, self._round
        self.deadlines.at_least(peer_id, event.step_s)
        abandoned = not self._ready.able and current is not None and self._abandoned(current)
        if event.outer_step == self._outer_step and self._ready.reported(peer_id) == self._outer_step - 1:
            self._phases.applied(peer_id, now)
        self._ready.report(peer_id, event.outer_step)
        if current is None:
            return self._open(now, assembling=True)
        if current.close_reason:
            return []
        if not self._ready.is_ready(peer_id):
            current.expect_no_more(peer_id)
        elif self._waits and abandoned:
            current.counted_from, current.welcome_until, current.deadline = now, now + self._config.floor_s, now
            current.expect(peer_id, self.deadlines.expected_s(peer_id))
        elif now <= current.welcome_until or (peer_id in current.wanted and self._hand.get(peer_id) is not None):
            current.expect(peer_id, self.deadlines.expected_s(peer_id))
        return self._settle(now)

    def _lost(self, event: MemberLost) -> None:
        self._ready.lost(event.peer_id)
        if (under := self._hand.get(event.peer_id)) is not None:
            under.steady = False
        if self._round and not self._round.close_reason:
            self._round.expect_no_more(event.peer_id)

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
        self._due_now = self._due(self._outer_step)
        self._tokens += event.tokens
        self._ready.advance(self._outer_step)
        self._phases.published(now)
        self._hand.merged(current.complete, self._outer_step)
        return self._close(current, now, committed=True, reason=current.close_reason)

    def _failed(self, event: RoundFailed, now: float) -> list[Effect]:
        current = self._round
        if current is None or event.round_id != current.round_id:
            return []
        self._hand.drop(*(current.complete if current.close_reason else ()))
        return self._close(current, now, committed=False, reason=event.reason)

    def _pause(self, now: float) -> list[Effect]:
        self._pausing, self._stands = True, None
        if self._round is None or self._round.close_reason:
            return []
        return self._close(self._round, now, committed=False, reason="paused")

    def _drain(self, now: float) -> list[Effect]:
        if self.phase is Phase.FINISHED:
            return []
        current, self._draining, self._stands = self._round, True, None
        if current is None:
            return self._finish()
        if current.close_reason or (self._waits and not self._abandoned(current)):
            return []
        return self._close(current, now, committed=False, reason="drained")

    # -- the life of a round ----------------------------------------------------------------------------------------------

    def _open(self, now: float, *, assembling: bool = False) -> list[Effect]:
        enough = self._config.start_peers if self._outer_step == 0 and self._waits else 1
        if self._round or self.phase is not Phase.GATHERING or len(self._ready.able) < enough:
            return []
        if not self._due_now:
            raise LocalProtocolError(f"no fragment is due at outer step {self._outer_step}")
        current = self._round = OpenRound(
            round_id=self._next_round_id,
            outer_step=self._outer_step,
            quorum=self._config.quorum if self._waits else 1,
            opened_at=now,
            counted_from=now,
            welcome_until=now + self._config.floor_s if assembling and self._waits else -math.inf,
            deadline=now if self._waits else math.inf,
            delivered={fragment_id: set() for fragment_id in self._due_now},
            whole=self._hand.carries,
        )
        if self._waits:
            current.open_with(self.deadlines.expected_of(self._ready.able))
        self._next_round_id, self._stands = self._next_round_id + 1, None
        opened = RoundOpened(current.round_id, current.outer_step, frozenset(current.expected), current.deadline)
        self._taking.take_up(current)
        return [opened, *(self._settle(now) if self._hand.carries else ())]

    def _close(self, current: OpenRound, now: float, *, committed: bool, reason: str) -> list[Effect]:
        """The round is over; what comes then."""
        self._round = self._stands = None
        if self.phase is Phase.FINISHED:
            self._hand.clear()
        stale = [Refused(peer_id, why, stale=True) for peer_id, why in self._hand.close(self._outer_step)]
        carried = tuple(peer_id for peer_id, _ in self._hand.items())
        step, seconds = current.outer_step + 1, now - current.opened_at
        closed = RoundClosed(current.round_id, step, committed, reason, current.absent, seconds, carried)
        return [*stale, closed, *(self._finish() if self.phase is Phase.FINISHED else self._open(now))]

    def _finish(self) -> list[Effect]:
        self._hand.clear()
        return [RunFinished(self._outer_step)]

    def _settle(self, now: float) -> list[Effect]:
        """Reduce what can be reduced; close the collection or give the round up, if it is time."""
        current = self._round
        if current is None or current.close_reason:
            return []
        current.note_quorum(now)
        if current.quorum_at is not None and (reason := closing_reason(current, self._config, now)):
            self._phases.left_out(current, now)
            return [*current.close(reason), *self._commit_if_reduced(current)]
        in_doubt = current.faults or now >= current.deadline
        if in_doubt and (reason := giving_up_reason(current, self._config, self._ready.able, now)):
            self._phases.left_out(current, now)
            return self._close(current, now, committed=False, reason=reason)
        return [] if self._hand.carries or not (whole := current.in_from_all()) else [*current.reduce(whole)]

    def _commit_if_reduced(self, current: OpenRound) -> list[Effect]:
        if not current.close_reason or current.commit_asked or len(current.reduced) < len(current.due):
            return []
        current.commit_asked = True
        return [Commit(current.round_id, current.outer_step + 1, current.close_reason, current.absent)]

    # -- questions --------------------------------------------------------------------------------------------------------

    def _abandoned(self, current: OpenRound) -> bool:
        """Nobody can contribute and what is in does not suffice (rule 8)."""
        return not self._ready.able and len(current.complete) < current.quorum

    def _standing(self) -> Standing:
        idle = None if self._round else self.phase
        self._stands = run = Standing(self._round, idle, self._outer_step, self._due_now, self._next_round_id - 1)
        return run
