"""What a simulated run has to show: counted steps, seconds, bytes, staleness. Owns: the sums. Must not know: their causes.

Work is counted in fragment-steps: one inner step of one peer, for one fragment. A streaming outer step commits only the
fragments it exchanged, so that steps cannot be counted whole there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from edit.errors import LocalProtocolError

__all__ = ["Ledger", "Share"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one contribution brings for one fragment: inner steps `after` + 1 to `until` of the peer's own count, the first of
    them made `stale` exchanges of this fragment ago."""

    after: int
    until: int
    stale: int


@dataclass(slots=True)
class Ledger:
    """fragment_steps: counted in commits; trained: inner steps made; seconds over all peers: training_s and alive_s;
    participation: sum over the commits of contributors / live peers."""

    fragment_steps: int = 0
    rejected: int = 0
    trained: int = 0
    training_s: float = 0.0
    alive_s: float = 0.0
    commits: int = 0
    aborts: int = 0
    contributors: int = 0
    participation: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    failures: int = 0
    leaves: int = 0
    returns: int = 0
    snapshots: int = 0
    late: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    _until: dict[tuple[str, int], int] = field(default_factory=dict)

    def count(self, peer_id: str, fragment_id: int, share: Share, *, rejected: bool) -> None:
        """A commit took this share, with or without weight. Raises LocalProtocolError when it takes a step a second time."""
        key = (peer_id, fragment_id)
        if share.after < self._until.get(key, 0) or share.until < share.after:
            raise LocalProtocolError(f"{peer_id}, fragment {fragment_id}: steps {share.after + 1} to {share.until} count twice")
        self._until[key] = share.until
        self.staleness[share.stale] += 1
        if rejected:
            self.rejected += 1
        else:
            self.fragment_steps += share.until - share.after

    def close(self, *, committed: bool, contributors: int = 0, live: int = 0) -> None:
        """A round is over. contributors, live: at a commit."""
        if not committed:
            self.aborts += 1
            return
        self.commits += 1
        self.contributors += contributors
        self.participation += contributors / max(live, contributors)
