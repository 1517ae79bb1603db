"""The book of one open round: who is expected, what is in, what is reduced, and how that is said to people. Sans-IO.

Owns: the sets and the sentences. Must not know: when a round closes, who is live, the next round (`aggregator.rounds`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aggregator.round_events import Reduce

__all__ = ["OpenRound"]


@dataclass(slots=True, kw_only=True)
class OpenRound:
    """counted_from: of the deadlines, later than opened_at only after nobody was left; welcome_until: who is ready by then is
    expected; delivered: per fragment that is due, the peers that have it in; wanted: everybody ever expected; punctual:
    expected from the opening on and never lost; faults: whose bytes were bad, and why; asked: fragments whose Reduce was
    emitted."""

    round_id: int
    outer_step: int
    quorum: int
    opened_at: float
    counted_from: float
    welcome_until: float
    deadline: float
    delivered: dict[int, set[str]]
    expected: set[str]
    wanted: set[str]
    punctual: set[str]
    offered: set[str] = field(default_factory=set)
    faults: dict[str, str] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)
    quorum_at: float | None = None  # when a quorum was complete
    close_reason: str = ""  # not empty: the collection is closed
    commit_asked: bool = False

    @property
    def due(self) -> tuple[int, ...]:
        """The fragments of this round, ascending."""
        return tuple(sorted(self.delivered))

    @property
    def complete(self) -> frozenset[str]:
        """Who has delivered all fragments."""
        return frozenset(set.intersection(*self.delivered.values()))

    @property
    def missing(self) -> frozenset[str]:
        """Whom the round still waits for."""
        return frozenset(self.expected - self.complete)

    @property
    def absent(self) -> tuple[str, ...]:
        """Who was expected at some time and is not complete: what people call missing."""
        return tuple(sorted(self.wanted - self.complete))

    def expect(self, peer_id: str, until: float) -> None:
        """Wait for this peer, too, as long as `until`; not for one whose bytes were bad."""
        if peer_id not in self.faults:
            self.expected.add(peer_id)
            self.wanted.add(peer_id)
            self.deadline = max(self.deadline, until)

    def expect_no_more(self, peer_id: str) -> None:
        """What it delivered stays in."""
        self.expected.discard(peer_id)
        self.punctual.discard(peer_id)

    def fault(self, peer_id: str, reason: str) -> None:
        """Its bytes were bad: it is out of the round, with all that no Reduce was emitted for."""
        self.faults.setdefault(peer_id, reason)
        self.expect_no_more(peer_id)
        for peers in self.delivered.values():
            peers.discard(peer_id)

    def note_quorum(self, now: float) -> None:
        """Remember since when a quorum is complete."""
        if len(self.complete) < self.quorum:
            self.quorum_at = None
        elif self.quorum_at is None:
            self.quorum_at = now

    def in_from_all(self) -> list[int]:
        """Fragments that every expected peer has in."""
        return [fragment_id for fragment_id, peers in sorted(self.delivered.items()) if self.expected <= peers]

    def reduce(self, fragment_ids: Iterable[int]) -> list[Reduce]:
        """Ask for these fragments with whoever has them in: each once, and none with less than a quorum."""
        due = [i for i in fragment_ids if i not in self.asked and len(self.delivered[i]) >= self.quorum]
        self.asked.update(due)
        return [Reduce(self.round_id, i, tuple(sorted(self.delivered[i]))) for i in due]

    def tally(self) -> str:
        """`3 of 4 in, quorum 2 (missing: d)`."""
        return f"{len(self.complete)} of {len(self.wanted | self.complete)} in, quorum {self.quorum}{self.without()}"

    def without(self) -> str:
        """` (missing: b, c; lost: d; refused: e)`, or '' when nobody is."""
        out = set(self.absent) - self.missing - set(self.faults)
        groups = (("missing", self.missing), ("lost", out), ("refused", self.faults))
        said = "; ".join(f"{word}: {', '.join(sorted(peers))}" for word, peers in groups if peers)
        return f" ({said})" if said else ""
