"""A bad network link: a TCP proxy on loopback with a bounded rate in each direction and a latency. It can be cut, silenced or
made to reset connections.

TLS passes through unchanged. All connections through one link share its rate and the queue in front of it, as they would share
a router: what one connection has put in there, the bytes of the others wait behind. A link takes nothing more while its queue
is full; then bytes stay in the kernel's socket buffers of the connection that they belong to.

Bytes are forwarded by time stamps: a latency holds back as many as the rate carries in that time, so HTTP/2 sees the link's
whole bandwidth-delay product. TCP does not: the proxy's kernel acknowledges at once, so TCP's own windows, and its reaction to
losses, are not what is measured here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

__all__ = ["Link", "LinkShape", "Rate"]

PIECE_BYTES = 8192  # the least that is read at a time; a loss is per so many bytes
BURST_S = 0.05
_LARGEST_PIECE_BYTES = 256 << 10
_PIECE_S = 1e-3  # what the rate carries in so long is read at a time: timers are no finer
_UNREAD_BYTES = 4 << 20  # that have arrived on one connection and direction, and are not taken: then no more is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """Rates and latency of a link, and the queue in front of each direction."""

    up_bits_per_s: float = 0.0  # towards the target; 0: no bound
    down_bits_per_s: float = 0.0  # from the target; 0: no bound
    latency_s: float = 0.0  # one way
    queue_bytes: int = 0  # that a direction takes ahead of its rate; 0: one piece of each connection


class Rate:
    """A token bucket that computes departure times, and a queue in front of it. Sans-IO.

    It holds what BURST_S seconds carry, so that a sender that is a little late with its next piece still gets the full rate.

    Args:
        bits_per_s: 0 for no bound.
        queue_bytes: taken ahead of their departure, beside the last piece.
    """

    def __init__(self, bits_per_s: float, queue_bytes: int = 0) -> None:
        self._bits_per_s = bits_per_s
        self._queue_bytes = queue_bytes
        self._free_at = -math.inf

    @property
    def piece_bytes(self) -> int:
        """How many bytes to offer at a time."""
        if self._bits_per_s <= 0:
            return _LARGEST_PIECE_BYTES
        return int(min(_LARGEST_PIECE_BYTES, max(PIECE_BYTES, self._bits_per_s * _PIECE_S / 8)))

    def has_room(self) -> float:
        """Return when there is room in the queue for what comes after all that was offered."""
        return self._free_at - 8 * self._queue_bytes / self._bits_per_s if self._bits_per_s > 0 else -math.inf

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
        self._rates = _rates(shape)
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
        self._server = self._run(asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_LARGEST_PIECE_BYTES))
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

    def route(self, target: tuple[str, int]) -> None:
        """Forward to another target from now on, and close every connection to the one before."""
        self._target = target
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
        self._rates = _rates(shape)

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
        far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_LARGEST_PIECE_BYTES)
        try:
            async with asyncio.TaskGroup() as ways:  # where one breaks, the connection is gone, and so the other
                ways.create_task(self._pass(0, reader, far_writer))
                ways.create_task(self._pass(1, far_reader, writer))
        except* OSError:
            pass
        finally:
            far_writer.close()

    async def _pass(self, way: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction of one connection until it ends, and forward its end."""
        arriving = _Arriving()
        delivering = self._loop.create_task(self._deliver(arriving, writer))
        try:
            while data := await reader.read(self._rates[way].piece_bytes):
                if self._loss and self._chance.random() >= (1 - self._loss) ** math.ceil(len(data) / PIECE_BYTES):
                    writer.transport.abort()
                    raise ConnectionResetError("lost on purpose")
                self.carried_bytes[way] += len(data)
                rate = self._rates[way]
                departs = rate.departs(len(data), self._loop.time())
                arriving.put(departs + self._shape.latency_s, data)
                await self._until(rate.has_room())
                await arriving.taken(self._loop.time())
            arriving.put(0.0, b"")
            await delivering
        finally:
            delivering.cancel()
            await asyncio.wait([delivering])

    async def _deliver(self, arriving: _Arriving, writer: asyncio.StreamWriter) -> None:
        while True:
            arrives, data = await arriving.first()
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            await self._until(arrives)
            if not self._forwarding.is_set():
                await self._forwarding.wait()
            writer.write(data)
            await writer.drain()
            arriving.drop_first()

    async def _until(self, time_s: float) -> None:
        if (wait_s := time_s - self._loop.time()) > 0:
            await asyncio.sleep(wait_s)


def _rates(shape: LinkShape) -> tuple[Rate, Rate]:
    return Rate(shape.up_bits_per_s, shape.queue_bytes), Rate(shape.down_bits_per_s, shape.queue_bytes)


class _Arriving:
    """What is on the way on one connection and direction, in order. The rate bounds what the latency holds in here."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()  # when each arrives
        self._news, self._room = asyncio.Event(), asyncio.Event()

    def put(self, arrives: float, data: bytes) -> None:
        self._pieces.append((arrives, data))
        self._news.set()

    async def first(self) -> tuple[float, bytes]:
        """Return the next piece, and when it arrives; it stays until `drop_first`."""
        while not self._pieces:
            self._news.clear()
            await self._news.wait()
        return self._pieces[0]

    def drop_first(self) -> None:
        self._pieces.popleft()
        self._room.set()

    async def taken(self, now: float) -> None:
        """Wait while more than `_UNREAD_BYTES` have arrived by `now` and are not taken."""
        while self._arrived_bytes(now) > _UNREAD_BYTES:
            self._room.clear()
            await self._room.wait()

    def _arrived_bytes(self, now: float) -> int:
        total = 0
        for arrives, data in self._pieces:
            if arrives > now or total > _UNREAD_BYTES:
                break
            total += len(data)
        return total
