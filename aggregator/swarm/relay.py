"""A relay for members of a swarm that nobody can dial: a machine that can be reached passes bytes on, and cannot read them.

A member keeps a connection to the relay, mutual TLS under the run's authority: so the relay knows who it is. Whoever wants
that member dials the relay, and the first message of its TLS names, in the clear, whom it wants (SNI, RFC 6066; a hash, see
`Identity.server_name`). The relay asks that member to dial back, and joins the two connections: the TLS of the member's host
runs through both, from end to end. Who dials notices nothing: the relay's address is the member's.

    the first bytes are ...
    TLS for the relay         a member's own connection: "edit-relay 1", then "ping" now and then; it is told "open TOKEN",
                              or at once "moved": of two keys for one name, the one whose certificate was issued later counts
    TLS for a member          held until that member has dialled back, then passed on, beginning with these bytes
    BACK and a token          a member that dials back
    anything else             closed

It passes on to members that are connected to it, and to nothing else; it has no key but its own, no model, and no say. Bounds:
connections in all and for one member, undecided ones in all and from one address, seconds until each has said what it is. What
waits is 64 KiB each way of each connection; who does not read is not sent more.

Why not libp2p's circuit relay, which hivemind's p2pd has: it got no reservation in 45 s with one
trusted relay, ends each circuit after 30 minutes or 4 GiB, serves every stranger, and runs on Linux x86-64 alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509

from aggregator.security.certificates import public_hash
from edit.errors import ConfigError, EditError, RefusedError
from edit.plain_text import quoted
from editpb.identity import Identity, from_certificate
from editpb.process_limits import check_limits, raise_file_limit

__all__ = [
    "BACK",
    "HELLO",
    "HELLO_S",
    "MOST_OF_MEMBER",
    "MOVED",
    "PING_S",
    "SILENT_S",
    "TOKEN_BYTES",
    "Relay",
    "keep_alive",
    "relay_context",
    "relay_identity",
    "serve_relay",
    "splice",
]

_log = logging.getLogger(__name__)
HELLO, READY, MOVED = b"edit-relay 1\n", b"ready\n", b"moved\n"
BACK, TOKEN_BYTES = b"editback", 32
HELLO_S = 10.0  # within which a connection says what it is, and a member dials back
PING_S, SILENT_S = 15.0, 45.0  # between two pings of a member; without one for so long it is gone
HALF_CLOSED_S = 60.0  # until the other side ends, too
PEEK_S = 0.02  # between two looks at what came so far
MOST_HELLO = 1 << 14  # bytes of the first message of TLS
MOST_LINE = 256
MOST_OF_MEMBER = 512  # connections to one member: its peers, their ranks, its operators
MOST_CONNECTIONS = 4096  # to all
MOST_UNDECIDED, MOST_UNDECIDED_FROM = 512, 64  # connections that have not said what they are; from one address
CHUNK_BYTES = 1 << 16
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def relay_identity(run_id: str) -> Identity:
    """Return whom a relay's certificate names: with this role it may serve as a relay, and nothing else."""
    return Identity(run_id, "relay", "relay")


def server_name_of(hello: bytes) -> str | None:
    """Return the server name in a ClientHello (RFC 8446, 4.1.2), '' without one; None while bytes of it are missing.

    Raises RefusedError for anything else.
    """
    if hello[:1] != b"\x16"[: len(hello)]:
        raise RefusedError("no TLS")
    if len(hello) < 5:
        return None
    length = int.from_bytes(hello[3:5], "big")
    if length > MOST_HELLO - 5:
        raise RefusedError(f"a first message of {length} bytes")
    if len(hello) < 5 + length:
        return None
    try:
        return _server_name(_Bytes(hello[5 : 5 + length]))
    except (IndexError, UnicodeDecodeError):
        raise RefusedError("a damaged first message of TLS") from None


class _Bytes:
    """Bytes that are taken from the front. Raises IndexError when there are too few."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        if count > len(self.data):
            raise IndexError
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def vector(self, width: int) -> bytes:
        """Take what has its length before it, in so many bytes."""
        return self.take(int.from_bytes(self.take(width), "big"))


def _server_name(message: _Bytes) -> str:
    if message.take(1) != b"\x01":
        raise RefusedError("TLS that does not begin with a ClientHello")
    body = _Bytes(message.vector(3))
    body.take(2 + 32)  # version, random
    for width in (1, 2, 1):  # session, cipher suites, compression
        body.vector(width)
    extensions = _Bytes(body.vector(2))
    while extensions.data:
        kind, content = extensions.take(2), _Bytes(extensions.vector(2))
        if kind == b"\x00\x00":
            names = _Bytes(content.vector(2))
            if names.take(1) != b"\x00":
                raise RefusedError("a server name of an unknown kind")
            return names.vector(2).decode("ascii").lower()
    return ""


async def splice(one: Ends, other: Ends) -> None:
    """Pass on what comes from either to the other, until both have ended, or one breaks. Both are closed then."""
    copies = [asyncio.ensure_future(_copy(one[0], other[1])), asyncio.ensure_future(_copy(other[0], one[1]))]
    try:
        done, _ = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        if not any(each.exception() for each in done):
            await asyncio.wait(copies, timeout=HALF_CLOSED_S)
    finally:
        for each in copies:
            each.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        for _, writer in (one, other):
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def keep_alive(sock: socket.socket) -> None:
    """Notice a peer that is gone; send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


@dataclass(slots=True)
class _Registered:
    """A member that is connected."""

    peer_id: str
    writer: asyncio.StreamWriter
    replaced: asyncio.Event = field(default_factory=asyncio.Event)  # by a later connection of the same member
    streams: int = 0


class Relay:
    """See above. `start` it, and `close` it. Used on the event loop.

    Args:
        run_id: of the run whose members it serves.
        context: its own certificate, and the run's authority, which callers must be of.
    """

    def __init__(self, run_id: str, context: ssl.SSLContext) -> None:
        self._run_id, self._context = run_id, context
        self._own = relay_identity(run_id).server_name
        self._members: dict[str, _Registered] = {}  # by server name
        # By server name, of the latest certificate: its date and number, and its key.
        self._issued: dict[str, tuple[tuple[float, int], str]] = {}
        self._awaited: dict[bytes, asyncio.Future[Ends]] = {}  # who dials back, by token
        self._undecided: Counter[str] = Counter()  # connections, by address
        self._streams = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self.listen = ""  # HOST:PORT, once bound

    @property
    def members(self) -> frozenset[str]:
        """Who is connected, by peer_id."""
        return frozenset(each.peer_id for each in self._members.values())

    async def start(self, listen: str) -> None:
        """Bind HOST:PORT, and serve. Raises ConfigError."""
        host, _, port = listen.rpartition(":")
        try:
            family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
            host.encode("idna")  # a name that no host can have: create_server would raise TypeError, and leave its socket open
            self._listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=256)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"--listen {listen}: cannot be bound ({error})") from error
        self._listener.setblocking(False)
        self.listen = f"{host}:{self._listener.getsockname()[1]}"
        self._spawn(self._accept(self._listener))

    async def close(self) -> None:
        """End all connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def _spawn(self, work: Coroutine[Any, Any, None], sock: socket.socket | None = None) -> None:
        """Run this, and close the socket then: also when it is cancelled before it has begun."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if sock is not None:
            task.add_done_callback(lambda _: sock.close())

    # -- a connection ------------------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await _readable(listener)  # rather than `sock_accept`, which loses a connection when it is cancelled as one comes
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # who called has left
                continue
            except OSError as error:  # no file is free: others end soon
                _log.warning("no connection can be taken now: %s", error)
                await asyncio.sleep(1.0)
                continue
            sock.setblocking(False)
            self._spawn(self._take(sock, str(address[0])), sock)

    async def _take(self, sock: socket.socket, address: str) -> None:
        try:
            with self._is_undecided(address):
                keep_alive(sock)
                async with asyncio.timeout(HELLO_S):
                    first = await _first(sock)
                name = "" if first.startswith(BACK) else server_name_of(first)
                joined = await self._joined(sock) if name == self._own else None
            if joined is not None:
                await self._serve_member(*joined, address)
            elif first.startswith(BACK):
                await self._dialled_back(sock)
            elif (member := self._members.get(name or "")) is not None:
                await self._pass_on(sock, member)
        except EditError as error:
            _log.debug("%s: %s", address, error)
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            _log.debug("%s: %s %s", address, type(error).__name__, error)

    @contextmanager
    def _is_undecided(self, address: str) -> Iterator[None]:
        if self._undecided[address] >= MOST_UNDECIDED_FROM or self._undecided.total() >= MOST_UNDECIDED:
            raise RefusedError("too many connections that have not said what they are")
        self._undecided[address] += 1
        try:
            yield
        finally:
            self._undecided -= Counter((address,))  # drops what is 0

    async def _joined(self, sock: socket.socket) -> tuple[Identity, Ends]:
        """Return a member that has shown its certificate, and said its first word."""
        async with asyncio.timeout(HELLO_S):
            reader, writer = await _opened(sock, self._context)
            try:
                identity = self._identity(writer)
                if await reader.readline() != HELLO:
                    raise RefusedError("no member of this version")
            except BaseException:
                writer.transport.abort()
                raise
        return identity, (reader, writer)

    async def _serve_member(self, identity: Identity, ends: Ends, address: str) -> None:
        (reader, writer), name = ends, identity.server_name
        if self._is_earlier(name, _certificate(writer)):
            _log.info("%s has another machine now: an earlier one called, from %s", identity.peer_id, address)
            await _say_last(writer, MOVED)
            return
        if (before := self._members.get(name)) is not None:
            before.replaced.set()
        member = self._members[name] = _Registered(identity.peer_id, writer)
        try:
            writer.write(READY)
            _log.info("%s is connected, from %s", identity.peer_id, address)
            await self._listen(reader, member)
        finally:
            if self._members.get(name) is member:
                del self._members[name]
                _log.info("%s is not connected any more", member.peer_id)
            writer.transport.abort()

    def _identity(self, writer: asyncio.StreamWriter) -> Identity:
        identity = from_certificate(_certificate(writer))
        if (identity.run_id, identity.role) != (self._run_id, "peer"):
            raise RefusedError(f"{identity.uri} is no member of {self._run_id}")
        return identity

    def _is_earlier(self, name: str, certificate: x509.Certificate) -> bool:
        """Return whether the name was certified later for another key: another machine is that member. Remember the latest."""
        order = certificate.not_valid_before_utc.timestamp(), certificate.serial_number
        shown = order, public_hash(certificate)
        latest = self._issued[name] = max(shown, self._issued.get(name, shown))
        return shown[1] != latest[1]

    async def _listen(self, reader: asyncio.StreamReader, member: _Registered) -> None:
        """Take pings until there are none, or the member has another connection."""
        replaced = asyncio.ensure_future(member.replaced.wait())
        try:
            while not replaced.done():
                line = asyncio.ensure_future(reader.readline())
                try:
                    await asyncio.wait([line, replaced], timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
                    if not line.done() or line.result() != b"ping\n":
                        return
                finally:
                    line.cancel()
                member.writer.write(b"pong\n")
                async with asyncio.timeout(HELLO_S):
                    await member.writer.drain()
        finally:
            replaced.cancel()

    async def _pass_on(self, sock: socket.socket, member: _Registered) -> None:
        if member.streams >= MOST_OF_MEMBER or self._streams >= MOST_CONNECTIONS:
            raise RefusedError(f"{member.peer_id} has {member.streams} connections, all have {self._streams}")
        if member.writer.transport.get_write_buffer_size() > CHUNK_BYTES:
            raise RefusedError(f"{member.peer_id} does not read")
        token, back = secrets.token_bytes(TOKEN_BYTES), asyncio.get_running_loop().create_future()
        member.streams += 1
        self._streams += 1
        self._awaited[token] = back
        try:
            member.writer.write(b"open %s\n" % token.hex().encode())
            async with asyncio.timeout(HELLO_S):
                there = await back
            await splice(await _opened(sock), there)
        finally:
            del self._awaited[token]
            if back.done() and not back.cancelled():
                back.result()[1].transport.abort()
            member.streams -= 1
            self._streams -= 1

    async def _dialled_back(self, sock: socket.socket) -> None:
        reader, writer = await _opened(sock)
        try:
            token = (await reader.readexactly(len(BACK) + TOKEN_BYTES))[len(BACK) :]  # it is there: see `_first`
        except BaseException:
            writer.transport.abort()
            raise
        waiting = self._awaited.get(token)
        if waiting is None or waiting.done():
            writer.transport.abort()
            return
        waiting.set_result((reader, writer))
        await writer.wait_closed()


def _certificate(writer: asyncio.StreamWriter) -> x509.Certificate:
    """Return what the other end of a TLS connection has shown."""
    return x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))


async def _say_last(writer: asyncio.StreamWriter, line: bytes) -> None:
    """Write a line, and close the connection."""
    try:
        writer.write(line)
        writer.close()
        async with asyncio.timeout(HELLO_S):
            await writer.wait_closed()
    finally:
        writer.transport.abort()


async def _first(sock: socket.socket) -> bytes:
    """Return the first bytes of a connection, once they say what it is, and leave them there. Raises EOFError, RefusedError."""
    while True:
        await _readable(sock)
        found = sock.recv(MOST_HELLO, socket.MSG_PEEK)
        if not found:
            raise EOFError("nothing came")
        if found[: len(BACK)] == BACK[: len(found)]:
            if len(found) >= len(BACK) + TOKEN_BYTES:
                return found
        elif server_name_of(found) is not None:
            return found
        await asyncio.sleep(PEEK_S)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    loop.add_reader(sock, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(sock)


async def _opened(sock: socket.socket, context: ssl.SSLContext | None = None) -> Ends:
    """Return the two ends of a connection that was accepted. context: to serve TLS."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(CHUNK_BYTES if context is None else MOST_LINE)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock.dup(), ssl=context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


# -- as a process ----------------------------------------------------------------------------------------------------------


def relay_context(folder: Path) -> tuple[str, ssl.SSLContext]:
    """Return the run of a relay's folder, and how it serves TLS. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(folder / "relay.pem", folder / "relay.key")
        context.load_verify_locations(folder / "ca.pem")
        identity = from_certificate(x509.load_pem_x509_certificate((folder / "relay.pem").read_bytes()))
    except (OSError, ValueError, RefusedError) as error:  # ssl.SSLError is an OSError
        made_with = f"edit-peer swarm make-relay {quoted(folder)} --home FOLDER"
        raise ConfigError(f"{folder}: is no relay's folder ({error}); make it with: {made_with}") from error
    return identity.run_id, context


async def serve_relay(folder: Path, listen: str) -> None:
    """Be a relay until SIGINT or SIGTERM. Raises ConfigError."""
    run_id, context = relay_context(folder)
    raise_file_limit()
    check_limits()
    relay, stop, loop = Relay(run_id, context), asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await relay.start(listen)
    try:
        _log.info("the relay of %s listens on %s", run_id, relay.listen)
        with contextlib.suppress(BrokenPipeError):
            print(relay.listen, flush=True)  # noqa: T201
        await stop.wait()
    finally:
        await relay.close()
