"""The one open round: who is expected, what is in, what is reduced, how that is reported; and which peers are ready."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from edit.rounds.events import Reduce

__all__ = ["OpenRound", "ReadyPeers"]


@dataclass(slots=True, kw_only=True)
class OpenRound:
    """The sets of one open round. They are changed, not recomputed, by each event: rounds may have thousands of peers."""

    round_id: int
    outer_step: int  # it tries to advance from here
    quorum: int
    due: tuple[int, ...]  # the fragments that it exchanges, ascending
    whole: bool  # merge nothing of a peer that is not complete at the close (it counts in a later round)
    opened_at: float
    counted_from: float  # the deadlines count from here; later than opened_at only after nobody was left
    welcome_until: float  # who is ready by then is expected
    deadline: float

    delivered: dict[int, set[str]] = field(init=False)  # per due fragment, the peers that have it in
    complete: set[str] = field(default_factory=set)  # the peers that have all due fragments in
    expected: set[str] = field(default_factory=set)  # the peers that it waits for, or waited for until they were complete
    wanted: set[str] = field(default_factory=set)  # every peer that was ever expected
    punctual: set[str] = field(default_factory=set)  # the peers that are expected since the opening and were never lost
    only: frozenset[str] | None = None  # the peers that can contribute at all; None: any
    faults: dict[str, str] = field(default_factory=dict)  # the peers whose bytes were bad, and why
    asked: dict[int, tuple[str, ...]] = field(default_factory=dict)  # the fragments whose Reduce was emitted, and with whom
    reduced: set[int] = field(default_factory=set)  # the fragments whose Reduce was carried out

    quorum_at: float | None = None  # since when a quorum is complete
    free_until: float = math.inf  # when the first of the complete peers would have to wait for the outcome
    close_reason: str = ""  # not empty: the collection is closed
    partly: frozenset[str] = frozenset()  # once it is closed: the peers of whom some fragments are merged, and not all
    commit_asked: bool = False

    _allowed: dict[str, float] = field(default_factory=dict)  # seconds from counted_from that each wanted peer may take
    _by_allowed: list[tuple[float, str]] = field(default_factory=list)  # a heap of (-seconds, peer_id), also of outdated ones

    def __post_init__(self) -> None:
        self.delivered = {fragment_id: set() for fragment_id in self.due}

    @property
    def missing(self) -> set[str]:
        """The peers that it still waits for."""
        return self.expected - self.complete

    @property
    def absent(self) -> tuple[str, ...]:
        """The peers that were expected and of whom nothing is merged, sorted. A commit calls them missing."""
        return tuple(sorted(self.wanted - self.complete - self.partly))

    @property
    def longest_wait_s(self) -> float:
        """Seconds from counted_from after which every missing peer is overdue; 0 when none is missing."""
        while self._by_allowed:
            seconds, peer_id = self._by_allowed[0]
            if self._is_missing(peer_id) and self._allowed[peer_id] == -seconds:
                return -seconds
            heapq.heappop(self._by_allowed)
        return 0.0

    def overdue(self, now: float) -> set[str]:
        """Return the missing peers that were given all the time they may take."""
        return {peer_id for peer_id in self.missing if now >= self.counted_from + self._allowed[peer_id]}

    # -- whom it waits for -------------------------------------------------------------------------------------------------

    def expect(self, peer_id: str, seconds: float) -> None:
        """Wait for this peer, too, for so many seconds from counted_from.

        Has no effect on one whose bytes were bad, or that cannot contribute.
        """
        if peer_id in self.faults or (self.only is not None and peer_id not in self.only):
            return
        self.deadline = max(self.deadline, self.counted_from + seconds)
        if peer_id not in self.expected:
            self.expected.add(peer_id)
            self.wanted.add(peer_id)
            self._allow(peer_id, seconds)

    def expect_no_more(self, peer_id: str) -> None:
        """Do not wait for this peer any longer. What it delivered stays in."""
        self.punctual.discard(peer_id)
        self.expected.discard(peer_id)

    def restrict(self, peers: frozenset[str]) -> None:
        """Only these peers can contribute. Nobody else is waited for, or missing."""
        self.only = peers
        for peer_id in self.expected - peers:
            self.expect_no_more(peer_id)
        self.wanted &= peers

    def extend(self, peer_id: str, seconds: float) -> None:
        """Its transfer moves: wait for it at least so many seconds from counted_from."""
        if self._is_missing(peer_id):
            self.deadline = max(self.deadline, self.counted_from + seconds)
            self._allow(peer_id, max(seconds, self._allowed[peer_id]))

    # -- what is in --------------------------------------------------------------------------------------------------------

    def deliver(self, peer_id: str, fragment_id: int) -> None:
        """A fragment of this peer is in."""
        self.delivered[fragment_id].add(peer_id)
        if all(peer_id in peers for peers in self.delivered.values()):
            self.complete.add(peer_id)

    def withdraw(self, peer_id: str) -> None:
        """Nothing of this peer is in any more. It is waited for as long as it was before."""
        for peers in self.delivered.values():
            peers.discard(peer_id)
        self.complete.discard(peer_id)
        if peer_id in self.expected:
            self._allow(peer_id, self._allowed[peer_id])

    def fault(self, peer_id: str, reason: str) -> None:
        """Its bytes were bad: it is out of the round, with all that no Reduce was emitted for."""
        self.faults.setdefault(peer_id, reason)
        self.expect_no_more(peer_id)
        self.withdraw(peer_id)

    def note_quorum(self, now: float) -> None:
        """Remember since when a quorum is complete."""
        if len(self.complete) < self.quorum:
            self.quorum_at = None
        elif self.quorum_at is None:
            self.quorum_at = now

    # -- what is merged ----------------------------------------------------------------------------------------------------

    def reduce_early(self) -> list[Reduce]:
        """Ask for the fragments that every expected peer has in, if parts of a contribution may be merged."""
        if self.whole:
            return []
        return self._reduce(i for i in self.due if i not in self.asked and self.expected <= self.delivered[i])

    def close(self, reason: str) -> list[Reduce]:
        """End the collection, and ask for the fragments that are not reduced yet, from the peers that have them in."""
        self.close_reason = reason
        if self.whole:
            for peers in self.delivered.values():
                peers &= self.complete
        self.partly = self._merged_in_part()
        return self._reduce(self.due)

    def merges(self, peer_id: str) -> bool:
        """Return whether a fragment of this peer is asked for, or merged."""
        return any(peer_id in peers for peers in self.asked.values())

    def _reduce(self, fragment_ids: Iterable[int]) -> list[Reduce]:
        """Ask for these fragments from the peers that have them in: each once, and none with less than a quorum."""
        now = [i for i in fragment_ids if i not in self.asked and len(self.delivered[i]) >= self.quorum]
        self.asked |= {i: tuple(sorted(self.delivered[i])) for i in now}
        return [Reduce(self.round_id, i, self.asked[i]) for i in now]

    def _merged_in_part(self) -> frozenset[str]:
        """Of whom some fragments are merged, and not all, if the collection ends now: the rest came late, or not at all."""
        if self.whole or len(self.due) == 1:
            return frozenset()
        merged = [frozenset(self.asked.get(i, self.delivered[i])) for i in self.due]
        return frozenset().union(*merged) - merged[0].intersection(*merged)

    # -- how it is reported ------------------------------------------------------------------------------------------------

    def tally(self) -> str:
        """`3 of 4 in, quorum 2 (missing: d)`, if it closed now."""
        return f"{len(self.complete)} of {len(self.wanted | self.complete)} in, quorum {self.quorum}{self.without()}"

    def without(self, *, merges: bool = True) -> str:
        """` (missing: b, c; lost: d in part; refused: e)`, or '' when nobody is.

        merges: whether it closes now; else nothing is merged, not even in part.
        """
        partly = self._merged_in_part() if merges else frozenset()
        missing, faulted = self.missing, set(self.faults)
        lost = self.wanted - self.complete - missing - faulted
        late = partly - missing - lost - faulted
        groups = (("missing", missing), ("lost", lost), ("refused", faulted), ("late", late))
        text = "; ".join(f"{word}: {_names(peers, partly)}" for word, peers in groups if peers)
        return f" ({text})" if text else ""

    # ----------------------------------------------------------------------------------------------------------------------

    def _is_missing(self, peer_id: str) -> bool:
        return peer_id in self.expected and peer_id not in self.complete

    def _allow(self, peer_id: str, seconds: float) -> None:
        self._allowed[peer_id] = seconds
        heapq.heappush(self._by_allowed, (-seconds, peer_id))


def _names(peers: Iterable[str], partly: Set[str]) -> str:
    return ", ".join(f"{peer_id} in part" if peer_id in partly else peer_id for peer_id in sorted(peers))


class ReadyPeers:
    """The live peers, and which of them can contribute to the present outer step (rule 2 of `edit.rounds.machine`).

    behind: how many outer steps a ready peer's last report may lie behind the run's.
    """

    def __init__(self, outer_step: int, behind: int) -> None:
        self._outer_step, self._behind = outer_step, behind
        self._reported: dict[str, int] = {}  # the live peers, and the outer step that each last reported
        self._ready: set[str] = set()

    @property
    def ready(self) -> Set[str]:
        """The peers that can contribute."""
        return self._ready

    def reported(self, peer_id: str) -> int | None:
        """Return the outer step that a live peer last reported; None when it is not live."""
        return self._reported.get(peer_id)

    def report(self, peer_id: str, outer_step: int) -> None:
        """A live peer reports its outer step."""
        self._reported[peer_id] = outer_step
        if self._outer_step - self._behind <= outer_step <= self._outer_step:
            self._ready.add(peer_id)
        else:
            self._ready.discard(peer_id)

    def contributes(self, peer_id: str, outer_step: int) -> None:
        """Take a contribution for a report, if the peer is live: rounds may be shorter than the time between two reports."""
        if not outer_step <= self._reported.get(peer_id, outer_step) <= self._outer_step:
            self.report(peer_id, outer_step)

    def lost(self, peer_id: str) -> None:
        """The peer is not live any more."""
        self._reported.pop(peer_id, None)
        self._ready.discard(peer_id)

    def advance(self, outer_step: int) -> None:
        """The run is at another outer step."""
        self._outer_step, oldest = outer_step, outer_step - self._behind
        self._ready = {peer_id for peer_id, reported in self._reported.items() if oldest <= reported <= outer_step}
