"""What does not run on the event loop's own time: the one worker thread for torch and the disk, and tasks nobody waits for.

Owns: both, and that a task that fails by a bug is said loudly. Must not know: what the work is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

__all__ = ["Background"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Background:
    """worker: ONE thread; what it is given runs one after the other."""

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._tasks: set[asyncio.Task[None]] = set()

    async def in_worker(self, call: Callable[..., _T], *arguments: object) -> _T:
        """The call's result, or its exception."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, call, *arguments)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it on the event loop beside everything else."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    async def stop(self) -> None:
        """Cancel what still runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("a background task failed", exc_info=error)
