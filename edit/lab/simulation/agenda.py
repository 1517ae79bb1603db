"""Virtual time: what happens when, in order. Owns: the clock and the heap of events. Must not know: what an event means.

Two events of the same time happen in the order in which they were put down, so a run is the same each time it is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

from edit.errors import LocalProtocolError

__all__ = ["Agenda"]


class Agenda:
    """`now`: virtual seconds since the start; `events`: how many have happened."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._number = count(1).__next__
        self._until = math.inf

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Let `action` happen at `when`. Raises LocalProtocolError for a time that is over."""
        if not when >= self.now:
            raise LocalProtocolError(f"virtual time is {self.now}; nothing can happen at {when}")
        heappush(self._heap, (when, self._number(), action))

    def all_at(self, when: float, actions: Sequence[Callable[[], object]]) -> None:
        """Let all of these happen at `when`, one after the other, with nothing between them."""
        self.at(when, partial(self._each, actions) if len(actions) > 1 else actions[0])

    def run(self, until: float, most: int) -> bool:
        """So many events, up to `until` and up to `end`; False when no more can happen."""
        heap, self._until = self._heap, until
        for _ in range(most):
            if not heap or heap[0][0] > self._until:
                return False
            self.now, _, action = heappop(heap)
            self.events += 1
            action()
        return True

    def end(self) -> None:
        """No further event happens in the present `run`."""
        self._until = -math.inf

    def _each(self, actions: Sequence[Callable[[], object]]) -> None:
        self.events += len(actions) - 1
        for action in actions:
            action()
