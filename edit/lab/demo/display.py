"""Where a demo is shown: a live screen on a terminal, lines of text elsewhere.

Owns: when something is drawn. Must not know: what the picture consists of (see `screen`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live

from edit.lab.demo.screen import Frame, event_line, progress_line, render
from edit.lab.demo.state import DemoState

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "open_display"]

FrameNow = Callable[[int, int], Frame]
"""(rounds, events) to show -> Frame of this moment."""


class Display(Protocol):
    """A context manager that is told to draw several times a second."""

    def __enter__(self) -> Display: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def draw(self, board: DemoState) -> None:
        """FaultSchedule the board as it stands now."""
        ...


class LiveDisplay:
    """Redraws in place, in the caller's thread; shows fewer rounds and events on a low terminal."""

    def __init__(self, console: Console, frame: FrameNow) -> None:
        self._console, self._frame = console, frame
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Display:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def draw(self, board: DemoState) -> None:
        spare = self._console.height - 20 - len(board.peers)  # what the other parts of the screen leave
        rounds = max(2, min(8, spare // 2))
        self._live.update(render(board, self._frame(rounds, max(2, min(8, spare - rounds)))), refresh=True)


class PlainDisplay:
    """Prints every event once, and a progress line each time another twentieth of the outer steps is committed."""

    def __init__(self, console: Console, frame: FrameNow) -> None:
        self._console, self._frame = console, frame
        self._told = 0
        self._next_step = 1

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def draw(self, board: DemoState) -> None:
        frame = self._frame(1, 1)
        for event in board.events[self._told :]:
            self._console.print(event_line(event, frame.started), soft_wrap=True)
        self._told = len(board.events)
        if board.outer_step >= self._next_step:
            self._next_step = board.outer_step + max(1, board.outer_steps // 20)
            self._console.print(progress_line(board, frame), soft_wrap=True, highlight=False)


def open_display(console: Console, frame: FrameNow) -> Display:
    """A live screen where the console is a terminal, else plain lines."""
    return LiveDisplay(console, frame) if console.is_terminal else PlainDisplay(console, frame)
