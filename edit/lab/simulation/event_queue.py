"""Virtual time: the clock, and the events to come in order.

Two events of the same time happen in the order in which they were scheduled, so a run is the same each time it is repeated.
Only near events are kept in order, in a heap that fits into a processor's cache; later ones are kept unordered, by span of
time, until theirs comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count

from edit.errors import LocalProtocolError

__all__ = ["EventQueue"]

SPAN_S = 1 / 16  # a power of two, so that a time's span is exact
_Event = tuple[float, int, Callable[[], object]]


class EventQueue:
    """Actions, each at its virtual time."""

    def __init__(self) -> None:
        self.now = 0.0  # virtual seconds since the start
        self.events = 0  # how many have happened
        self._near: list[_Event] = []  # a heap: all events before the horizon
        self._horizon = 0.0
        self._later: dict[float, list[_Event]] = {}  # by the number of their span
        self._spans: list[float] = []  # a heap: the keys of _later
        self._number = count(1).__next__
        self._until = math.inf

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Schedule `action`. Raises LocalProtocolError for a time that is over, or infinite."""
        if not self.now <= when < math.inf:
            raise LocalProtocolError(f"virtual time is {self.now}; nothing can happen at {when}")
        event = when, self._number(), action
        if when < self._horizon:
            heappush(self._near, event)
            return
        span = when // SPAN_S
        later = self._later.get(span)
        if later is None:
            self._later[span] = [event]
            heappush(self._spans, span)
        else:
            later.append(event)

    def all_at(self, when: float, actions: Sequence[Callable[[], object]]) -> None:
        """Schedule all of these, one after the other, with nothing between them."""
        self.at(when, partial(self._each, actions) if len(actions) > 1 else actions[0])

    def run(self, until: float, most: int) -> bool:
        """Run so many events, up to the time `until` and up to `end`; return False when no more can happen."""
        near, self._until = self._near, until
        for _ in range(most):
            if (not near and not self._come_nearer()) or near[0][0] > self._until:
                return False
            self.now, _, action = heappop(near)
            self.events += 1
            action()
        return True

    def end(self) -> None:
        """Stop the present `run` after this event."""
        self._until = -math.inf

    def _come_nearer(self) -> bool:
        """Move the next span that anything happens in to the near events; return False when there is none."""
        if not self._spans:
            return False
        span = heappop(self._spans)
        self._near += self._later.pop(span)
        heapify(self._near)
        self._horizon = (span + 1) * SPAN_S
        return True

    def _each(self, actions: Sequence[Callable[[], object]]) -> None:
        self.events += len(actions) - 1
        for action in actions:
            action()
