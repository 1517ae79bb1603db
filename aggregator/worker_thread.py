"""What runs beside the event loop's callers: the one worker thread for torch and the disk, threads that only compute, tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

from edit.errors import ConfigError, FormatError, LocalProtocolError, StorageError, TransportError

__all__ = ["Background"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Item = TypeVar("_Item")
_NO_BUGS = (ConfigError, StorageError, FormatError)  # of settings, a disk or a file: said in one line, without a traceback


class Background:
    """The worker thread and the background tasks of one process.

    A background task handles the errors that it can handle. Any other exception is a bug that leaves the run in an unknown
    state, or a disk or settings that do not let it go on: `failure` holds it, a bug is logged with its traceback, and `watch`
    raises, which ends the process. A restart recovers what is committed.

    Args:
        worker: one thread; it runs what it is given one after the other.
        failed: is told of a bug, too.
    """

    def __init__(self, worker: Executor, failed: Callable[[BaseException], None] = lambda _: None) -> None:
        self.failure: BaseException | None = None
        self._worker, self._told = worker, failed
        self._pool: Executor | None = None
        self._computing: set[asyncio.Future[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self._stopped = False
        self._ended = ""  # why the worker takes no more calls

    async def in_worker(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Run the call in the worker thread; return its result or raise its exception. TransportError after `end`."""
        if self._ended:
            raise TransportError(self._ended)
        return await asyncio.get_running_loop().run_in_executor(self._worker, call, *arguments)

    def compute_with(self, pool: Executor) -> None:
        """Compute in these threads, too; else the worker thread computes everything."""
        self._pool = pool

    async def compute(self, call: Callable[..., _T], *arguments: object) -> _T:
        """As `in_worker`, of a call that others may run beside: with more threads several do, and the worker thread too."""
        if self._pool is None:
            return await self.in_worker(call, *arguments)
        running = asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)
        self._computing.add(running)
        running.add_done_callback(self._computing.discard)
        return await running

    async def computed(self) -> None:
        """Wait until no call of `compute` runs that has begun before."""
        if self._computing:
            await asyncio.wait(tuple(self._computing))

    def each(self, call: Callable[[_Item], _T], items: Iterable[_Item]) -> Iterator[_T]:
        """Return the results in order, for the worker thread: with more threads several are computed at a time."""
        return map(call, items) if self._pool is None else self._pool.map(call, items)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine as a background task on the event loop; after `stop` never."""
        if self._stopped:
            coroutine.close()
            return
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def fail(self, error: BaseException) -> None:
        """Report what ends this process. The first one is kept, and a bug is logged."""
        if self.failure is None:
            if not isinstance(error, _NO_BUGS):
                _log.critical("a background task failed", exc_info=error)
            self.failure = error
            self._failed.set()
            self._told(error)

    async def watch(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set. Raises as soon as a background task has failed: its own error, or, of a bug,
        LocalProtocolError."""
        waiting = [asyncio.ensure_future(event.wait()) for event in (stop, self._failed)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if isinstance(error := self.failure, _NO_BUGS):
            raise error
        if error is not None:
            raise LocalProtocolError(
                f"a background task failed ({type(error).__name__}: {error}); the log has the traceback"
            ) from error

    async def stop(self) -> None:
        """Cancel the background tasks that still run. No other begins."""
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def end(self, reason: str) -> None:
        """Take no more calls of the worker thread, which is about to shut down: who makes one nevertheless is told why."""
        self._ended = reason

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
