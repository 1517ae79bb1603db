"""Ctrl-C while a program is loaded: it ends at once, with exit code 130. SIGTERM where there is something to clean up.

KeyboardInterrupt would come somewhere in an import: a traceback, or torch and numpy take it for a module that is missing, and
the program goes on without. Imports next to nothing, so that a program begins with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import typing

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["cleaned_up_at_sigterm", "end_at_interrupt", "raise_at_interrupt"]


def end_at_interrupt() -> None:
    """Let Ctrl-C end the process at once from now on; nothing is cleaned up, and what is buffered for stdout is lost.

    A SIGINT that is ignored, as with nohup, stays so; a handler that somebody installed stays; so does Python's own outside of
    the main thread.
    """
    _replace(signal.default_int_handler, _end)


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    _replace(_end, signal.default_int_handler)


@contextlib.contextmanager
def cleaned_up_at_sigterm() -> Iterator[None]:
    """Context manager in which SIGTERM raises SystemExit, so that what is left behind is removed, as at Ctrl-C.

    A handler that somebody installed stays, and so does an ignored SIGTERM; outside of the main thread nothing changes.
    """
    installed = False
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError):  # outside of the main thread
            signal.signal(signal.SIGTERM, _exit)
            installed = True
    try:
        yield
    finally:
        if installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # as a shell says it of a process that the signal ended


def _end(*_: object) -> None:
    os._exit(130)  # by the signal's default action a container's first process would not end


def _replace(handler: object, by: Callable[[int, FrameType | None], object]) -> None:
    if signal.getsignal(signal.SIGINT) is handler:
        with contextlib.suppress(ValueError):  # outside of the main thread
            signal.signal(signal.SIGINT, by)
