"""A thread for each tracker, so that one that raises, waits or hangs neither stops nor slows down what it tracks.

What waits for a tracker is bounded: beyond that, values are lost. Each has one warning for a trouble and one for losses.
A tracker is made in its thread, when the first values come. One that raises is closed, and made again after a pause that
doubles from FIRST_PAUSE_S to MOST_PAUSE_S, unless it raised ConfigError or ImportError, which it would do again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from edit.errors import ConfigError
from edit.trackers.base import Tracker, Values

__all__ = ["CLOSE_S", "FIRST_PAUSE_S", "MOST_PAUSE_S", "MOST_WAITING", "BackgroundTracker", "Trackers"]

MOST_WAITING = 1000
FIRST_PAUSE_S = 60.0
MOST_PAUSE_S = 3600.0  # a tracker that has worked for so long begins with the first pause again
CLOSE_S = 5.0  # trackers are waited for at the end
_log = logging.getLogger("edit.trackers")


class BackgroundTracker:
    """One tracker and its thread.

    Args:
        name: for messages.
        make: called with the first step, in the thread.
        most_waiting: calls of `log` that may wait for the tracker.
        clock: seconds, for the pauses after errors.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], Tracker],
        most_waiting: int = MOST_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._make, self._most_waiting, self._clock = name, make, most_waiting, clock
        self._changed = threading.Condition()  # never held while the tracker runs
        self._waiting: deque[tuple[int, Values]] = deque()
        self._closing = self._broken = False
        self._lost = 0
        self._full = False  # said already
        self._pause = 0.0  # the last one; 0: there is no trouble
        self._not_before = 0.0  # by the clock
        self._at_end = False  # it was tried once more, when it was to be closed
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
            first, self._full = not self._full, True
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
            _log.warning("--tracker %s: did not end in time; it may lack the last values", self._name)
        elif self._lost:
            _log.warning("--tracker %s: lacks %d lines of values", self._name, self._lost)

    def _run(self) -> None:
        tracker: Tracker | None = None
        made = 0.0
        while (step := self._first_step()) is not None:
            try:
                if tracker is None:
                    tracker, made = self._make(step), self._clock()
                tracker.log(*self._taken())
            except BaseException as error:  # some raise SystemExit; there is nothing here to be ended
                self._failed(error, 0.0 if tracker is None else self._clock() - made, lost=tracker is not None)
                if tracker is not None:
                    with contextlib.suppress(BaseException):  # it is in trouble already
                        tracker.close()
                    tracker = None
        if tracker is not None:
            try:
                tracker.close()
            except BaseException as error:
                self._warn(error, "")

    def _first_step(self) -> int | None:
        """Wait for values, and until the tracker may be tried; return their step. None: it is over."""
        with self._changed:
            while not (self._closing or self._broken):
                pause = self._not_before - self._clock()
                if self._waiting and pause <= 0:
                    break
                self._changed.wait(pause if self._waiting else None)
            return self._waiting[0][0] if self._waiting else None

    def _taken(self) -> tuple[int, Values]:
        with self._changed:
            return self._waiting.popleft()

    def _failed(self, error: BaseException, worked_s: float, *, lost: bool) -> None:
        """Decide when the tracker is tried again, and say so once for a trouble. At the end it is once, and at once."""
        final = isinstance(error, (ConfigError, ImportError))
        with self._changed:
            if worked_s > MOST_PAUSE_S:
                self._pause = 0.0
            first = not self._pause
            self._pause = min(2 * self._pause, MOST_PAUSE_S) or FIRST_PAUSE_S
            self._not_before = self._clock() + self._pause
            self._lost += lost
            if final or self._at_end:
                self._broken = True
                self._lost += 0 if final else len(self._waiting)
                self._waiting.clear()
            self._at_end = self._closing
        if first or final:
            self._warn(error, "not tried again, " if final else f"tried again in {self._pause:g} s, ")

    def _warn(self, error: BaseException, then: str) -> None:
        text = " ".join(str(error).split())[:500]
        _log.warning("--tracker %s: %s: %s; %sthe training goes on", self._name, type(error).__name__, text, then)


class Trackers:
    """Context manager over any number of trackers, which ends them."""

    def __init__(self, trackers: Sequence[BackgroundTracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Values) -> None:
        """Hand values to each; return at once, and raise nothing."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self, within_s: float = CLOSE_S) -> None:
        """End all, and wait so long at most."""
        until = time.monotonic() + within_s
        for tracker in self._trackers:
            tracker.begin_close()
        for tracker in self._trackers:
            tracker.close(max(0.0, until - time.monotonic()))

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
