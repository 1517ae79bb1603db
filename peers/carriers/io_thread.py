"""The one bridge between the main thread (torch) and the one asyncio loop of this process (all I/O).

Owns: the loop's thread, the lock under which shared state changes, the waits of the main thread and their interruption, and a
clean end that cancels every task. Must not know: gRPC, rounds, torch.

Shared state is changed on the loop's thread with `change` and read on the main thread with `read` or inside `wait`; both hold
the lock. Waits sleep in slices, so that a signal handler, which runs between slices, ends them within a quarter of a second.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from edit.errors import LocalProtocolError, TransportError

__all__ = ["SLICE_S", "Interrupted", "IoThread"]

_T = TypeVar("_T")

SLICE_S = 0.25
CLOSE_S = 5.0


class Interrupted(Exception):
    """The main thread's wait was ended by `IoThread.interrupt` (a signal): the process is asked to stop."""


class IoThread:
    """Context manager: the loop runs from __enter__ to __exit__. One main thread calls; one loop thread does the I/O."""

    def __init__(self, name: str = "peer-io") -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._changed = threading.Condition()
        self._interrupted = False
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> IoThread:
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(2 * CLOSE_S)

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run on the loop; the main thread waits for the result when it likes, or cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._open_loop())

    def call(self, coroutine: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
        """Run on the loop and wait for the result. Raises what it raises, TransportError after `timeout` s, Interrupted."""
        future = self.begin(coroutine)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                self._raise_if_stopped()
                done, _ = concurrent.futures.wait([future], timeout=_slice(deadline))
                if done:
                    return future.result()
                if deadline is not None and time.monotonic() >= deadline:
                    raise TransportError(f"no answer within {timeout:g} s")
        finally:
            future.cancel()

    def post(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop's thread, soon; returns at once. Nothing happens once the bridge is closed."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(callback)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a background task. Should it fail, every later wait of the main thread raises its exception."""
        self._open_loop().call_soon_threadsafe(self.start, coroutine)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """As `spawn`, from the loop's own thread."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def change(self, mutate: Callable[[], _T]) -> _T:
        """Change shared state under the lock, then wake the main thread's wait."""
        with self._changed:
            result = mutate()
            self._changed.notify_all()
            return result

    def read(self, look: Callable[[], _T]) -> _T:
        """Look at shared state under the lock."""
        with self._changed:
            return look()

    def wait(self, look: Callable[[], _T | None], timeout: float | None = None) -> _T | None:
        """Wait until `look` (called under the lock, at each change and four times a second) gives a value; None: timed out.

        Raises Interrupted, or the exception of a background task that failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._raise_if_stopped()
                value = look()
                if value is not None or (deadline is not None and time.monotonic() >= deadline):
                    return value
                self._changed.wait(_slice(deadline))

    def interrupt(self) -> None:
        """End the main thread's present and later waits with Interrupted; safe in a signal handler."""
        self._interrupted = True

    def resume(self) -> None:
        """Allow waits again, so that a stopping process can still say goodbye."""
        self._interrupted = False

    @property
    def trouble(self) -> BaseException | None:
        """What ends every wait of the main thread: `interrupt`, or the exception of a background task that failed."""
        return Interrupted("asked to stop") if self._interrupted else self._failure

    def _raise_if_stopped(self) -> None:
        self._open_loop()
        if (trouble := self.trouble) is not None:
            raise trouble

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise LocalProtocolError("the bridge is not open")
        return self._loop

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.change(lambda: self._fail(error))

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _run(self) -> None:
        loop = self._open_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(_cancel_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _slice(deadline: float | None) -> float:
    return SLICE_S if deadline is None else max(0.0, min(SLICE_S, deadline - time.monotonic()))


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_S)
