"""The newest status of a run, for everybody who watches. One reads it from the run, however many watch.

A watcher is woken when there is a newer one and takes the newest there is then: who is slow misses some, and holds nobody up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from edit.errors import TransportError
from editpb.run_status import RunStatus

__all__ = ["Feed", "Source"]

Source = Callable[[], AsyncGenerator[RunStatus, None]]  # statuses as they come; TransportError: ask again later
ENDED = "the run has closed the connection"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


class Feed:
    """Follows a source. Used on one event loop.

    Args:
        source: opens the connection to the run.
        sleep: waits for so many seconds.
    """

    def __init__(self, source: Source, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self._source, self._sleep = source, sleep
        self._news = asyncio.Event()
        self.status: RunStatus | None = None
        self.problem = ""  # why nothing newer comes, in words
        self.version = 0  # counts changes
        self.closed = False

    async def follow(self) -> None:
        """Read statuses; go on asking a run that does not answer, or no longer. Raises what else the source raises."""
        pause = _FIRST_PAUSE_S
        while not self.closed:
            problem = ENDED
            try:
                async with aclosing(self._source()) as statuses:
                    async for status in statuses:
                        self.status, self.problem, pause = status, "", _FIRST_PAUSE_S
                        self._changed()
            except TransportError as error:
                problem = str(error)
            if self.problem != problem:
                self.problem = problem
                self._changed()
            await self._sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def newer(self, version: int) -> int:
        """Wait until there is something newer than `version`, or the feed is closed; return the present version."""
        while self.version == version and not self.closed:
            await self._news.wait()
        return self.version

    def close(self) -> None:
        """Let every watcher go."""
        self.closed = True
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()
