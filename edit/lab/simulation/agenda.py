"""Virtual time: what happens when, in order. Owns: the clock and the heap of events. Must not know: what an event means.

Two events of the same time happen in the order in which they were put down, so a run is the same each time it is repeated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from edit.errors import LocalProtocolError

__all__ = ["Agenda"]


class Agenda:
    """`now`: virtual seconds since the start; `events`: how many have happened."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._put = 0

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Let `action` happen at `when`. Raises LocalProtocolError for a time that is over."""
        if not when >= self.now:
            raise LocalProtocolError(f"virtual time is {self.now}; nothing can happen at {when}")
        self._put += 1
        heapq.heappush(self._heap, (when, self._put, action))

    def step(self, until: float) -> bool:
        """The next event; False, and nothing happens, when there is none up to `until`."""
        if not self._heap or self._heap[0][0] > until:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True
