"""How long a round waits for each peer: from its own measured times, never from a fixed timeout.

Owns: the last 16 times of each peer, in seconds from a round's opening to the peer's last fragment, and the formula below.
Must not know: the clock, rounds, quorum, why a time is long.

    expected_s(peer) = clamp(median + spread * max(MAD, median / 10), floor, ceiling)     ceiling before 3 measurements

Constant times have a MAD of 0; the tenth of the median keeps a margin for them (fixed timeouts are
wrong both ways).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median

from edit.config import RoundsConfig
from edit.errors import LocalProtocolError

__all__ = ["FEWEST", "WINDOW", "Deadlines"]

WINDOW = 16  # measurements kept per peer
FEWEST = 3  # measurements before a peer's own times count
SMALLEST_SPREAD = 0.1  # of the median


class Deadlines:
    """Measured seconds per peer, and what follows from them. `config`: floor_s, ceiling_s and spread are used."""

    def __init__(self, config: RoundsConfig) -> None:
        self._config = config
        self._windows: dict[str, deque[float]] = {}
        self._expected: dict[str, float] = {}  # of those measured, since their last measurement

    def record(self, peer_id: str, seconds: float) -> None:
        """Add one measurement; seconds: finite and not negative, or LocalProtocolError."""
        if not math.isfinite(seconds) or seconds < 0:
            raise LocalProtocolError(f"measured time of {peer_id} is {seconds} s")
        self._windows.setdefault(peer_id, deque(maxlen=WINDOW)).append(seconds)
        self._expected.pop(peer_id, None)

    def measured(self, peer_id: str) -> bool:
        """Whether the peer's own times count already."""
        return len(self._windows.get(peer_id, ())) >= FEWEST

    def expected_s(self, peer_id: str) -> float:
        """Seconds from a round's opening after which this peer is overdue."""
        known = self._expected.get(peer_id)
        if known is None and self.measured(peer_id):
            known = self._expected[peer_id] = self._allowed(self._windows[peer_id])
        return self._config.ceiling_s if known is None else known

    def _allowed(self, times: Collection[float]) -> float:
        middle = median(times)
        deviation = median(abs(time - middle) for time in times)
        allowed = middle + self._config.spread * max(deviation, SMALLEST_SPREAD * middle)
        return min(max(allowed, self._config.floor_s), self._config.ceiling_s)
