"""The round machine: which round is open, whom it waits for, what it takes, when it reduces, commits or gives up.

`handle(event, now)` returns the effects that the shell carries out, in order; their results come back as events.

Rules

Opening
 1. A round is one attempt to advance from outer step t to t + 1, with the fragments that are DUE at t (streaming exchanges
    one group of them per outer step). An aborted round is tried again with the same fragments; a commit leads to the next
    ones. Round ids strictly increase. After a commit or an abort the next round opens in the same call (rule 18 excepted).
 2. READY peers are live and last reported outer step t, or t - 1: such a peer was told of the commit that led to t and
    applies it at its next step boundary; with max_staleness S down to t - 1 - S. A contribution to t is a report of t, too.
    A peer whose last report is older is hung or takes a snapshot; nobody waits for it. A round opens with one ready peer
    (the first outer step: with `start_peers`) and EXPECTS all that are ready at that moment, whether they were part of the
    last commit or not: otherwise a slower peer that missed one round would miss all of them, and the fastest peer would
    train alone.
 3. A round that opened out of GATHERING (start, restart, everybody lost) also expects those who report t within floor_s of
    its opening, because the run is still assembling; any other round those who report t at the moment of its opening. A
    peer that comes later is OPTIONAL: what it delivers before the close counts, but nobody waits for it. The next round
    expects it. Where another process goes on with a run whose peers are there, as in a swarm, the first round does not open
    before those are ready that are AWAITED, or awaits_until: else the first to come back would close it alone. Until then, a
    drain does not end the run for want of peers, either.

Waiting
 4. A lost peer is expected no more, at once; a replica that lost a rank is lost, too. What it delivered stays in. If it
    returns, it is optional, or expected again when its contribution was under way.
 5. A peer whose bytes were bad is out of the round: what it delivered is dropped where it is not being merged yet. If the
    ready peers that are left cannot make a quorum with what is in, the round is aborted at once. Rules 17 and 18 say what
    follows.
 6. A fragment is reduced as soon as every expected peer has it in and at least a quorum has. Each Reduce has a quorum.
 7. A peer is COMPLETE when it has delivered all fragments that are due. The collection closes with a quorum of complete
    peers when (a) no expected peer is missing, or (b) the deadline is reached, or (c) every missing peer is overdue by its
    own times and then grace_s is over, or (d) the shell says Close. With wait = "slack", (c) is: grace_s is over and the
    complete peers would have to wait for the outcome (they train `overlap` inner steps meanwhile). Fragments of missing
    peers that are in and not reduced yet are used: those peers are in the commit in part.
 8. The deadline is the largest expected_s of the expected peers, counted from the opening (see `edit.rounds.deadlines`): at
    most ceiling_s, and above it, up to twice as much, only for a peer whose inner step was measured here to take so long;
    what it claims does not suffice. A transfer that moves extends it, if at its rate it ends before ceiling_s. With fewer
    than a quorum complete at the deadline, the round is aborted. With no ready peer there is nobody to give up on: the
    round stays, the phase is GATHERING, and the deadline counts from the first peer that is ready again.
 9. A peer's times are recorded when they end, and, when a close leaves out a peer that is overdue, as the time that it was
    given: so the deadline grows with a peer that has become slower. Only peers that were expected from the opening on and
    never lost are measured.
10. A pause aborts an open collection. A collection that is closed is being merged and journalled: that ends first. A drain
    lets an open collection come to its end, as long as somebody is ready; then the run is FINISHED, until a Resume. Where the
    Drain names a later outer step (the parts of a swarm end together), rounds go on until it is committed, or until one ends
    without a commit or none opens. With merging = "arrivals" nobody knows when a round would close: it is FINISHED at once.

Contributions
11. A contribution is known by its peer, the round that was open when it began, and the outer step s it was computed
    against. The same one again is one contribution. At most one of each peer is held, over all rounds.
12. A contribution may be merged at outer step t as long as t - s <= max_staleness S. With S = 0 it is merged in the round
    that it names, or never: it is refused when another round is open or this one is closed, and dropped when this one is
    over. With S > 0 it may outlive its round: nothing is reduced before the close (rule 6 does not apply), a contribution
    is merged whole in the first round that closes when it is complete, and what is not complete then, or was in a round
    that was aborted, is CARRIED OVER to the next round. Its bytes may go on coming in while no round is open. Once it is
    too stale it is refused.
13. With S > 0, a contribution that was merged is refused if it comes again: the commit has its verdict. So the rounds that
    a peer's contributions name strictly increase, and none of them is from an earlier start of the coordinator, about which
    nothing is known here. A newer contribution of the same peer replaces one that is not whole: the peer started again. One
    that is whole stays, and the newer one is refused.
14. A merge or commit that failed drops what was in it: its bytes may be the reason. What the shell has Withdrawn is
    dropped, too, unless it is being merged; its peer is waited for as before. What an evicted peer sent is withdrawn; a round
    that has merged a part of it early fails.

Arrivals
15. merging = "arrivals": a round expects nobody and closes with the first complete contribution, and all others that are
    complete then. There is no deadline. Bad bytes abort the round, so that their sender may start again in the next one.

Absent peers
16. A round that waited for a live peer until it was overdue, and did not get a whole contribution of it, is an ABSENCE of that
    peer. A transfer that moves is no absence: bytes or fragments came since a round left it out last; but after S + 3 such
    rounds in a row it is. The next round gives the peer ceiling_s, for it may have become slower. After two absences in a row
    it is OPTIONAL (rule 3) until it delivers a whole contribution, so that a peer that only reports, or whose contributions
    never come whole, costs a few deadlines, not one in every round. What comes of an optional peer before the close counts, as
    ever. It is tried again, once each, after 8, 16, 32, ... rounds: a peer that is a little slower than the others would never
    fit in otherwise. Where the others cannot make a quorum it is waited for like any other: nothing is lost by that. A peer
    that is lost and returns has its absences still.

Faults
17. Three faults (bad bytes) among a peer's last sixteen outcomes, merged contributions being the others, QUARANTINE it: for a
    minute, then for twice as long each time, up to an hour. Meanwhile nothing is taken of it and nobody waits for it; where
    the others cannot make a quorum, no round opens. One damaged message costs a round, no more. A Resume ends all quarantines.
18. A round that was aborted with a fault in it, or by a merge or commit that failed, is tried again at once; after two in a
    row half a second later, then after twice as long each time, up to a minute. A commit and a Resume end that.

Claims
19. The inner steps and tokens that a peer says are behind its contribution count, for whatever they count, up to what the
    configuration and the times measured here allow (`edit.rounds.work_claims`). The sum of the tokens stays at MOST_TOKENS.

Masks, noise, and coefficients of the whole model
20. With `whole` (secure aggregation, noise for organisations, or robust.scope = "model") nothing is reduced before the close,
    and of no peer that is not complete then; the shell opens the sum, draws the noise, or weighs the contributions, when it is
    asked for the first Reduce, or fails the round. Once the peers have shared the keys of a masked round, it is RESTRICTED to
    them: nobody waits for another one, which would have nothing to mask with. Before that nobody can contribute, so where a
    deadline ends the round then, it is an absence of nobody, and no time is measured.

The end
21. A run that can merge no more (a budget of privacy is used up) is ENDED: an open collection is aborted, a round that is being
    merged comes to its end, committed or not. Then the run is FINISHED, and no Resume opens another round.

phase       event                             condition                      effects                      next
----------  --------------------------------  -----------------------------  ---------------------------  ----------
GATHERING   MemberReady, Resume               enough are ready               RoundOpened                  COLLECTING
GATHERING   MemberReady                       a round is kept (rule 8)                                    COLLECTING
COLLECTING  Offered, Progress                 taken (rules 11 to 13)                                      COLLECTING
COLLECTING  Arrived, MemberLost, Faulted      a fragment is in from all      S = 0: Reduce                COLLECTING
COLLECTING  any                               closes (rules 7, 15)           Reduce ...                   COMMITTING
COLLECTING  Close                             a quorum is complete           Reduce ...                   COMMITTING
COLLECTING  any                               deadline without quorum        RoundClosed (aborted)        opens
COLLECTING  Faulted, MemberLost               faults leave no quorum         RoundClosed (aborted)        opens
COLLECTING  Faulted                           one too many (rule 17)         Quarantined                  as above
GATHERING   Tick                              it was held back, no longer    RoundOpened                  COLLECTING
COLLECTING  MemberLost                        none ready, no quorum                                       GATHERING
COLLECTING  MemberLost                        likewise, a drain was asked    RoundClosed (aborted)        opens
COLLECTING  any                               ends, somebody is overdue      an absence of each (rule 16)  as above
COLLECTING  Withdrawn                                                                                     COLLECTING
COLLECTING  Restricted                        rule 20                                                     as above
COMMITTING  Reduced                           it was the last fragment       Commit                       COMMITTING
COMMITTING  CommitSucceeded                   S > 0: some are too stale now  Refused ..., RoundClosed     opens
COMMITTING  CommitSucceeded                   the last outer step or token   RoundClosed, RunFinished     FINISHED
COLL, COMM  RoundFailed                                                      RoundClosed (aborted)        opens
COLL, GATH  Pause                                                            RoundClosed if one is open   PAUSED
PAUSED      Resume                                                                                        opens
COLL, COMM  Drain                                                                                         same
GATH, PAUS  Drain                             no later step, or none opens   RoundClosed, RunFinished     FINISHED
GATH, PAUS  Drain                             a later outer step             RoundOpened                  COLLECTING
GATHERING   Drain, Tick                       likewise, AWAITED are missing                               GATHERING
COMMITTING  EndRun                            rule 21                                                     same
any         EndRun                            rule 21                        RoundClosed, RunFinished     FINISHED
FINISHED    Resume                            it was drained                                              opens
any         Offered, Arrived                  not taken (rules 5, 11 to 13)  Refused                      same
any         Faulted                           S > 0: it was not in a merge   Refused                      as above
any         results of another round                                                                      same
opens:      FINISHED with RunFinished when a drain was asked for (rule 10); PAUSED when a pause was; COLLECTING with RoundOpened
            when enough are ready and nothing holds it back (rules 17, 18), and at once COMMITTING if what was carried over
            closes it; else GATHERING.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Set

from edit.config.run import RoundsConfig
from edit.errors import LocalProtocolError
from edit.records import MOST_TOKENS, round_name, round_number
from edit.rounds.absences import Absences
from edit.rounds.contributions import ContributionBook
from edit.rounds.deadlines import Deadlines, PeerPhase
from edit.rounds.events import (
    Arrived,
    Close,
    Commit,
    CommitSucceeded,
    Drain,
    Effect,
    EndRun,
    Event,
    Faulted,
    MemberLost,
    MemberReady,
    Offered,
    Pause,
    Phase,
    Progress,
    Quarantined,
    Reduced,
    Refused,
    Restricted,
    Resume,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunFinished,
    Tick,
    Withdrawn,
)
from edit.rounds.faults import Faults, delay_s
from edit.rounds.open_round import OpenRound, ReadyPeers
from edit.rounds.peer_timing import PeerTimer
from edit.rounds.work_claims import UsualWork, Work, WorkBounds, WorkClaims

__all__ = ["RoundMachine"]


class RoundMachine:
    """One run's rounds.

    Args:
        config: when rounds open and close.
        due: the ids of the fragments that the advance from an outer step exchanges (`edit.fragments.groups.fragments_due`).
        outer_step: the last committed one.
        outer_steps: the run ends there.
        first_round_id: larger than any id of an earlier process, and at least 1.
        stop_tokens: the run ends when so many tokens are merged; 0: no bound.
        tokens: so many tokens were merged before.
        work: what the configuration says of the work behind a contribution; None: what peers claim is believed.
        idle_s: seconds that the run stood still before the coordinator started.
        overlap: inner steps that a peer trains behind an exchange (`SyncConfig.overlap`).
        awaited: the peers without which the first round does not open before `awaits_until` (rule 3).
        backs_off: whether a round waits after several that came to nothing (rule 18); not where the clock stands still.
        whole: nothing of a contribution is reduced before the close (rule 20).
        masked: nobody can contribute before the round is Restricted (rule 20).
        ended: why the run was ended before (rule 21); empty: it was not.
    """

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
        work: UsualWork | None = None,
        idle_s: float = 0.0,
        overlap: int = 0,
        awaited: Collection[str] = (),
        awaits_until: float = -math.inf,
        backs_off: bool = True,
        whole: bool = False,
        masked: bool = False,
        ended: str = "",
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
        self._pausing = False
        self._drains_to: int | None = None  # the outer step that a drain ends the run at
        self._ended = ended
        self._waits = config.merging == "rounds"  # whether a round waits for anybody (rule 15)
        self._book = ContributionBook(config.max_staleness, first_round_id)
        self._peers = ReadyPeers(outer_step, 1 + config.max_staleness)
        self._absences = Absences()
        self._faults = Faults()
        self._backs_off = backs_off
        self._whole, self._masked = whole or config.max_staleness > 0, masked
        self._aborts = 0  # in a row, by faults and failures
        self._awaited, self._awaits_until = frozenset(awaited), awaits_until
        self._opens_at = -math.inf  # no round opens before that
        self._held_back: tuple[float, str] | None = None  # until when no round opens at least, and why
        self.deadlines = Deadlines(config)
        self._work = WorkClaims(work, self.deadlines, idle_s, outer_step) if work is not None else None
        if self._work is not None:
            self.deadlines.pace = self._work.pace
        self.deadlines.may_double = work is not None and work.growth > 1
        self._timer = PeerTimer(self.deadlines, self._book, overlap)

    # -- questions --------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """See the table."""
        current = self._round
        if current is not None:
            if current.close_reason:
                return Phase.COMMITTING
            return Phase.GATHERING if self._abandoned(current) else Phase.COLLECTING
        if self._reached or self._drained or self._ended:
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
        """Tokens merged so far."""
        return self._tokens

    @property
    def draining(self) -> bool:
        """Whether the operator asked for the end; it has come when the phase is FINISHED."""
        return self._drains_to is not None

    @property
    def last_step(self) -> int | None:
        """The outer step at which a drain ends the run, or has ended it; None: none was asked for."""
        return None if self._drains_to is None else min(self._drains_to, self._outer_steps)

    @property
    def ended(self) -> str:
        """Why the run ends, or has ended, before its last outer step, though no operator asked for it; '': it does not."""
        return "" if self._reached else self._ended

    @property
    def _reached(self) -> bool:
        """Whether the last outer step or token is merged."""
        return self._outer_step >= self._outer_steps or 0 < self._stop_tokens <= self._tokens

    @property
    def _drained(self) -> bool:
        """Whether a drain has come to its outer step."""
        return self._drains_to is not None and self._outer_step >= self._drains_to

    @property
    def expected(self) -> frozenset[str]:
        """The peers that the open round waits for or waited for, without the lost and the faulted."""
        return frozenset(self._round.expected) if self._round else frozenset()

    @property
    def arrived(self) -> frozenset[str]:
        """The peers whose contribution to the open round is complete."""
        return frozenset(self._round.complete) if self._round else frozenset()

    @property
    def ready(self) -> Set[str]:
        """The peers that can contribute to the present outer step (rule 2), without the quarantined; for reading only."""
        return self._available

    @property
    def enough(self) -> int:
        """How many peers must be ready before a round opens."""
        enough = self._config.start_peers if self._outer_step == 0 and self._waits else 1
        return max(enough, self._config.quorum) if self._shut_out and self._waits else enough

    @property
    def deadline(self) -> float | None:
        """The deadline of the open collection; None when none is open or nobody is waited for."""
        return self._round.deadline if self._round and self._waits and self.phase is Phase.COLLECTING else None

    def expected_s(self, peer_id: str) -> float | None:
        """Return how long a round waits for this peer, in seconds from its opening; None before measurements."""
        return self.deadlines.expected_s(peer_id) if self.deadlines.measured(peer_id) else None

    def is_optional(self, peer_id: str) -> bool:
        """Return whether rounds do not wait for this live peer, because nothing came of it twice in a row (rule 16)."""
        return self._waits and self._peers.reported(peer_id) is not None and self._absences.optional(peer_id)

    def is_out(self, peer_id: str) -> bool:
        """Return whether the open round goes on without this peer, because its bytes were bad (rule 5)."""
        return self._round is not None and peer_id in self._round.faults

    def is_merging(self, peer_id: str) -> bool:
        """Return whether the open round is closed to contributions, and is merging this peer's or a part of it."""
        current = self._round
        return current is not None and bool(current.close_reason) and (peer_id in current.complete or current.merges(peer_id))

    def is_merged_early(self, peer_id: str) -> bool:
        """Return whether a part of this peer's contribution is merged while the collection is still open (rule 6)."""
        return self._collection is not None and self._collection.merges(peer_id)

    def quarantined_until(self, peer_id: str) -> float | None:
        """Return when this peer's quarantine ends, on the clock of `now`; None when it is in none (rule 17)."""
        return self._faults.until(peer_id)

    @property
    def held_back(self) -> str:
        """Why no round opens although peers are ready (rules 17 and 18), or ''."""
        return self._held_back[1] if self._held_back is not None and self.phase is Phase.GATHERING else ""

    def peer_phase(self, peer_id: str) -> PeerPhase | None:
        """Return what this peer does; None when it is not live."""
        reported = self._peers.reported(peer_id)
        return None if reported is None else self._timer.phase_of(peer_id, reported, self._outer_step)

    def counted(self, claims: Mapping[str, Work]) -> Mapping[str, Work]:
        """Return what the contributions to a fragment that is being reduced count for (rule 19). claims: by peer_id."""
        if self._work is None:
            return claims
        bounds, group = dict[str, WorkBounds](), self._due_now[0]
        for peer_id in claims:
            held = self._book.get(peer_id)
            known = held.bounds if held is not None else None  # it may have been dropped while it is being reduced
            bounds[peer_id] = known or self._work.bounds(peer_id, group)
        return self._work.counted(claims, bounds)

    def next_wakeup(self) -> float | None:
        """Return when a Tick can change something; None: only other events can."""
        if self._round is None:
            return self._held_back[0] if self._held_back is not None else None
        current = self._collection
        if current is None or not self._waits or self._abandoned(current):
            return None
        return min(current.deadline, _grace_over(current, self._config))

    # -- events -----------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at `now`; the effects are to be carried out in order.

        Raises LocalProtocolError for a result nobody asked for and a fragment of the open round that is not due.
        """
        self._faults.release(now)
        match event:
            case Offered():
                refused = self._offered(event, now)
                return [refused] if refused else []
            case Arrived():
                if refused := self._arrived(event, now):
                    return [refused]
            case MemberReady():
                return self._reported(event, now)
            case MemberLost():
                self._lost(event, now)
            case Progress():
                self._progress(event, now)
            case Withdrawn():
                self._withdrawn(event.peer_id)
            case Faulted():
                return [*self._faulted(event, now), *self._settle(now)]
            case Reduced():
                return self._reduced(event)
            case CommitSucceeded():
                return self._committed(event, now)
            case RoundFailed():
                return self._failed(event, now)
            case Restricted():
                if (current := self._collection) is not None and current.round_id == event.round_id:
                    current.restrict(event.peers)
            case Close():
                return self._close_collection(event.reason, now)
            case Pause():
                return self._pause(now)
            case Drain():
                return self._drain(event, now)
            case EndRun():
                return self._end_run(event.reason, now)
            case Resume():
                self._pausing, self._drains_to = False, None
                self._faults.pardon()
                self._aborts, self._opens_at = 0, -math.inf
                return self._open(now, assembling=True)
            case Tick():
                pass
        return self._settle(now)

    def _reported(self, event: MemberReady, now: float) -> list[Effect]:
        peer_id, current = event.peer_id, self._round
        self.deadlines.claim(peer_id, event.step_s)
        abandoned = current is not None and self._abandoned(current)
        if event.outer_step == self._outer_step and self._peers.reported(peer_id) == self._outer_step - 1:
            self._timer.applied(peer_id, now)
        if self._peers.reported(peer_id) is None:
            self._timer.appeared(peer_id, now)
            if self._work is not None:
                self._work.appeared(peer_id, now)
        self._peers.report(peer_id, event.outer_step)
        if current is None:
            return self._open(now, assembling=True)
        if current.close_reason:
            return []
        under_way = peer_id in current.wanted and self._book.get(peer_id) is not None
        if peer_id not in self._peers.ready:
            current.expect_no_more(peer_id)
        elif peer_id in self._faults.quarantined:
            pass
        elif self._waits and abandoned:
            current.counted_from, current.welcome_until, current.deadline = now, now + self._config.floor_s, now
            current.expect(peer_id, self._allowed_s(peer_id))
        elif self._waits and (under_way or (now <= current.welcome_until and self._is_awaited(peer_id, current))):
            current.expect(peer_id, self._allowed_s(peer_id))
        return self._settle(now)

    def _lost(self, event: MemberLost, now: float) -> None:
        if self._work is not None:
            self._work.lost(event.peer_id, now)
        self._peers.lost(event.peer_id)
        if (contribution := self._book.get(event.peer_id)) is not None:
            contribution.steady = False
        if (current := self._collection) is not None:
            current.expect_no_more(event.peer_id)

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
        self._note_work(current)
        self._outer_step += 1
        self._due_now = self._due(self._outer_step)
        self._tokens = min(self._tokens + event.tokens, MOST_TOKENS)
        self._peers.advance(self._outer_step)
        self._timer.published(now)
        self._book.merged(current.complete, self._outer_step)
        self._faults.merged(current.complete | current.partly)
        return self._end_round(current, now, committed=True, reason=current.close_reason)

    def _note_work(self, current: OpenRound) -> None:
        """These contributions are merged: their peers' next ones are the work since they began."""
        if self._work is None:
            return
        for peer_id in current.complete | current.partly:
            if (merged := self._book.get(peer_id)) is not None and merged.bounds is not None:
                self._work.merged(peer_id, self._due_now[0], merged.bounds)

    def _failed(self, event: RoundFailed, now: float) -> list[Effect]:
        current = self._round
        if current is None or event.round_id != current.round_id:
            return []
        if current.close_reason:
            self._book.drop(*current.complete)
        quarantined = [(peer_id, self._faults.faulted(peer_id, now)) for peer_id in event.blamed]
        effects: list[Effect] = [Quarantined(peer_id, seconds, event.reason) for peer_id, seconds in quarantined if seconds]
        return [*effects, *self._end_round(current, now, committed=False, reason=event.reason, failed=True)]

    def _pause(self, now: float) -> list[Effect]:
        self._pausing, current = True, self._collection
        return [] if current is None else self._end_round(current, now, committed=False, reason="paused")

    def _drain(self, event: Drain, now: float) -> list[Effect]:
        if self.phase is Phase.FINISHED:
            return []
        current, self._pausing = self._round, False
        asked = max(event.outer_step, self._drains_to or 0) if self._waits else 0
        self._drains_to = max(self._outer_step + (current is not None), asked)
        if current is None:
            return self._finish() if self._drained else self._open(now)
        if current.close_reason or (self._waits and not self._abandoned(current)):
            return []
        return self._end_round(current, now, committed=False, reason="drained")

    def _end_run(self, reason: str, now: float) -> list[Effect]:
        if self._ended:
            return []
        over, current, self._ended = self.phase is Phase.FINISHED, self._round, reason
        if current is None:
            return [] if over else self._finish()
        return [] if current.close_reason else self._end_round(current, now, committed=False, reason=reason)

    # -- contributions ----------------------------------------------------------------------------------------------------

    def _offered(self, offer: Offered, now: float) -> Refused | None:
        """Begin a contribution, unless it is refused or held already."""
        peer_id, round_id, outer_step = offer.peer_id, offer.round_id, offer.outer_step
        if refused := self._refusal(peer_id, round_id, outer_step, offer.fragment_id):
            return refused
        older, current = self._book.get(peer_id), self._collection
        if (begun := self._book.begin(peer_id, round_id, outer_step, now)) is not None:
            inner_steps = offer.inner_steps
            if self._work is not None:
                begun.bounds = self._work.bounds(peer_id, self._due_now[0])
                inner_steps = begun.bounds.inner_steps(inner_steps) if inner_steps else 0
            self._timer.computed(peer_id, inner_steps, now)
            if current is not None and older is not None:
                current.withdraw(peer_id)
            if current is not None and round_id == current.round_id:
                self._timer.began(peer_id, current, now)
        self._peers.contributes(peer_id, outer_step)
        return None

    def _arrived(self, event: Arrived, now: float) -> Refused | None:
        """Take one fragment, unless it is refused. Raises LocalProtocolError for one of the open round that is not due.

        In its own round a fragment counts as offered; one that may outlive its round must have been, so that its s is known.
        """
        peer_id, round_id, fragment_id = event.peer_id, event.round_id, event.fragment_id
        if self._round and round_id == self.round_id and fragment_id not in self._due_now:
            raise LocalProtocolError(f"Arrived with fragment {fragment_id}; due are {self._due_now}")
        contribution = self._book.get(peer_id, round_id)
        if contribution is None and self._book.carries:
            return Refused(peer_id, f"the contribution to round {round_number(round_id)} is no longer held", stale=True)
        outer_step = contribution.outer_step if contribution is not None else self._outer_step
        if refused := self._offered(Offered(peer_id, round_id, outer_step, fragment_id), now):
            return refused
        contribution = self._book.get(peer_id)
        if contribution is not None and not contribution.whole:
            contribution.arrived.add(fragment_id)
            contribution.whole = len(contribution.arrived) == len(self._due_now)
            if contribution.whole:
                self._timer.ended(peer_id, contribution, now)
                self._absences.contributed(peer_id)
        if (current := self._collection) is not None:
            self._deliver(current, peer_id, fragment_id)
        return None

    def _deliver(self, current: OpenRound, peer_id: str, fragment_id: int) -> None:
        current.deliver(peer_id, fragment_id)
        if peer_id in current.complete:
            current.free_until = min(current.free_until, self._timer.free_until(peer_id))

    def _refusal(self, peer_id: str, round_id: int, outer_step: int, fragment_id: int) -> Refused | None:
        """Why a fragment of this contribution is not taken (rules 5, 11 to 13), or None."""
        if late := self._late(peer_id, round_id, outer_step):
            return Refused(peer_id, late, stale=True)
        if peer_id in self._faults.quarantined:
            return Refused(peer_id, "quarantined: its bytes were bad too often; contribute again later", stale=True)
        due, current = self._due_now, self._round
        if fragment_id not in due:
            those = f"{', '.join(map(str, due))} {'are' if len(due) > 1 else 'is'}"
            wrong = f"fragment {fragment_id} is not exchanged from outer step {outer_step}; {those}"
            return Refused(peer_id, wrong, stale=False)
        if current is None:
            return None
        if peer_id in current.faults:
            return Refused(peer_id, f"out of round {round_number(current.round_id)}: {current.faults[peer_id]}", stale=False)
        if current.close_reason and not self._book.carries and peer_id not in current.delivered[fragment_id]:
            return Refused(peer_id, f"round {round_number(round_id)} is closed: {current.close_reason}", stale=True)
        return None

    def _late(self, peer_id: str, round_id: int, outer_step: int) -> str:
        """Why the contribution is late or early, or ''. Where none outlives its round, that round must be open."""
        current = self._round
        if self._book.carries:
            if self.phase is Phase.FINISHED:
                return "the run is finished"
        elif current is None:
            return f"no round is open: the run is {self.phase.value}"
        elif round_id != current.round_id:
            return f"{round_name(round_id, current.round_id)} is not open; round {round_number(current.round_id)} is"
        return self._book.refusal(peer_id, round_id, outer_step, self._next_round_id - 1, self._outer_step)

    def _progress(self, event: Progress, now: float) -> None:
        """Wait for a transfer as long as bytes come in and, at their rate, it ends before the ceiling."""
        contribution, current = self._book.get(event.peer_id, event.round_id), self._collection
        if contribution is None or event.received_bytes <= contribution.received_bytes:
            return
        contribution.received_bytes, contribution.total_bytes = event.received_bytes, event.total_bytes
        if current is None:
            return
        seconds = contribution.ends_at(now) - current.counted_from
        if seconds <= self._config.ceiling_s:
            current.extend(event.peer_id, min(self._config.ceiling_s, seconds + self._config.floor_s))

    def _withdrawn(self, peer_id: str) -> None:
        """Forget the contribution, unless it is being merged."""
        if self.is_merging(peer_id):
            return
        self._book.drop(peer_id)
        if (current := self._collection) is not None:
            current.withdraw(peer_id)

    def _faulted(self, event: Faulted, now: float) -> list[Effect]:
        """Bad bytes. What is being merged stays. Where nothing is merged before the close, the shell is to drop what it has."""
        peer_id, current = event.peer_id, self._collection
        if self._book.carries:
            if self._book.get(peer_id, event.round_id) is None or self.is_merging(peer_id):
                return []
        elif current is None or event.round_id != current.round_id or peer_id in current.faults:
            return []
        self._book.drop(peer_id)
        if current is not None:
            current.fault(peer_id, event.reason)
        effects: list[Effect] = [Refused(peer_id, event.reason, stale=False)] if self._book.carries else []
        if seconds := self._faults.faulted(peer_id, now):
            effects.append(Quarantined(peer_id, seconds, event.reason))
        return effects

    # -- the life of a round ----------------------------------------------------------------------------------------------

    def _open(self, now: float, *, assembling: bool = False) -> list[Effect]:
        """Open a round if it is time and enough peers are ready. assembling: it opens out of GATHERING (rule 3)."""
        self._held_back = None
        if self._round or self.phase is not Phase.GATHERING:
            return []
        ready = self.ready
        too_few = len(ready) < self.enough
        if now < self._awaits_until and (not self._awaited <= ready or (self.draining and too_few)):
            self._held_back = self._awaits_until, ""
            return []
        if self.draining and (too_few or now < self._opens_at):
            self._drains_to = self._outer_step
            return self._finish()
        if too_few:
            if shut_out := self._shut_out:
                why = f"too few peers without {', '.join(sorted(shut_out))}, quarantined for bad bytes"
                self._held_back = self._faults.next_release(), why
            return []
        if now < self._opens_at:
            why = f"faults brought {self._aborts} rounds in a row to nothing, so the next one waits"
            self._held_back = self._opens_at, why
            return []
        if not self._due_now:
            raise LocalProtocolError(f"no fragment is due at outer step {self._outer_step}")
        current = self._round = OpenRound(
            round_id=self._next_round_id,
            outer_step=self._outer_step,
            quorum=self._config.quorum if self._waits else 1,
            due=tuple(sorted(self._due_now)),
            whole=self._whole,
            opened_at=now,
            counted_from=now,
            welcome_until=now + self._config.floor_s if assembling else now,
            deadline=now if self._waits else math.inf,
        )
        self._next_round_id += 1
        if self._waits:
            awaited = self._absences.awaited(ready, current.quorum)
            for peer_id in awaited:
                current.expect(peer_id, self._allowed_s(peer_id))
            current.punctual.update(awaited)
        opened = RoundOpened(current.round_id, current.outer_step, frozenset(current.expected), current.deadline)
        for peer_id, fragment_id in self._book.arrived():
            self._deliver(current, peer_id, fragment_id)
        return [opened, *self._settle(now)]

    def _settle(self, now: float) -> list[Effect]:
        """Reduce what can be reduced; close the collection or give the round up, if it is time."""
        if self._round is None and self._held_back is not None:
            return self._open(now)
        current = self._collection
        if current is None:
            return []
        current.note_quorum(now)
        if reason := _closing_reason(current, self._config, now):
            return self._close_collection(reason, now)
        if self.draining and self._abandoned(current):
            return self._end_round(current, now, committed=False, reason="drained")
        if reason := _giving_up_reason(current, self._config, self._available, now):
            self._left_out(current, now)
            return self._end_round(current, now, committed=False, reason=reason)
        return [*current.reduce_early()]

    def _close_collection(self, reason: str, now: float) -> list[Effect]:
        current = self._collection
        if current is None or len(current.complete) < current.quorum:
            return []
        self._left_out(current, now)
        return [*current.close(reason), *self._commit_if_reduced(current)]

    def _left_out(self, current: OpenRound, now: float) -> None:
        """The round stops waiting: measure the peers that are overdue, and count the absences (rules 9 and 16)."""
        if self._masked and current.only is None:
            return
        self._timer.left_out(current, now)
        for peer_id in current.overdue(now):
            if (contribution := self._book.get(peer_id)) is None or not contribution.whole:
                moves = contribution is not None and contribution.moved()
                self._absences.missed(peer_id, moving_for=self._config.max_staleness + 3 if moves else 0)

    def _commit_if_reduced(self, current: OpenRound) -> list[Effect]:
        if not current.close_reason or current.commit_asked or len(current.reduced) < len(current.due):
            return []
        current.commit_asked = True
        return [Commit(current.round_id, current.outer_step + 1, current.close_reason, current.absent)]

    def _end_round(self, current: OpenRound, now: float, *, committed: bool, reason: str, failed: bool = False) -> list[Effect]:
        """The round is over: say what is kept of it, and open the next one or finish. failed: by a merge or a commit."""
        self._round = None
        if self._work is not None:
            self._work.closed(committed=committed)
            self.deadlines.pace = self._work.pace
        if committed:
            self._aborts, self._opens_at = 0, -math.inf
        elif self.draining:
            self._drains_to = self._outer_step
        elif (failed or current.faults) and self._backs_off:
            self._aborts += 1
            self._opens_at = now + delay_s(self._aborts)
        finished = self.phase is Phase.FINISHED
        if finished:
            self._book.clear()
        stale = [Refused(peer_id, why, stale=True) for peer_id, why in self._book.end_round(self._outer_step)]
        closed = RoundClosed(
            round_id=current.round_id,
            outer_step=current.outer_step + 1,
            committed=committed,
            reason=reason,
            missing=current.absent,
            seconds=now - current.opened_at,
            carried=self._book.peers(),
        )
        return [*stale, closed, *(self._finish() if finished else self._open(now))]

    def _finish(self) -> list[Effect]:
        self._book.clear()
        return [RunFinished(self._outer_step)]

    # ---------------------------------------------------------------------------------------------------------------------

    @property
    def _collection(self) -> OpenRound | None:
        """The round that takes contributions, or None."""
        return self._round if self._round is not None and not self._round.close_reason else None

    @property
    def _shut_out(self) -> Set[str]:
        """The ready peers that are quarantined."""
        return self._peers.ready & self._faults.quarantined

    @property
    def _available(self) -> Set[str]:
        """The ready peers without those that are quarantined."""
        return self._peers.ready - self._faults.quarantined if self._faults.quarantined else self._peers.ready

    def _allowed_s(self, peer_id: str) -> float:
        """How long a round waits for this peer; after an absence at least ceiling_s."""
        expected = self.deadlines.expected_s(peer_id)
        return max(expected, self._config.ceiling_s) if peer_id in self._absences else expected

    def _is_awaited(self, peer_id: str, current: OpenRound) -> bool:
        """Whether a round waits for this peer, once it is ready."""
        return not self._absences.optional(peer_id) or len(current.expected) < current.quorum

    def _abandoned(self, current: OpenRound) -> bool:
        """Whether nobody can contribute and what is in does not suffice (rule 8)."""
        return not self._available and len(current.complete) < current.quorum


def _closing_reason(current: OpenRound, config: RoundsConfig, now: float) -> str:
    """Why the collection closes now with what is in (rules 7 and 15), or ''."""
    present = len(current.complete)
    if current.quorum_at is None:
        return ""
    if config.merging == "arrivals":
        return f"{f'{present} contributions' if present > 1 else 'a contribution'} arrived"
    if current.expected <= current.complete:
        return f"{f'all {present} contributors' if present > 1 else 'the only contributor'} in{current.without()}"
    if now >= current.deadline:
        return f"deadline: {current.tally()}"
    return f"grace over: {current.tally()}" if now >= _grace_over(current, config) else ""


def _giving_up_reason(current: OpenRound, config: RoundsConfig, ready: Set[str], now: float) -> str:
    """Why the round is given up now (rules 5, 8 and 15), or ''."""
    late, present = now >= current.deadline, len(current.complete)
    if present >= current.quorum or not (current.faults or late):
        return ""
    if config.merging == "arrivals":
        return f"bad bytes{current.without(merges=False)}"
    few = f"too few: {present} of quorum {current.quorum}"
    left = ready - current.faults.keys()
    if current.faults and len(current.complete | left) < current.quorum:
        return f"{few}{current.without(merges=False)}"
    return f"{few} at the deadline{current.without(merges=False)}" if late and left else ""


def _grace_over(current: OpenRound, config: RoundsConfig) -> float:
    """When the missing peers are waited for no longer (rule 7c); inf before the quorum."""
    if current.quorum_at is None:
        return math.inf
    if config.wait == "slack":
        return max(current.quorum_at + config.grace_s, current.free_until)
    return max(current.quorum_at, current.counted_from + current.longest_wait_s) + config.grace_s
