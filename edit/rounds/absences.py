"""Which live peers are waited for no longer: their contributions do not come whole (rule 16 of `edit.rounds.machine`)."""

from __future__ import annotations

from collections.abc import Set

__all__ = ["Absences"]

_MOST = 2  # absences in a row until a peer is optional
_FIRST_SKIP = 8  # rounds until an optional peer is waited for once more
_LONGEST_SKIP = 1 << 20


class Absences:
    """How many rounds in a row waited for each peer to the end and got no whole contribution of it."""

    def __init__(self) -> None:
        self._moving: dict[str, int] = {}  # rounds in a row that left a transfer out that moved
        self._in_a_row: dict[str, int] = {}
        self._skips: dict[str, int] = {}  # of the optional peers: rounds that open until one waits for it again

    def __contains__(self, peer_id: object) -> bool:
        """Return whether the last round that waited for this peer counts as an absence of it."""
        return peer_id in self._in_a_row

    def optional(self, peer_id: str) -> bool:
        """Return whether rounds do not wait for this peer until it contributes."""
        return peer_id in self._skips

    def missed(self, peer_id: str, *, moving_for: int = 0) -> None:
        """A round waited for this peer to the end, and got no whole contribution of it.

        moving_for: after how many such rounds in a row that counts although its transfer moves; 0: it does not move.
        """
        if moving_for:
            count = self._moving[peer_id] = self._moving.get(peer_id, 0) + 1
            if count <= moving_for:
                return
        count = self._in_a_row[peer_id] = self._in_a_row.get(peer_id, 0) + 1
        if count >= _MOST:
            self._skips[peer_id] = min(_FIRST_SKIP << min(count - _MOST, 20), _LONGEST_SKIP)

    def contributed(self, peer_id: str) -> None:
        """This peer has delivered a whole contribution."""
        for kept in (self._in_a_row, self._skips, self._moving):
            kept.pop(peer_id, None)

    def awaited(self, ready: Set[str], quorum: int) -> Set[str]:
        """Return whom a round that opens waits for; everybody ready where the others cannot make a quorum."""
        optional = ready & self._skips.keys()
        for peer_id in optional:
            self._skips[peer_id] -= 1
        awaited = ready - {peer_id for peer_id in optional if self._skips[peer_id] > 0}
        return awaited if len(awaited) >= quorum else ready
