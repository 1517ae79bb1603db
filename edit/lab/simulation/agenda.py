"""Virtual time: what happens when, in order. Owns: the clock and the heap of events. Must not know: what an event means.

Two events of the same time happen in the order in which they were put down, so a run is the same each time it is repeated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial

from edit.errors import LocalProtocolError

__all__ = ["Agenda"]


class Agenda:
    """`now`: virtual seconds since the start; `events`: how many have happened."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._put = 0
        self._ended = False

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Let `action` happen at `when`. Raises LocalProtocolError for a time that is over."""
        if not when >= self.now:
            raise LocalProtocolError(f"virtual time is {self.now}; nothing can happen at {when}")
        self._put += 1
        heapq.heappush(self._heap, (when, self._put, action))

    def all_at(self, when: float, actions: Sequence[Callable[[], object]]) -> None:
        """Let all of these happen at `when`, one after the other, with nothing between them."""
        self.at(when, partial(self._each, actions) if len(actions) > 1 else actions[0])

    def run(self, until: float, count: int) -> bool:
        """The next `count` events or a few more; False when there are none left up to `until`, or after `end`."""
        heap, last = self._heap, self.events + count
        while not self._ended and heap and heap[0][0] <= until:
            if self.events >= last:
                return True
            self.now, _, action = heapq.heappop(heap)
            self.events += 1
            action()
        return False

    def end(self, ended: bool = True) -> None:
        """No further event happens in `run`, until this is taken back."""
        self._ended = ended

    def _each(self, actions: Sequence[Callable[[], object]]) -> None:
        self.events += len(actions) - 1
        for action in actions:
            action()
