"""Shows a run: a live screen on a terminal, lines of text elsewhere. `edit.view.screen` renders it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live

from edit.view.screen import Frame, event_line, progress_line, render
from edit.view.state import RunState

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "open_display"]

FrameNow = Callable[[int, int], Frame]
"""(number of rounds, number of events) to show -> the Frame of this moment."""


class Display(Protocol):
    """A context manager whose `draw` is called several times a second."""

    def __enter__(self) -> Display: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def draw(self, state: RunState) -> None:
        """Show the present state."""
        ...


class LiveDisplay:
    """Redraw in place, in the caller's thread, with fewer rounds and events on a low terminal."""

    def __init__(self, console: Console, frame: FrameNow) -> None:
        self._console, self._frame = console, frame
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Display:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def draw(self, state: RunState) -> None:
        spare = self._console.height - 20 - len(state.peers)  # rows that the rest of the screen leaves
        rounds = max(2, min(8, spare // 2))
        self._live.update(render(state, self._frame(rounds, max(2, min(8, spare - rounds)))), refresh=True)


class PlainDisplay:
    """Print every event once, and a progress line after every twentieth of the outer steps."""

    def __init__(self, console: Console, frame: FrameNow) -> None:
        self._console, self._frame = console, frame
        self._printed = 0
        self._next_step = 1

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def draw(self, state: RunState) -> None:
        frame = self._frame(1, 1)
        for event in state.events[max(0, self._printed - state.forgotten) :]:
            self._console.print(event_line(event, frame.started), soft_wrap=True)
        self._printed = state.forgotten + len(state.events)
        if state.outer_step >= self._next_step:
            self._next_step = state.outer_step + max(1, state.outer_steps // 20)
            self._console.print(progress_line(state, frame), soft_wrap=True, highlight=False, markup=False)


def open_display(console: Console, frame: FrameNow) -> Display:
    """Return a live screen where the console is a terminal, else plain lines."""
    return LiveDisplay(console, frame) if console.is_terminal else PlainDisplay(console, frame)
