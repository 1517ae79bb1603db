"""A bad network link: a TCP proxy on loopback with a bounded rate in each direction and a latency. It can be cut, silenced or
made to reset connections.

TLS passes through unchanged. All connections through one link share its rate, as they would share a cable, in pieces so small
that a heartbeat waits for a few of them and not for a whole transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

__all__ = ["Link", "LinkShape", "Rate"]

PIECE_BYTES = 8192
BURST_S = 0.05
_QUEUE = 64  # pieces on the way per connection and direction: enough that the latency does not limit the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """Rates and latency of a link."""

    up_bits_per_s: float = 0.0  # towards the target; 0: no bound
    down_bits_per_s: float = 0.0  # from the target; 0: no bound
    latency_s: float = 0.0  # one way


class Rate:
    """A token bucket that computes departure times. Sans-IO. bits_per_s: 0 for no bound.

    It holds what BURST_S seconds carry, so that a sender that is a little late with its next piece still gets the full rate.
    """

    def __init__(self, bits_per_s: float) -> None:
        self._bits_per_s = bits_per_s
        self._free_at = -math.inf

    def departs(self, size: int, now: float) -> float:
        """Return when the last bit of `size` bytes, offered at `now` (seconds), has left; `now` at the earliest."""
        if self._bits_per_s <= 0:
            return now
        self._free_at = max(self._free_at, now - BURST_S) + 8 * size / self._bits_per_s
        return max(self._free_at, now)


class Link:
    """Context manager: listen on a free loopback port (`port`) and forward connections to `target` until exit.

    It runs in a thread of its own, beside whatever a script measures.
    """

    def __init__(self, target: tuple[str, int], shape: LinkShape) -> None:
        self._target, self._shape = target, shape
        self._rates = Rate(shape.up_bits_per_s), Rate(shape.down_bits_per_s)
        self._cut = False
        self._loss = 0.0
        self._chance = random.Random(0)
        self._forwarding = asyncio.Event()
        self._forwarding.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._server: asyncio.Server | None = None
        self.carried_bytes = [0, 0]  # up, down

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def port(self) -> int:
        """The port to connect to."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """Close every connection and refuse new ones until `repair`."""
        self._cut = True
        self._run(self._drop())

    def silence(self) -> None:
        """Forward nothing until `repair`, as a network that loses every packet: no connection is closed, none is accepted."""
        self._loop.call_soon_threadsafe(self._forwarding.clear)

    def lossy(self, loss: float, seed: int) -> None:
        """Until `repair`, let each piece of data reset its connection with this probability."""
        self._loss, self._chance = loss, random.Random(seed)

    def reshape(self, shape: LinkShape) -> None:
        """Set another rate and latency, also for open connections."""
        self._shape = shape
        self._rates = Rate(shape.up_bits_per_s), Rate(shape.down_bits_per_s)

    def repair(self) -> None:
        """Forward again; what was held back while silent arrives. The shape is unchanged."""
        self._cut, self._loss = False, 0.0
        self._loop.call_soon_threadsafe(self._forwarding.set)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._drop()

    async def _drop(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if not self._cut:
                await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one end closed, or the link was cut: the other end is closed below
        finally:
            self._connections.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._forwarding.wait()
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        try:
            await asyncio.gather(self._pass(0, reader, far_writer), self._pass(1, far_reader, writer))
        finally:
            far_writer.close()

    async def _pass(self, way: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction of one connection until it ends, and forward its end."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE)
        delivering = self._loop.create_task(self._deliver(queue, writer))
        try:
            while data := await reader.read(PIECE_BYTES):
                if self._chance.random() < self._loss:
                    writer.transport.abort()
                    raise ConnectionResetError("lost on purpose")
                self.carried_bytes[way] += len(data)
                departs = self._rates[way].departs(len(data), self._loop.time())
                await asyncio.sleep(max(0.0, departs - self._loop.time()))
                await queue.put((departs + self._shape.latency_s, data))
            await queue.put((0.0, b""))
            await delivering
        finally:
            delivering.cancel()

    async def _deliver(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            arrives, data = await queue.get()
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            await asyncio.sleep(max(0.0, arrives - self._loop.time()))
            await self._forwarding.wait()
            writer.write(data)
            await writer.drain()
