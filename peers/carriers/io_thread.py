"""The I/O thread: the one asyncio loop of this process, and how the main thread (torch) and the loop exchange state.

- State is changed only on the loop's thread, with `change`; both threads read it under the lock, with `read` or inside `wait`.
- The main thread may call `change`, too: the function then runs on the loop's thread, and the call returns when it has.
- Waits sleep in slices of `SLICE_S`, so that a signal handler, which runs between two slices, ends them within a quarter of a
  second.
- In a process that is forked from this one the loop's thread is not: every call that needs it raises ConfigError there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from edit.errors import ConfigError, EditError, LocalProtocolError, TransportError
from editpb.process_limits import check_limits
from peers.carriers.run_connection import Interrupted

__all__ = ["SLICE_S", "IoThread"]

_T = TypeVar("_T")

SLICE_S = 0.25
_IN_EACH_RANK = "connect in each rank (start the ranks with torchrun)"
CLOSE_S = 5.0  # how long tasks may take to end once they are cancelled


class IoThread:
    """A context manager: the loop runs from __enter__ to __exit__. One main thread calls; the loop's thread does the I/O.

    Raises ConfigError where the system gives too few files or threads.
    """

    def __init__(self, name: str = "peer-io") -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0  # of the process in which the loop runs, or ran
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._changed = threading.Condition()  # its lock guards the shared state; notified after each change
        self._interrupted = False  # set by a signal handler, so without the lock
        self._failure: BaseException | None = None  # of the first background task that failed
        self._tasks: set[asyncio.Task[Any]] = set()  # background tasks; the loop itself holds them only weakly

    def __enter__(self) -> IoThread:
        check_limits()
        self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and os.getpid() == self._pid and self._thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(2 * CLOSE_S)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a connection to a run cannot be copied: {_IN_EACH_RANK}")

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one in which the loop runs."""
        return self._loop is not None and os.getpid() != self._pid

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start `coroutine` on the loop; the main thread may wait for the future's result, or cancel it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop_for(coroutine))

    def call(self, coroutine: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
        """Run `coroutine` on the loop and return its result.

        Raises what it raises, TransportError after `timeout` seconds, Interrupted.
        """
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
        """Run `callback` on the loop's thread, soon, and return at once. Does nothing once it is closed, nor in a fork."""
        if self._loop is not None and not self.forked:
            self._loop.call_soon_threadsafe(callback)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a background task. If it fails, every later wait of the main thread raises its exception."""
        self._loop_for(coroutine).call_soon_threadsafe(self.start, coroutine)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """As `spawn`, from the loop's own thread."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def change(self, mutate: Callable[[], _T]) -> _T:
        """Run `mutate` on the loop's thread, under the lock, then wake the main thread's wait; return its result.

        From the main thread the call blocks until that is done. It must not be called there inside `read` or `wait`.
        """
        if threading.current_thread() is self._thread:
            return self._mutate(mutate)
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._open_loop().call_soon_threadsafe(self._mutate_for, mutate, done)
        return done.result()

    def read(self, look: Callable[[], _T]) -> _T:
        """Return what `look` sees of the shared state, under the lock. It changes nothing."""
        self._refuse_fork()
        with self._changed:
            return look()

    def wait(self, look: Callable[[], _T | None], timeout: float | None = None) -> _T | None:
        """Wait until `look` returns a value; return None after `timeout` seconds.

        `look` is called under the lock, after each change and four times a second; it changes nothing. Raises Interrupted, or
        the exception of a background task that failed.
        """
        self._refuse_fork()
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

    def _mutate(self, mutate: Callable[[], _T]) -> _T:
        with self._changed:
            result = mutate()
            self._changed.notify_all()
            return result

    def _mutate_for(self, mutate: Callable[[], _T], done: concurrent.futures.Future[_T]) -> None:
        try:
            done.set_result(self._mutate(mutate))
        except BaseException as error:
            done.set_exception(error)

    def _raise_if_stopped(self) -> None:
        self._open_loop()
        if (trouble := self.trouble) is not None:
            raise trouble

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            left = "the connection to the run was left: connect again, and train before that `with` ends"
            raise LocalProtocolError(left if self._pid else "the I/O thread does not run")
        self._refuse_fork()
        return self._loop

    def _loop_for(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.AbstractEventLoop:
        try:
            return self._open_loop()
        except EditError:
            coroutine.close()  # else Python says that nobody awaits it
            raise

    def _refuse_fork(self) -> None:
        """Raise ConfigError in a fork: nobody would answer there, nor release the lock that the loop's thread may have held."""
        if self.forked:
            raise ConfigError(f"the connection to the run was made before this process was forked: {_IN_EACH_RANK}")

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._mutate(lambda: self._fail(error))

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
