"""Which peers can contribute to the present outer step: those that are live and near it. Sans-IO.

Owns: rule 2 of `edit.rounds.machine`. Must not know: rounds, leases, why a peer is live.
"""

from __future__ import annotations

__all__ = ["ReadyPeers"]


class ReadyPeers:
    """behind: how many outer steps a peer's last report may lie behind the run's and it still is ready."""

    def __init__(self, outer_step: int, behind: int) -> None:
        self._outer_step, self._behind = outer_step, behind
        self._live: dict[str, int] = {}  # peer_id -> the outer step it last reported
        self.able: set[str] = set()  # the ready ones of them; not to be changed from outside

    def reported(self, peer_id: str) -> int | None:
        """The outer step that a live peer last reported."""
        return self._live.get(peer_id)

    def is_ready(self, peer_id: str) -> bool:
        return peer_id in self.able

    def report(self, peer_id: str, outer_step: int) -> None:
        """A live peer says where it is."""
        self._live[peer_id] = outer_step
        (self.able.add if self._near(outer_step) else self.able.discard)(peer_id)

    def contributes(self, peer_id: str, outer_step: int) -> None:
        """As good as a report, if it is live: rounds may be shorter than the time between two reports."""
        if not outer_step <= self._live.get(peer_id, outer_step) <= self._outer_step:
            self.report(peer_id, outer_step)

    def lost(self, peer_id: str) -> None:
        """It is not live any more."""
        self._live.pop(peer_id, None)
        self.able.discard(peer_id)

    def advance(self, outer_step: int) -> None:
        """The run is at another outer step."""
        self._outer_step = outer_step
        oldest = outer_step - self._behind
        self.able = {peer_id for peer_id, reported in self._live.items() if oldest <= reported <= outer_step}

    def _near(self, reported: int) -> bool:
        return self._outer_step - self._behind <= reported <= self._outer_step
