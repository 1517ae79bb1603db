"""`watch`: a run's statuses as they come, on a live screen, or as lines where the output is no terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from rich.console import Console

from edit.errors import BusyError, TransportError
from edit.plain_text import printable
from edit.view.display import open_display
from edit.view.screen import Frame
from edit.view.state import RunState
from editpb.run_status import RunStatus

__all__ = ["Source", "show"]

Source = Callable[[], AsyncGenerator[RunStatus, None]]
_PAUSE_S = 2.0


async def show(
    source: Source,
    console: Console,
    unix: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> RunStatus | None:
    """Show a run until it has finished, or took its last outer step and does not answer any more; return its last status.

    Args:
        source: connects, and yields statuses; asked again where the run stops to answer once it has.
        unix: seconds since 1970.
        sleep: waits for so many seconds.

    Raises what the source raises, but for a TransportError after the first status.
    """
    status: RunStatus | None = None
    problem, started = "", unix()

    def frame(rounds: int, events: int) -> Frame:
        run_id = printable(status.run_id) if status is not None else ""
        return Frame(
            run_id=run_id,
            started=started,
            now=unix(),
            rounds=rounds,
            events=events,
            problem=printable(problem),
            width=console.width,
            swarm=status is not None and status.council is not None,
        )

    with open_display(console, frame) as display:
        while True:
            try:
                async with aclosing(source()) as statuses:
                    async for status in statuses:
                        problem = ""
                        started = min([status.t, *(each.t for each in status.events), *(each.t for each in status.rounds)])
                        display.draw(RunState.of(status))
                        if status.phase == "finished":
                            return status
                problem = "the run ended the connection; trying again"
            except (TransportError, BusyError) as error:
                if status is None:
                    raise
                problem = f"{error}; trying again"
                if status.at_its_end and isinstance(error, TransportError):
                    status, problem = replace(status, phase="finished", waiting_for=""), ""
                    display.draw(RunState.of(status))
                    return status
            if status is not None:
                display.draw(RunState.of(status))
            await sleep(_PAUSE_S)
