"""In which hours of the day a member takes part (`--hours`): the text, and a command that keeps to it.

Outside of its hours a member is not there. At their end it saves, leaves and ends, as after Ctrl-C: nobody waits for it;
at the next beginning the same command starts anew, in the same process. It does not train meanwhile: what it did for hours
without the others would be thrown away.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from edit.errors import ConfigError

__all__ = ["Hours", "keep_hours"]

_log = logging.getLogger(__name__)
LOOK_S = 10.0  # between two looks at the clock, which may jump: daylight saving, a suspended machine
_DAY_MINUTES = 24 * 60
_WINDOW = re.compile(r"(\d\d?):(\d\d)-(\d\d?):(\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hours:
    """Windows of the day: (first minute, minute after the last), counted from midnight by the wall clock; the end may be the
    next day's. An hour that a change of the clock leaves out is not there; one that comes twice counts twice."""

    windows: tuple[tuple[int, int], ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read `22:00-06:00`, or several with commas. Raises ConfigError."""
        windows = []
        for each in text.split(","):
            found = _WINDOW.fullmatch(each.strip())
            start, end = (int(found[i]) * 60 + int(found[i + 1]) for i in (1, 3)) if found else (0, 0)
            minutes = (int(found[2]), int(found[4])) if found else (0, 0)
            if start == end or max(minutes) > 59 or start >= _DAY_MINUTES or end > _DAY_MINUTES:
                raise ConfigError(f"--hours {text!r:.80}: must be like 22:00-06:00, several with commas, from 00:00 to 24:00")
            windows.append((start, end))
        return cls(tuple(windows), text)

    def has(self, moment: datetime) -> bool:
        """Return whether a moment is in one of them."""
        minute = moment.hour * 60 + moment.minute
        return any(start <= minute < end if start < end else not end <= minute < start for start, end in self.windows)

    def next_start(self, unix: float, local: Callable[[float], datetime]) -> datetime | None:
        """Return the first minute from a moment on that is in one of them; None: none is, within two days."""
        first = unix - unix % 60
        later = (local(first + 60 * minutes) for minutes in range(2 * _DAY_MINUTES))
        return next((moment for moment in later if self.has(moment)), None)


class _Ended(BaseException):
    """A signal came in a place that takes none: the hours are over, or the operator stops the command."""


def keep_hours(
    hours: Hours | None,
    work: Callable[[], object],
    *,
    unix: Callable[[], float] = time.time,
    local: Callable[[float], datetime] = datetime.fromtimestamp,
    restart: Callable[[], object] | None = None,
    look_s: float = LOOK_S,
) -> None:
    """Do the work of a command in these hours; None: at once. Call it on the main thread.

    Args:
        work: a command that a SIGTERM ends politely.
        unix, local: the clock, and what it shows here.
        restart: starts the command anew, in a process that has nothing of this one; it does not return.
    """
    if hours is None:
        work()
        return
    if not hours.has(local(unix())) and not _wait(hours, unix, local, look_s):
        return
    if _until_over(work, lambda: not hours.has(local(unix())), look_s):
        _log.info("the hours are over")
        (restart or _restart)()


def _wait(hours: Hours, unix: Callable[[], float], local: Callable[[float], datetime], look_s: float) -> bool:
    """Wait for the beginning of the hours; return False when a signal said stop before."""

    def stop(*_: object) -> None:
        raise _Ended

    start = hours.next_start(unix(), local)
    _log.info("outside of the hours %s: this member is back %s", hours.text, f"at {start:%H:%M}" if start else "later")
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not hours.has(local(unix())):
            time.sleep(look_s)
    except _Ended:
        _log.info("stopping as asked")
        return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return True


def _until_over(work: Callable[[], object], is_over: Callable[[], bool], look_s: float) -> bool:
    """Do the work; send this process a SIGTERM once `is_over`, and return whether that was done."""
    done, told = threading.Event(), threading.Event()
    working = True

    def watch() -> None:
        while not done.wait(look_s):
            if is_over():
                told.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def end(number: int, _: object) -> None:
        """While the work takes no signals itself."""
        if not told.is_set():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif working:
            raise _Ended

    before = signal.signal(signal.SIGTERM, end)
    thread = threading.Thread(target=watch, name="hours", daemon=True)
    try:
        try:  # the signal may come at any moment from here on
            thread.start()
            work()
        finally:
            working = False
    except _Ended:
        pass
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
    return told.is_set()


def _restart() -> None:
    """Become the same command anew. What it began with --fresh it goes on with."""
    words = [word for word in sys.orig_argv[1:] if word != "--fresh"]
    logging.shutdown()  # the log is written by a thread
    os.execv(sys.executable, [sys.executable, *words])
