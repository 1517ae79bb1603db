"""A thread for each tracker, so that one that raises, waits or hangs neither stops nor slows down what it tracks.

What waits for a tracker is bounded: beyond that, values are lost. Each tracker has one warning for errors and one for losses.
A tracker is made in its thread, when the first values come.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from edit.trackers.base import Tracker, Values

__all__ = ["CLOSE_S", "MOST_WAITING", "BackgroundTracker", "Trackers"]

MOST_WAITING = 1000
CLOSE_S = 5.0  # a tracker is waited for at the end
_log = logging.getLogger("edit.trackers")


class BackgroundTracker:
    """One tracker and its thread.

    Args:
        name: for messages.
        make: called with the first step, in the thread.
        most_waiting: calls of `log` that may wait for the tracker.
    """

    def __init__(self, name: str, make: Callable[[int], Tracker], most_waiting: int = MOST_WAITING) -> None:
        self._name, self._make, self._most_waiting = name, make, most_waiting
        self._changed = threading.Condition()  # never held while the tracker runs
        self._waiting: deque[tuple[int, Values]] = deque()
        self._closing = self._broken = False
        self._lost = 0
        self._failed = False  # said already
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Values) -> None:
        """Hand over values; return at once, and raise nothing."""
        with self._changed:
            if self._closing or self._broken:
                return
            if len(self._waiting) < self._most_waiting:
                self._waiting.append((step, dict(values)))
                self._changed.notify()
                return
            self._lost += 1
            first = self._lost == 1
        if first:
            _log.warning("--tracker %s: does not keep up; values are lost, the training goes on", self._name)

    def begin_close(self) -> None:
        """Let the thread write what waits, close the tracker and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self, within_s: float = CLOSE_S) -> None:
        """Wait so long until all is written and closed; then leave the thread alone."""
        self.begin_close()
        self._thread.join(within_s)
        if self._thread.is_alive():
            _log.warning("--tracker %s: did not end within %g s; it may lack the last values", self._name, within_s)
        elif self._lost:
            _log.warning("--tracker %s: did not keep up; it lacks %d lines of values", self._name, self._lost)

    def _run(self) -> None:
        tracker: Tracker | None = None
        while (item := self._next()) is not None:
            step, values = item
            try:
                if tracker is None:
                    tracker = self._make(step)
                tracker.log(step, values)
            except BaseException as error:  # some raise SystemExit; there is nothing here to be ended
                self._warn(error)
                if tracker is None:
                    with self._changed:
                        self._broken = True
                        self._waiting.clear()
                    return
        if tracker is not None:
            try:
                tracker.close()
            except BaseException as error:
                self._warn(error)

    def _next(self) -> tuple[int, Values] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None

    def _warn(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            text = " ".join(str(error).split())[:500]
            _log.warning("--tracker %s: %s: %s; the training goes on", self._name, type(error).__name__, text)


class Trackers:
    """Context manager over any number of trackers, which ends them."""

    def __init__(self, trackers: Sequence[BackgroundTracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Values) -> None:
        """Hand values to each; return at once, and raise nothing."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self, within_s: float = CLOSE_S) -> None:
        """End all, and wait for each so long at most."""
        for tracker in self._trackers:
            tracker.begin_close()
        for tracker in self._trackers:
            tracker.close(within_s)

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
