"""A real coordinator on a loop of its own thread, while the test's thread plays the peers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from aggregator.control.run import Run
from aggregator.resources import Clock
from aggregator.storage.state_folder import StateFolder
from edit.worker.worker import EditWorker
from tests.support.served import Served, served

WAIT_S = 30.0


@dataclass(frozen=True)
class Running:
    """A coordinator that is served in another thread."""

    served: Served
    loop: asyncio.AbstractEventLoop

    @property
    def run(self) -> Run:
        return self.served.coordinator.run

    def tell(self, call: Callable[[Run], None]) -> None:
        """Call this with the run on its loop's thread; return when it is done."""

        async def on_loop() -> None:
            call(self.run)

        asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(timeout=WAIT_S)

    def await_(self, condition: Callable[[Run], object]) -> None:
        """Wait until `condition` is true, as the loop's thread sees it."""

        async def on_loop() -> bool:
            return bool(condition(self.run))

        deadline = time.monotonic() + WAIT_S
        while not asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(timeout=WAIT_S):
            assert time.monotonic() < deadline, "the condition never became true"


def enter_together(stack: ExitStack, workers: Sequence[EditWorker]) -> None:
    """Enter workers in a run whose first round waits for all of them, each in a thread; the stack leaves them."""
    with ThreadPoolExecutor(len(workers)) as pool:
        entering = [pool.submit(worker.__enter__) for worker in workers]
    for future, worker in zip(entering, workers, strict=True):
        future.result()
        stack.push(worker)


@contextmanager
def running(folder: StateFolder, clock: Clock | None = None) -> Iterator[Running]:
    """Serve the folder's run in a thread. clock: as for `served`."""
    ready: Future[tuple[Running, asyncio.Event]] = Future()

    async def serve() -> None:
        async with served(folder, clock) as run:
            stop = asyncio.Event()
            ready.set_result((Running(run, asyncio.get_running_loop()), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    here, stop = ready.result(timeout=WAIT_S)
    try:
        yield here
    finally:
        here.loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=WAIT_S)


def address(folder: StateFolder) -> str:
    """Where a running coordinator listens."""
    return str(json.loads(folder.addresses.read_text())["listen"])
