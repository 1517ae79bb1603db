"""The round machine: which round is open, whom it waits for, when it reduces, commits or gives up. Sans-IO.

Owns: round ids, the outer step (it advances on CommitSucceeded only), quorum, deadline, grace. Must not know: time (every call
takes `now`, seconds of one monotonic clock), tensors, files, sockets, logging. `handle(event, now)` returns the effects that the
shell carries out, in order; their results come back as events.

Rules
 1. A round is one attempt to advance from outer step t to t + 1, all fragments. Round ids strictly increase. After a commit or an
    abort the next round opens in the same call.
 2. READY peers are live and last reported outer step t, or t - 1: that one was told of the commit that led to t and applies it at
    its next step boundary. A peer whose last report is older is hung or takes a snapshot; nobody waits for it. A round opens with
    one ready peer (the first outer step: `start_peers`) and EXPECTS all that are ready at that moment, whether they were part of
    the last commit or not: a slower peer that missed one round would miss all of them otherwise, and the fastest peer would
    train alone.
 3. A round that opened out of GATHERING (start, restart, everybody lost) also expects those who report t within floor_s of its
    opening: the run is still assembling. Any other latecomer is OPTIONAL: what it delivers before the close counts, but nobody
    waits for it. It is expected from the next round on.
 4. A lost peer is expected no more, at once. What it delivered whole stays in. If it returns, it is optional, or expected again
    when its contribution to this round was under way.
 5. A peer whose bytes were bad is out of the round: what it delivered is dropped where it is not reduced yet.
 6. A fragment is reduced as soon as every expected peer has it in and at least a quorum has; each Reduce has a quorum.
 7. COMPLETE: has delivered all fragments. The collection closes with a quorum of complete peers when (a) no expected peer is
    missing, or (b) the deadline is reached, or (c) every missing peer is overdue by its own times and then grace_s is over. Missing
    peers' fragments that are in and not yet reduced are used.
 8. The deadline is the largest expected_s of the expected peers, counted from the opening (see `deadlines`). With fewer than a
    quorum complete there, the round is aborted. With no ready peer there is nobody to give up on: the round stays, the phase
    is GATHERING, and the deadline is counted anew from the first peer that is ready again.
 9. A peer's time is recorded when it is complete, and, when a close leaves it out, as the time it was given: so the deadline grows
    with a peer that has become slower. Only peers that were expected from the opening on and never lost are measured.
10. A pause aborts an open collection. A collection that is closed already is being merged and journalled: it ends first.

phase       event                             condition                      effects                      next
----------  --------------------------------  -----------------------------  ---------------------------  ----------
GATHERING   MemberReady, Resume               enough are ready               RoundOpened                  COLLECTING
GATHERING   MemberReady                       a round is kept (rule 8)                                    COLLECTING
COLLECTING  Offered                           this round, this outer step                                 COLLECTING
COLLECTING  Arrived, MemberLost, Faulted      a fragment is in from all      Reduce                       COLLECTING
COLLECTING  any                               closes (rule 7)                Reduce ...                   COMMITTING
COLLECTING  any                               deadline without quorum        RoundClosed (aborted)        opens
COLLECTING  MemberLost                        none ready, no quorum                                       GATHERING
COMMITTING  Reduced                           it was the last fragment       Commit                       COMMITTING
COMMITTING  CommitSucceeded                                                  RoundClosed (committed)      opens
COMMITTING  CommitSucceeded                   it was the last outer step     RoundClosed, RunFinished     FINISHED
COLL, COMM  RoundFailed                                                      RoundClosed (aborted)        opens
COLL, GATH  Pause                                                            RoundClosed if one is open   PAUSED
PAUSED      Resume                                                                                        opens
any         Offered, Arrived                  not this round, closed, out    Refused                      same
any         results of another round                                                                      same
opens:      PAUSED when a pause was asked for; COLLECTING with RoundOpened when enough are ready; else GATHERING.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from aggregator.deadlines import Deadlines
from edit.config import RoundsConfig
from edit.errors import LocalProtocolError

__all__ = [
    "Arrived",
    "Commit",
    "CommitSucceeded",
    "Effect",
    "Event",
    "Faulted",
    "MemberLost",
    "MemberReady",
    "Offered",
    "Pause",
    "Phase",
    "Reduce",
    "Reduced",
    "Refused",
    "Resume",
    "RoundClosed",
    "RoundFailed",
    "RoundMachine",
    "RoundOpened",
    "RunFinished",
    "Tick",
]


class Phase(Enum):
    """What the machine is doing (see the table)."""

    GATHERING = "gathering"
    COLLECTING = "collecting"
    COMMITTING = "committing"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class MemberReady:
    """A live peer says that its outer parameters are at `outer_step`. Sent whenever that changes."""

    peer_id: str
    outer_step: int


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The peer is gone: lease over, stream closed, left or evicted."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Offered:
    """The header of a contribution came; without a Refused in the answer its bytes are welcome."""

    peer_id: str
    round_id: int
    outer_step: int
    fragment_id: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A fragment of a contribution is here: whole, checked and measured."""

    peer_id: str
    round_id: int
    fragment_id: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """The peer's bytes were bad."""

    peer_id: str
    round_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reduced:
    """The shell carried out a Reduce."""

    round_id: int
    fragment_id: int


@dataclass(frozen=True, slots=True)
class CommitSucceeded:
    """The shell carried out a Commit: the outer step is on disk."""

    round_id: int


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """A Reduce or a Commit could not be carried out; nothing was applied."""

    round_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The operator wants no rounds."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The operator wants rounds again."""


Event = MemberReady | MemberLost | Offered | Arrived | Faulted | Reduced | CommitSucceeded | RoundFailed | Tick | Pause | Resume


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round to advance from `outer_step`; deadline: on the clock of `now`."""

    round_id: int
    outer_step: int
    expected: frozenset[str]
    deadline: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to an Offered or Arrived. stale: the peer is late or early, not wrong; it should look at the view."""

    peer_id: str
    reason: str
    stale: bool


@dataclass(frozen=True, slots=True)
class Reduce:
    """Merge this fragment of these peers (sorted); answer with Reduced or RoundFailed."""

    round_id: int
    fragment_id: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Every fragment is reduced: advance TO `outer_step`; answer with CommitSucceeded or RoundFailed."""

    round_id: int
    outer_step: int
    reason: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The round is over. outer_step: the one it advanced to, or tried to; missing: expected and not complete."""

    round_id: int
    outer_step: int
    committed: bool
    reason: str
    missing: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The last outer step is committed."""

    outer_step: int


Effect = RoundOpened | Refused | Reduce | Commit | RoundClosed | RunFinished


@dataclass(slots=True)
class _Round:
    """The open round. delivered: per fragment, the peers that have it in; wanted: everybody ever expected."""

    round_id: int
    outer_step: int
    opened_at: float
    counted_from: float  # of the deadlines; later than opened_at only after nobody was left
    welcome_until: float  # who is ready by then is expected (rule 3)
    delivered: tuple[set[str], ...]
    deadline: float
    expected: set[str]
    wanted: set[str]
    punctual: set[str]  # expected from the opening on and never lost
    offered: set[str] = field(default_factory=set)
    faults: dict[str, str] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # Reduce was emitted
    reduced: set[int] = field(default_factory=set)
    quorum_at: float | None = None
    close_reason: str = ""  # not empty: the collection is closed
    commit_asked: bool = False

    @property
    def complete(self) -> frozenset[str]:
        return frozenset(set.intersection(*self.delivered))

    @property
    def missing(self) -> set[str]:
        """Those the round still waits for."""
        return self.expected - self.complete

    @property
    def absent(self) -> tuple[str, ...]:
        """Those who were expected at some time and are not complete: what people call missing."""
        return tuple(sorted(self.wanted - self.complete))


class RoundMachine:
    """One run's rounds. `first_round_id` must be larger than any id of an earlier process; `fragments`: how many there are."""

    def __init__(self, config: RoundsConfig, *, fragments: int, outer_step: int, outer_steps: int, first_round_id: int) -> None:
        if fragments < 1 or first_round_id < 1:
            raise LocalProtocolError(f"fragments = {fragments}, first_round_id = {first_round_id}: both must be at least 1")
        self._config = config
        self._fragments = fragments
        self._outer_step = outer_step
        self._outer_steps = outer_steps
        self._next_round_id = first_round_id
        self._live: dict[str, int] = {}  # peer_id -> the outer step it last reported
        self._round: _Round | None = None
        self._pausing = False
        self.deadlines = Deadlines(config)

    @property
    def phase(self) -> Phase:
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
        return self._round.complete if self._round else frozenset()

    @property
    def deadline(self) -> float | None:
        """Of the open collection; None when none is open or nobody is left to wait for."""
        return self._round.deadline if self._round and self.phase is Phase.COLLECTING else None

    @property
    def opened_at(self) -> float | None:
        """When the open round opened."""
        return self._round.opened_at if self._round else None

    def next_wakeup(self) -> float | None:
        """When a Tick can change something, or None: until then only other events can."""
        if self._round is None or self.phase is not Phase.COLLECTING:
            return None
        return min(self._round.deadline, self._grace_over(self._round))

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at `now`; the effects are to be carried out in order.

        Raises LocalProtocolError for a result nobody asked for and a fragment that does not exist.
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
                return self._open(now, assembling=True) if self._round is None else []
            case Tick():
                pass
        return self._settle(now)

    # -- events ---------------------------------------------------------------------------------------------------------------

    def _ready(self, event: MemberReady, now: float) -> list[Effect]:
        current = self._round
        abandoned = current is not None and self._abandoned(current)
        self._live[event.peer_id] = event.outer_step
        if current is None:
            return self._open(now, assembling=True)
        if current.close_reason:
            return []
        if not self._is_ready(event.peer_id):
            self._expect_no_more(current, event.peer_id)
        elif abandoned:
            current.counted_from, current.welcome_until = now, now + self._config.floor_s
            current.deadline = now
            self._expect(current, event.peer_id)
        elif now <= current.welcome_until or (event.peer_id in current.wanted and event.peer_id in current.offered):
            self._expect(current, event.peer_id)
        return self._settle(now)

    def _lost(self, event: MemberLost) -> None:
        self._live.pop(event.peer_id, None)
        if self._round and not self._round.close_reason:
            self._expect_no_more(self._round, event.peer_id)

    def _offered(self, event: Offered) -> list[Effect]:
        refusal = self._refusal(event.peer_id, event.round_id, event.fragment_id, event.outer_step)
        if refusal:
            return [refusal]
        if self._round:
            self._round.offered.add(event.peer_id)
        return []

    def _arrived(self, event: Arrived, now: float) -> list[Effect]:
        if not 0 <= event.fragment_id < self._fragments:
            raise LocalProtocolError(f"Arrived with fragment {event.fragment_id}; there are {self._fragments}")
        current = self._round
        refusal = self._refusal(event.peer_id, event.round_id, event.fragment_id, self._outer_step)
        if refusal or current is None:
            return [refusal] if refusal else []
        was_complete = event.peer_id in current.complete
        current.offered.add(event.peer_id)
        current.delivered[event.fragment_id].add(event.peer_id)
        if not was_complete and event.peer_id in current.complete and event.peer_id in current.punctual:
            self.deadlines.record(event.peer_id, now - current.opened_at)
        return self._settle(now)

    def _faulted(self, event: Faulted) -> None:
        current = self._round
        if current is None or event.round_id != current.round_id or current.close_reason:
            return
        current.faults.setdefault(event.peer_id, event.reason)
        self._expect_no_more(current, event.peer_id)
        for fragment_id, peers in enumerate(current.delivered):
            if fragment_id not in current.asked:
                peers.discard(event.peer_id)

    def _reduced(self, event: Reduced) -> list[Effect]:
        current = self._round
        if current is None or event.round_id != current.round_id:
            return []
        if event.fragment_id not in current.asked:
            raise LocalProtocolError(
                f"fragment {event.fragment_id} of round {event.round_id} was reduced, but nobody asked for it"
            )
        current.reduced.add(event.fragment_id)
        return self._commit_if_reduced(current)

    def _committed(self, event: CommitSucceeded, now: float) -> list[Effect]:
        current = self._round
        if current is None or event.round_id != current.round_id:
            return []
        if not current.commit_asked:
            raise LocalProtocolError(f"round {event.round_id} was committed, but nobody asked for it")
        self._outer_step += 1
        effects = self._close(current, now, committed=True, reason=current.close_reason)
        if self._outer_step >= self._outer_steps:
            return [*effects, RunFinished(self._outer_step)]
        return [*effects, *self._open(now)]

    def _failed(self, event: RoundFailed, now: float) -> list[Effect]:
        current = self._round
        if current is None or event.round_id != current.round_id:
            return []
        return [*self._close(current, now, committed=False, reason=event.reason), *self._open(now)]

    def _pause(self, now: float) -> list[Effect]:
        self._pausing = True
        if self._round is None or self._round.close_reason:
            return []
        return self._close(self._round, now, committed=False, reason="paused")

    # -- the life of a round --------------------------------------------------------------------------------------------------

    def _open(self, now: float, *, assembling: bool = False) -> list[Effect]:
        ready = {peer_id for peer_id in self._live if self._is_ready(peer_id)}
        enough = self._config.start_peers if self._outer_step == 0 else 1
        if self.phase is not Phase.GATHERING or len(ready) < enough:
            return []
        self._round = _Round(
            round_id=self._next_round_id,
            outer_step=self._outer_step,
            opened_at=now,
            counted_from=now,
            welcome_until=now + (self._config.floor_s if assembling else -1.0),
            delivered=tuple(set() for _ in range(self._fragments)),
            deadline=now + self.deadlines.round_s(ready),
            expected=set(ready),
            wanted=set(ready),
            punctual=set(ready),
        )
        self._next_round_id += 1
        return [RoundOpened(self._round.round_id, self._outer_step, frozenset(ready), self._round.deadline)]

    def _close(self, current: _Round, now: float, *, committed: bool, reason: str) -> list[Effect]:
        self._round = None
        step = current.outer_step + 1
        return [RoundClosed(current.round_id, step, committed, reason, current.absent, now - current.opened_at)]

    def _settle(self, now: float) -> list[Effect]:
        """Reduce what can be reduced, then close the collection or give the round up, if it is time."""
        current = self._round
        if current is None or current.close_reason:
            return []
        if len(current.complete) < self._config.quorum:
            current.quorum_at = None
        elif current.quorum_at is None:
            current.quorum_at = now
        reason = self._closing_reason(current, now)
        if reason:
            return self._close_collection(current, reason, now)
        if now >= current.deadline and not self._abandoned(current):
            self._record_absent(current, now)
            return [*self._close(current, now, committed=False, reason=self._too_few(current)), *self._open(now)]
        return self._reduce(current, [i for i in range(self._fragments) if current.expected <= current.delivered[i]])

    def _closing_reason(self, current: _Round, now: float) -> str:
        """Why the collection closes now with what is in, or '' (rule 7)."""
        if current.quorum_at is None:
            return ""
        present, quorum = len(current.complete), self._config.quorum
        tally = f"{present} of {len(current.wanted | current.complete)} in, quorum {quorum}"
        if not current.missing:
            return f"all {present} contributors in{self._without(current)}"
        if now >= current.deadline:
            return f"deadline: {tally}{self._without(current)}"
        if now >= self._grace_over(current):
            return f"grace over: {tally}{self._without(current)}"
        return ""

    def _close_collection(self, current: _Round, reason: str, now: float) -> list[Effect]:
        self._record_absent(current, now)
        current.close_reason = reason
        return [*self._reduce(current, range(self._fragments)), *self._commit_if_reduced(current)]

    def _reduce(self, current: _Round, fragment_ids: Iterable[int]) -> list[Effect]:
        effects: list[Effect] = []
        for fragment_id in fragment_ids:
            peers = current.delivered[fragment_id]
            if fragment_id not in current.asked and len(peers) >= self._config.quorum:
                current.asked.add(fragment_id)
                effects.append(Reduce(current.round_id, fragment_id, tuple(sorted(peers))))
        return effects

    def _commit_if_reduced(self, current: _Round) -> list[Effect]:
        if not current.close_reason or current.commit_asked or len(current.reduced) < self._fragments:
            return []
        current.commit_asked = True
        return [Commit(current.round_id, current.outer_step + 1, current.close_reason, current.absent)]

    # -- questions ------------------------------------------------------------------------------------------------------------

    def _is_ready(self, peer_id: str) -> bool:
        return self._outer_step - 1 <= self._live.get(peer_id, -2) <= self._outer_step

    def _abandoned(self, current: _Round) -> bool:
        """Nobody can contribute and what is in does not suffice (rule 8)."""
        return len(current.complete) < self._config.quorum and not any(self._is_ready(peer_id) for peer_id in self._live)

    def _grace_over(self, current: _Round) -> float:
        if current.quorum_at is None:
            return float("inf")
        overdue = current.counted_from + self.deadlines.round_s(current.missing)
        return max(current.quorum_at, overdue) + self._config.grace_s

    def _refusal(self, peer_id: str, round_id: int, fragment_id: int, outer_step: int) -> Refused | None:
        current = self._round
        if current is None:
            return Refused(peer_id, f"no round is open: the run is {self.phase.value}", stale=True)
        if round_id != current.round_id:
            return Refused(peer_id, f"round {round_id} is not open; round {current.round_id} is", stale=True)
        if outer_step != current.outer_step:
            return Refused(peer_id, f"computed against outer step {outer_step}; the run is at {current.outer_step}", stale=True)
        if not 0 <= fragment_id < self._fragments:
            return Refused(peer_id, f"there is no fragment {fragment_id}; the model has {self._fragments}", stale=False)
        if peer_id in current.faults:
            return Refused(peer_id, f"out of round {round_id}: {current.faults[peer_id]}", stale=False)
        if current.close_reason and peer_id not in current.delivered[fragment_id]:
            return Refused(peer_id, f"round {round_id} is closed: {current.close_reason}", stale=True)
        return None

    def _without(self, current: _Round) -> str:
        names = [f"missing: {', '.join(sorted(current.missing))}"] if current.missing else []
        out = sorted(set(current.absent) - current.missing - set(current.faults))
        names += [f"lost: {', '.join(out)}"] if out else []
        names += [f"refused: {', '.join(sorted(current.faults))}"] if current.faults else []
        return f" ({'; '.join(names)})" if names else ""

    def _too_few(self, current: _Round) -> str:
        return f"too few: {len(current.complete)} of quorum {self._config.quorum} at the deadline{self._without(current)}"

    # -- whom to wait for -----------------------------------------------------------------------------------------------------

    def _expect(self, current: _Round, peer_id: str) -> None:
        if peer_id in current.faults:
            return
        current.expected.add(peer_id)
        current.wanted.add(peer_id)
        current.deadline = max(current.deadline, current.counted_from + self.deadlines.expected_s(peer_id))

    def _expect_no_more(self, current: _Round, peer_id: str) -> None:
        current.expected.discard(peer_id)
        current.punctual.discard(peer_id)

    def _record_absent(self, current: _Round, now: float) -> None:
        for peer_id in sorted(current.missing & current.punctual):
            self.deadlines.record(peer_id, now - current.opened_at)
