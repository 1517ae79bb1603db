"""What a simulated run is measured by: counted steps, seconds, bytes, staleness.

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
    """What one contribution brings for one fragment: the peer's inner steps from `after` + 1 to `until`."""

    after: int  # inner steps of the peer's own count
    until: int
    based: int  # the outer step that the first of them was made from


@dataclass(slots=True)
class Accounting:
    """The sums of one run."""

    fragment_steps: int = 0  # counted in commits
    rejected: int = 0  # contributions to a fragment with a verdict other than OK
    trained: int = 0  # inner steps made
    training_s: float = 0.0  # seconds of training, over all peers
    alive_s: float = 0.0  # seconds that a process lived, over all peers
    commits: int = 0
    aborts: int = 0
    contributors: int = 0  # over all commits
    participation: float = 0.0  # contributors / live peers, over all commits
    bytes_up: int = 0
    bytes_down: int = 0
    failures: int = 0
    leaves: int = 0
    returns: int = 0
    snapshots: int = 0
    late: int = 0  # fragments that arrived too late
    staleness: Counter[int] = field(default_factory=Counter)  # contributions to a fragment, by exchanges missed
    _until: dict[int, dict[str, int]] = field(default_factory=dict)  # by fragment and peer: the last inner step counted

    def count(self, fragment_id: int, shares: Mapping[str, Share], rejected: Set[str], stale: Callable[[int], int]) -> None:
        """Add what a commit took, some of it without weight.

        stale: how many exchanges of the fragment ago an outer step was the newest. Raises LocalProtocolError when a step is
        taken a second time.
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
        """Count a round that is over. contributors, live: peers, at a commit."""
        if not committed:
            self.aborts += 1
            return
        self.commits += 1
        self.contributors += contributors
        self.participation += contributors / max(live, contributors)
