"""An HTTP proxy that knows CONNECT and nothing else, as a site has that lets no other connection out."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.loops import WAIT_S

_HEAD_BYTES = 1 << 14
_PIECE_BYTES = 1 << 16


@dataclass
class ConnectProxy:
    """See above."""

    user: str = ""  # NAME:PASSWORD that callers must say; '': anybody may
    refuses: str = ""  # what it answers to all, e.g. 403 Forbidden
    leads: dict[str, str] = field(default_factory=dict)  # hosts that nobody else knows, and where they are
    port: int = 0
    asked: list[str] = field(default_factory=list)  # HOST:PORT of each CONNECT
    carried: int = 0  # bytes through it, both ways
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # asyncio would log it
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        self.asked.append(target)
        expected = f"Basic {base64.b64encode(self.user.encode()).decode()}"
        answer = "405 Method Not Allowed" if method != "CONNECT" else self.refuses
        if self.user and headers.get("proxy-authorization") != expected:
            answer = "407 Proxy Authentication Required"
        if answer:
            writer.write(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
            return
        host, _, port = target.rpartition(":")
        to_reader, to_writer = await asyncio.open_connection(self.leads.get(host, host).strip("[]"), int(port))
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(self._carry(reader, to_writer), self._carry(to_reader, writer))
        finally:
            to_writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            self.carried += len(piece)
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def end(self) -> None:
        """Cut all connections."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def connect_proxy(**options: Any) -> AsyncIterator[ConnectProxy]:
    """Serve one on 127.0.0.1."""
    proxy = ConnectProxy(**options)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=_HEAD_BYTES)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()


@contextmanager
def proxy_in_a_thread(**options: Any) -> Iterator[ConnectProxy]:
    """The same, beside a test that blocks."""
    ready: Future[tuple[ConnectProxy, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with connect_proxy(**options) as proxy:
            stop = asyncio.Event()
            ready.set_result((proxy, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    proxy, loop, stop = ready.result(timeout=WAIT_S)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=WAIT_S)
