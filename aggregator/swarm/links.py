"""The streams between hosts: who is connected, what is on its way, who is dialled.

One stream of council messages for each pair, which either side opens; while both do at once, there are two for a while. Whom a
host reaches it dials until there is a stream: at once, then after REDIAL_S. What is to be sent waits in a queue of MOST_WAITING
messages, the oldest of which is dropped: whatever matters is said again. A stream that is not read for STALL_S ends. What comes
is taken one message after the other, so a sender waits for a host that is slow.

The sender of a message is the peer of its certificate, in the life that it said at first. A host that is dialled proves its key
besides (`editpb.introductions`): a name may have been enrolled again, and the machine before may answer in its place.
Bytes are fetched only from members that there is a stream to.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import grpc
from cryptography import x509

from aggregator.security.certificates import public_hash
from edit.council.events import Message
from edit.council.record import name_of
from edit.errors import EditError, RefusedError, RemoteProtocolError, StaleError, TransportError
from edit.trust.signatures import Signer, key_hash
from editpb import council_pb2 as pb
from editpb.council_messages import NONCE_BYTES, Introduction, Told, Word, message_from_pb, message_to_pb
from editpb.identity import Identity
from editpb.introductions import check_proof, proven
from editpb.messages import PROTOCOL
from editpb.transport.channel_options import CONNECT_MS, channel_options, connect_ms
from editpb.transport.chunk_frames import council_stub
from editpb.transport.status import from_rpc, swarm_refusal

__all__ = ["Links", "Listener", "Stream"]

_log = logging.getLogger(__name__)
MOST_WAITING = 64  # messages to one member
INTRODUCE_S = 10.0  # within which a stream's first message comes
STALL_S = 15.0  # a stream whose reader takes no message for so long ends, as a connection without keepalive does
REDIAL_S = 2.0
RETIRE_S = 600.0
FIRST_REDIAL_S = 0.2
Addresses = Mapping[str, Sequence[str]]  # HOST:PORT of each peer that accepts connections
Write = Callable[[pb.CouncilMessage], Awaitable[None]]


class Listener(Protocol):
    """Who takes what comes. Its methods are called on the loop; a stream waits for `heard`."""

    async def heard(self, sender: str, word: Message | Told, key: str = "") -> None:
        """Take a message. sender: `name_of` a peer. key: see `Stream`."""
        ...

    def why_over(self, stream: Stream) -> EditError | None:
        """Return why a stream does not count, or no more."""
        ...

    def connected(self, peer_id: str) -> None:
        """Take note of the first stream to a peer."""
        ...

    def disconnected(self, peer_id: str) -> None:
        """Take note of the end of the last one."""
        ...

    def refused(self, peer_id: str, error: EditError) -> None:
        """Take note of why a peer could not be reached, or ended the last stream to it. It is dialled again."""
        ...

    def failed(self, error: BaseException) -> None:
        """Take note of a bug."""
        ...


class Stream:
    """One stream, from either side.

    Args:
        name: `name_of` the peer.
        shown: the peer's introduction.
        key: SHA-256 of the public key that the peer has shown, or proven.
        certificate: of a peer that has dialled.
    """

    def __init__(self, peer_id: str, shown: Introduction, key: str, certificate: x509.Certificate | None) -> None:
        self.peer_id, self.name, self.key, self.certificate = peer_id, name_of(peer_id, shown.incarnation), key, certificate
        self.started = shown.started
        self.over: asyncio.Future[EditError] = asyncio.get_running_loop().create_future()  # why
        self._waiting: deque[Word] = deque(maxlen=MOST_WAITING)
        self._news = asyncio.Event()

    def send(self, word: Word) -> None:
        self._waiting.append(word)
        self._news.set()

    def end(self, reason: EditError) -> None:
        if not self.over.done():
            self.over.set_result(reason)

    async def write(self, write: Write) -> None:
        """Send what is to be sent, until the reader takes nothing for STALL_S: raises TransportError."""
        while True:
            while self._waiting:
                message = message_to_pb(self._waiting.popleft())
                try:
                    async with asyncio.timeout(STALL_S):
                        await write(message)
                except TimeoutError:
                    raise TransportError(f"{self.peer_id} has read nothing for {STALL_S:.0f} s") from None
            self._news.clear()
            await self._news.wait()


class Links:
    """All streams of one host. Used on the event loop.

    Args:
        incarnation: of this member.
        started: which start of the member this is (see `Introduction`).
        credentials: of this member as a client.
        signer: has the key of its certificate.
    """

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        incarnation: int,
        started: int,
        credentials: grpc.ChannelCredentials,
        signer: Signer,
        listener: Listener,
    ) -> None:
        self._signer = signer
        self._run_id, self._peer_id, self._credentials, self._listener = run_id, peer_id, credentials, listener
        self._introduction = Introduction(run_id, incarnation, started=started)
        self._streams: dict[str, list[Stream]] = {}  # by peer_id, the newest last
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._data: dict[str, tuple[str, grpc.aio.Channel]] = {}  # to whom bytes were fetched from, and its address
        self._retired: set[asyncio.Task[None]] = set()  # connections that an earlier certificate opened, while they end
        self._addresses: Addresses = {}
        self._started: dict[str, tuple[str, int]] = {}  # of each peer that a stream came to: its life, and the last start
        self._reached: dict[str, str] = {}  # where each peer was reached last
        self._begun = asyncio.get_running_loop().time()
        self._since: dict[str, float] = {}  # when a peer was connected, or lost, last; of those that ever were
        self._refusals: dict[str, EditError] = {}  # why a peer could not be reached the last time

    # -- what the host does ------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> frozenset[str]:
        """The peers that there is a stream to."""
        return frozenset(self._streams)

    def since_s(self, peer_id: str) -> float:
        """Return for how long a peer has been connected, or not connected, in seconds."""
        return asyncio.get_running_loop().time() - self._since.get(peer_id, self._begun)

    @property
    def addresses(self) -> Addresses:
        """Who is dialled, and where."""
        return self._addresses

    @property
    def refusals(self) -> Mapping[str, EditError]:
        """Why the peers could not be reached that are not connected, and were tried."""
        return self._refusals

    def send(self, peer_id: str, word: Word) -> None:
        """Send this if there is a stream; else drop it."""
        if streams := self._streams.get(peer_id):
            streams[-1].send(word)

    def reach(self, addresses: Addresses) -> None:
        """Keep a stream to each of these; do not dial others again."""
        self._addresses = addresses
        for peer_id, found in addresses.items():
            if peer_id != self._peer_id and found and peer_id not in self._dialling:
                task = self._dialling[peer_id] = asyncio.get_running_loop().create_task(self._keep_dialling(peer_id))
                task.add_done_callback(self._dialled)

    def drop(self, peer_id: str, reason: EditError) -> None:
        """End all streams to a peer."""
        for stream in self._streams.get(peer_id, ()):
            stream.end(reason)

    def end_over(self) -> None:
        """End the streams that count no more."""
        for stream in [each for streams in self._streams.values() for each in streams]:
            if (reason := self._listener.why_over(stream)) is not None:
                stream.end(reason)

    def stub(self, peer_id: str) -> Any:
        """Return what fetches bytes from a peer, over a connection of its own.

        Raises TransportError when it has no address, and when there is no stream to it: a stream's peer has proven its key.
        """
        if peer_id not in self._streams:
            raise TransportError(f"{peer_id} is not connected")
        return council_stub(self.channel(peer_id))

    def channel(self, peer_id: str) -> grpc.aio.Channel:
        """Return the connection to a peer beside the stream. Raises TransportError when it has no address."""
        addresses = self._addresses.get(peer_id, ())
        address = self._reached.get(peer_id)
        if address not in addresses:
            address = next(iter(addresses), None)
        if address is None:
            raise TransportError(f"{peer_id} accepts no connections")
        if peer_id not in self._data or self._data[peer_id][0] != address:
            self._data[peer_id] = address, self._channel(peer_id, address)
        return self._data[peer_id][1]

    def renew(self, credentials: grpc.ChannelCredentials) -> None:
        """Open connections with these credentials from now on. Streams stay; other calls under way have RETIRE_S to end."""
        self._credentials = credentials
        for _, channel in self._data.values():
            task = asyncio.get_running_loop().create_task(channel.close(RETIRE_S))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)
        self._data.clear()

    async def close(self) -> None:
        """End all streams."""
        tasks = [*self._dialling.values()]
        for task in tasks:
            task.cancel()
        self._dialling.clear()
        for peer_id in list(self._streams):
            self.drop(peer_id, TransportError("this host ends"))
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, channel in self._data.values():
            await channel.close()
        for retired in list(self._retired):
            retired.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)

    # -- a stream ----------------------------------------------------------------------------------------------------------

    async def serve(
        self,
        peer_id: str,
        messages: AsyncIterator[pb.CouncilMessage],
        write: Write,
        certificate: x509.Certificate,
    ) -> None:
        """Take a stream that a peer opened. Raises EditError: why it ended. certificate: that the peer has shown."""
        async with _introducing(peer_id):
            first = await anext(messages, None)
        asked, key = self._introduced(peer_id, first), public_hash(certificate)
        answer = proven(self._introduction, self._peer_id, asked, peer_id, key, self._signer)
        stream = Stream(peer_id, asked, key, certificate)
        await write(message_to_pb(answer))
        await self._converse(stream, messages, write)

    async def _keep_dialling(self, peer_id: str) -> None:
        complaint, pause_s, turn = "", FIRST_REDIAL_S, 0
        while addresses := self._addresses.get(peer_id, ()):
            for address in addresses:
                if peer_id in self._streams:
                    break
                try:
                    await self._dial(peer_id, address, connect_ms(turn, len(addresses)))
                except EditError as error:
                    if peer_id not in self._streams:
                        self._refusals[peer_id] = error
                        self._listener.refused(peer_id, error)
                    pause_s = REDIAL_S if str(error) == complaint else FIRST_REDIAL_S
                    if str(error) != complaint:
                        complaint = str(error)
                        _log.info("%s at %s: %s", peer_id, address, error)
                turn += 1
            await asyncio.sleep(pause_s)
        del self._dialling[peer_id]

    def _dialled(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._listener.failed(error)

    async def _dial(self, peer_id: str, address: str, within_ms: int) -> None:
        """Open a stream; return or raise when it ended. within_ms: how long connecting may take."""
        channel = self._channel(peer_id, address, within_ms)
        call: Any = council_stub(channel).Meet()
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            async with _introducing(peer_id, within_ms / 1000 + INTRODUCE_S):
                await call.write(message_to_pb(replace(self._introduction, nonce=nonce)))
                first = await call.read()
            answer = self._introduced(peer_id, None if first is grpc.aio.EOF else first)
            key = check_proof(answer, peer_id, nonce, self._peer_id, key_hash(self._signer.public_key))
            stream = Stream(peer_id, answer, key, None)
            if (reason := self._listener.why_over(stream)) is not None:
                raise reason
            self._reached[peer_id] = address
            await self._converse(stream, _read(call), call.write)
        except grpc.aio.AioRpcError as error:
            meant = swarm_refusal(error.details() or "")
            raise (RefusedError(meant) if meant else from_rpc(error)) from None
        except asyncio.InvalidStateError:  # a write to a call that ended
            raise TransportError("the connection broke") from None
        finally:
            call.cancel()
            await channel.close()

    def _introduced(self, peer_id: str, first: pb.CouncilMessage | None) -> Introduction:
        word = message_from_pb(first) if first is not None else None
        if not isinstance(word, Introduction):
            raise RemoteProtocolError("a stream begins with an introduction")
        if word.protocol != PROTOCOL:
            raise RemoteProtocolError(f"{peer_id} speaks protocol {word.protocol}, this host {PROTOCOL}; update the older one")
        if word.run_id != self._run_id:
            raise RefusedError(f"this is run {self._run_id}, not another")
        self._check_latest(peer_id, name_of(peer_id, word.incarnation), word.started)
        return word

    def _check_latest(self, peer_id: str, name: str, started: int) -> None:
        """Raise StaleError where a stream came to a later start of the same life."""
        known, latest = self._started.get(peer_id, ("", 0))
        if known == name and 0 < started < latest:
            raise StaleError(f"another process was started later with the folder of {peer_id}, or a copy of it")

    async def _converse(self, stream: Stream, messages: AsyncIterator[pb.CouncilMessage], write: Write) -> None:
        """Send and take messages until the stream ends; raise why."""
        loop = asyncio.get_running_loop()
        with self._joined(stream):
            tasks = loop.create_task(stream.write(write)), loop.create_task(self._listen(stream, messages))
            try:
                ends: list[asyncio.Future[Any]] = [stream.over, *tasks]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception) and not stream.over.done():
                raise error
        raise stream.over.result()

    @contextmanager
    def _joined(self, stream: Stream) -> Iterator[None]:
        """Count a stream among the peer's. It ends the older ones, but for one of the same start: both sides may open one."""
        self._check_latest(stream.peer_id, stream.name, stream.started)  # which may have come meanwhile
        self._started[stream.peer_id] = stream.name, stream.started
        streams = self._streams.setdefault(stream.peer_id, [])
        last = streams[-1] if streams else stream
        for other in streams[:-1] if (last.name, last.started) == (stream.name, stream.started) else streams:
            other.end(StaleError(f"{stream.peer_id} opened another stream"))
        streams.append(stream)
        if len(streams) == 1:
            self._since[stream.peer_id] = asyncio.get_running_loop().time()
            self._refusals.pop(stream.peer_id, None)
            self._listener.connected(stream.peer_id)
        try:
            yield
        finally:
            streams.remove(stream)
            if not streams:
                del self._streams[stream.peer_id]
                self._since[stream.peer_id] = asyncio.get_running_loop().time()
                self._listener.disconnected(stream.peer_id)

    async def _listen(self, stream: Stream, messages: AsyncIterator[pb.CouncilMessage]) -> None:
        try:
            async for message in messages:
                word = message_from_pb(message)
                if isinstance(word, Introduction):
                    raise RemoteProtocolError("a host introduces itself once")
                await self._listener.heard(stream.name, word, stream.key)
            stream.end(TransportError("the connection broke"))
        except grpc.aio.AioRpcError as error:
            stream.end(from_rpc(error))
        except EditError as error:
            stream.end(error)

    def _channel(self, peer_id: str, address: str, within_ms: int = CONNECT_MS) -> grpc.aio.Channel:
        name = Identity(self._run_id, "peer", peer_id).server_name
        options = channel_options(address, server_name=name, within_ms=within_ms)
        return grpc.aio.secure_channel(address, self._credentials, options=options)


@asynccontextmanager
async def _introducing(peer_id: str, within_s: float = INTRODUCE_S) -> AsyncIterator[None]:
    """Bound the time until a stream has begun."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise TransportError(f"{peer_id} does not introduce itself") from None


async def _read(call: Any) -> AsyncIterator[pb.CouncilMessage]:
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message
