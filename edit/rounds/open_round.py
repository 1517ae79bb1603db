"""The book of one open round: who is expected, what is in, what is reduced, and how that is said to people. Sans-IO.

Owns: the sets and the sentences. Each event changes the sets where it must and computes none anew, for a round of thousands of
peers has many thousands of events. Must not know: when a round closes, who is live, the next round (`edit.rounds.machine`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from edit.rounds.events import Reduce

__all__ = ["OpenRound"]


@dataclass(slots=True, kw_only=True)
class OpenRound:
    """counted_from: of the deadlines, later than opened_at only after nobody was left; welcome_until: who is ready by then is
    expected; delivered: per fragment that is due, the peers that have it in; wanted: everybody ever expected; punctual:
    expected from the opening on and never lost; faults: whose bytes were bad, and why; asked: fragments whose Reduce was
    emitted; complete: who has delivered all fragments; missing: whom the round still waits for (expected, not complete);
    whole: nothing is merged of a peer that is not complete (it counts in a later round); partly: of whom some fragments are
    merged, and not all, known once the collection is closed."""

    round_id: int
    outer_step: int
    quorum: int
    opened_at: float
    counted_from: float
    welcome_until: float
    deadline: float
    delivered: dict[int, set[str]]
    whole: bool
    expected: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)
    punctual: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    faults: dict[str, str] = field(default_factory=dict)
    asked: dict[int, tuple[str, ...]] = field(default_factory=dict)  # with whom
    partly: frozenset[str] = frozenset()
    reduced: set[int] = field(default_factory=set)
    quorum_at: float | None = None  # when a quorum was complete
    free_until: float = math.inf  # when the first of those who are complete would have to wait for the outcome
    close_reason: str = ""  # not empty: the collection is closed
    commit_asked: bool = False
    due: tuple[int, ...] = ()  # its fragments, ascending
    _in: dict[str, int] = field(default_factory=dict)  # how many fragments of each peer are in
    _lacking: Counter[int] = field(default_factory=Counter)  # per fragment, how many expected peers it is not in from
    _slowest: list[tuple[float, str]] = field(default_factory=list)  # heap: -seconds; also what no longer holds
    _allowed: dict[str, float] = field(default_factory=dict)  # seconds, as last said of each peer

    def __post_init__(self) -> None:
        self.due = tuple(sorted(self.delivered))

    @property
    def absent(self) -> tuple[str, ...]:
        """Who was expected at some time, is not complete, and of whom nothing is merged: what people call missing."""
        return tuple(sorted(self.wanted - self.complete - self.partly))

    @property
    def patience_s(self) -> float:
        """Seconds from counted_from on after which every missing peer is overdue; 0 when none is missing."""
        while self._slowest:
            seconds, peer_id = self._slowest[0]
            if peer_id in self.missing and self._allowed[peer_id] == -seconds:
                break
            heapq.heappop(self._slowest)
        return -self._slowest[0][0] if self._slowest else 0.0

    def overdue(self, now: float) -> set[str]:
        """Who of the missing was given all the time that it may take."""
        return {peer_id for peer_id in self.missing if now >= self.counted_from + self._allowed[peer_id]}

    def open_with(self, ready: Mapping[str, float]) -> None:
        """Wait for all of these from the opening on, when nothing is in yet; values: seconds."""
        for peers in (self.punctual, self.expected, self.wanted, self.missing):
            peers.update(ready)
        self._lacking.update(dict.fromkeys(self.delivered, len(ready)))
        self._allowed.update(ready)
        self._slowest = [(-seconds, peer_id) for peer_id, seconds in ready.items()]
        heapq.heapify(self._slowest)
        self.deadline = max(self.deadline, self.counted_from + max(ready.values(), default=0.0))

    def expect(self, peer_id: str, seconds: float) -> None:
        """Wait for this peer, too, so many seconds from counted_from on; not for one whose bytes were bad."""
        if peer_id in self.faults:
            return
        self.deadline = max(self.deadline, self.counted_from + seconds)
        if peer_id in self.expected:
            return
        self.expected.add(peer_id)
        self.wanted.add(peer_id)
        self._count_lacking(peer_id, 1)
        if peer_id not in self.complete:
            self.missing.add(peer_id)
            self._allowed[peer_id] = seconds
            heapq.heappush(self._slowest, (-seconds, peer_id))

    def expect_no_more(self, peer_id: str) -> None:
        """What it delivered stays in."""
        self.punctual.discard(peer_id)
        self.missing.discard(peer_id)
        if peer_id in self.expected:
            self.expected.remove(peer_id)
            self._count_lacking(peer_id, -1)

    def extend(self, peer_id: str, seconds: float) -> None:
        """Its transfer moves: wait for it at least so many seconds from counted_from on."""
        if peer_id in self.missing:
            self.deadline = max(self.deadline, self.counted_from + seconds)
            self._allowed[peer_id] = seconds = max(seconds, self._allowed[peer_id])
            heapq.heappush(self._slowest, (-seconds, peer_id))

    def deliver(self, peer_id: str, fragment_id: int) -> None:
        """A fragment of this peer is in."""
        peers = self.delivered[fragment_id]
        if peer_id in peers:
            return
        peers.add(peer_id)
        self._lacking[fragment_id] -= peer_id in self.expected
        self._in[peer_id] = count = self._in.get(peer_id, 0) + 1
        if count == len(self.delivered):
            self.complete.add(peer_id)
            self.missing.discard(peer_id)

    def fault(self, peer_id: str, reason: str) -> None:
        """Its bytes were bad: it is out of the round, with all that no Reduce was emitted for."""
        self.faults.setdefault(peer_id, reason)
        self.expect_no_more(peer_id)
        self.withdraw(peer_id)

    def withdraw(self, peer_id: str) -> None:
        """Nothing of it is in any more; it is waited for as long as it was before."""
        if self._in.pop(peer_id, None) is None:
            return
        for fragment_id, peers in self.delivered.items():
            if peer_id in peers:
                peers.remove(peer_id)
                self._lacking[fragment_id] += peer_id in self.expected
        self.complete.discard(peer_id)

    def close(self, reason: str) -> list[Reduce]:
        """End the collection, and ask for the fragments that are not reduced yet, with whoever has them in."""
        self.close_reason = reason
        for peers in self.delivered.values() if self.whole else ():
            peers &= self.complete
        self.partly = self._partly()
        return self.reduce(self.due)

    def note_quorum(self, now: float) -> None:
        """Remember since when a quorum is complete."""
        if len(self.complete) < self.quorum:
            self.quorum_at = None
        elif self.quorum_at is None:
            self.quorum_at = now

    def in_from_all(self) -> list[int]:
        """Fragments that every expected peer has in."""
        return [fragment_id for fragment_id in self.due if not self._lacking[fragment_id]]

    def reduce(self, fragment_ids: Iterable[int]) -> list[Reduce]:
        """Ask for these fragments with whoever has them in: each once, and none with less than a quorum."""
        due = [i for i in fragment_ids if i not in self.asked and len(self.delivered[i]) >= self.quorum]
        self.asked |= {i: tuple(sorted(self.delivered[i])) for i in due}
        return [Reduce(self.round_id, i, self.asked[i]) for i in due]

    def tally(self) -> str:
        """`3 of 4 in, quorum 2 (missing: d)`, if it closed now."""
        return f"{len(self.complete)} of {len(self.wanted | self.complete)} in, quorum {self.quorum}{self.without()}"

    def without(self, *, merges: bool = True) -> str:
        """` (missing: b, c; lost: d in part; refused: e)`, or '' when nobody is; in part: some of its fragments are merged.

        merges: whether it closes now; else nothing is merged.
        """
        partly = self._partly() if merges else frozenset()
        out = self.wanted - self.complete - self.missing - set(self.faults)
        late = partly - self.missing - out - set(self.faults)
        groups = (("missing", self.missing), ("lost", out), ("refused", self.faults), ("late", late))
        said = "; ".join(f"{word}: {_names(peers, partly)}" for word, peers in groups if peers)
        return f" ({said})" if said else ""

    def _partly(self) -> frozenset[str]:
        """Of whom some fragments are merged, if the collection ends now, and not all: the rest came late, or not at all."""
        if self.whole or len(self.due) == 1:
            return frozenset()
        merged = [frozenset(self.asked.get(i, self.delivered[i])) for i in self.due]
        return frozenset().union(*merged) - merged[0].intersection(*merged)

    def _count_lacking(self, peer_id: str, change: int) -> None:
        for fragment_id, peers in self.delivered.items():
            if peer_id not in peers:
                self._lacking[fragment_id] += change


def _names(peers: Iterable[str], partly: Set[str]) -> str:
    return ", ".join(f"{peer_id} in part" if peer_id in partly else peer_id for peer_id in sorted(peers))
