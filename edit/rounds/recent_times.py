"""The last measured times of each peer in one phase, side by side in memory: those of thousands are read at once. Sans-IO.

Owns: what is kept, and the order it came in. Must not know: phases, what follows from the times (`edit.rounds.deadlines`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["WINDOW", "RecentTimes"]

WINDOW = 16  # times kept per peer


class RecentTimes:
    """Seconds, by peer_id."""

    __slots__ = ("_counts", "_rows", "_times")

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._counts = array("q", [0])  # how many were ever added; row 0 stands for peers of which none was
        self._times = array("d", [math.inf] * WINDOW)  # row by row; the newest one takes the place of the oldest

    def add(self, peer_id: str, seconds: float) -> None:
        """One more; the oldest one beyond WINDOW is forgotten."""
        row, counts = self._rows.get(peer_id), self._counts
        if row is None:
            row = self._rows[peer_id] = len(counts)
            counts.append(0)
            self._times.extend([math.inf] * WINDOW)
        count = counts[row]
        self._times[row * WINDOW + count % WINDOW] = seconds
        counts[row] = count + 1

    def count(self, peer_id: str) -> int:
        """How many are kept."""
        return min(WINDOW, self._counts[self._rows.get(peer_id, 0)])

    def of(self, peer_id: str) -> list[float]:
        """Those that are kept, the oldest one first."""
        row = self._rows.get(peer_id, 0)
        count, times = self._counts[row], self._times[row * WINDOW : (row + 1) * WINDOW].tolist()
        return times[:count] if count <= WINDOW else times[count % WINDOW :] + times[: count % WINDOW]

    def of_all(self, peers: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Those that are kept of each, in any order, then inf; and how many. Shapes: (len(peers), WINDOW), (len(peers),)."""
        rows = np.array([self._rows.get(peer_id, 0) for peer_id in peers], np.intp)
        times = np.frombuffer(self._times).reshape(-1, WINDOW)[rows]
        return times, np.minimum(np.frombuffer(self._counts, np.int64)[rows], WINDOW)

    def items(self) -> Iterator[tuple[str, list[float]]]:
        """Of every peer, as `of` has them."""
        return ((peer_id, self.of(peer_id)) for peer_id in self._rows)
