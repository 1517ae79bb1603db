"""What a simulated run has to show: counted steps, seconds, bytes, staleness. Owns: the sums. Must not know: their causes.

Work is counted in fragment-steps: one inner step of one peer, for one fragment. A streaming outer step commits only the
fragments it exchanged, so that steps cannot be counted whole there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from edit.errors import LocalProtocolError

__all__ = ["Accounting", "Share"]


class Share(NamedTuple):
    """What one contribution brings for one fragment: inner steps `after` + 1 to `until` of the peer's own count, the first of
    them made from outer step `based`."""

    after: int
    until: int
    based: int


@dataclass(slots=True)
class Accounting:
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
    _until: dict[int, dict[str, int]] = field(default_factory=dict)

    def count(self, fragment_id: int, shares: Mapping[str, Share], rejected: Set[str], stale: Callable[[int], int]) -> None:
        """A commit took these, some without weight. stale: how many exchanges of the fragment ago an outer step was the newest.

        Raises LocalProtocolError when it takes a step a second time.
        """
        counted = self._until.setdefault(fragment_id, {})
        for peer_id, (after, until, _) in shares.items():
            if after < counted.get(peer_id, 0) or until < after:
                raise LocalProtocolError(f"{peer_id}, fragment {fragment_id}: steps {after + 1} to {until} count twice")
            counted[peer_id] = until
            if peer_id not in rejected:
                self.fragment_steps += until - after
        for based, many in Counter([share.based for share in shares.values()]).items():
            self.staleness[stale(based)] += many
        self.rejected += len(rejected)

    def close(self, *, committed: bool, contributors: int = 0, live: int = 0) -> None:
        """A round is over. contributors, live: at a commit."""
        if not committed:
            self.aborts += 1
            return
        self.commits += 1
        self.contributors += contributors
        self.participation += contributors / max(live, contributors)
