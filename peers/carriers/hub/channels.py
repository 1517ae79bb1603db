"""The gRPC channels of one peer: who opens them, and with which credentials.

`Channels` owns every channel to a coordinator, an aggregator or another member; mutual TLS unless a test says otherwise.
Control and data never share a connection. `enrolment_channel` is the one channel of a process that is not a member yet;
`first_answer` is for commands, which run no loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc

from edit.errors import TransportError
from editpb.invitation import MAX_ENDPOINTS
from editpb.transport.channel_options import CONNECT_MS, attempts, channel_options, connect_ms
from editpb.transport.http_proxy import proxy_for, through
from editpb.transport.send_limit import UNLIMITED, SendLimit
from editpb.transport.status import handshake_refusal, none_answered

__all__ = ["Channels", "enrolment_channel", "first_answer"]

ENROLMENT_BYTES = 1 << 20  # the largest answer to an enrolment

_Answer = TypeVar("_Answer")
_Stub = TypeVar("_Stub")
_Wanted: TypeAlias = tuple[str, grpc.ChannelCredentials | None]


@dataclass(slots=True, eq=False)
class _Held:
    """What the channels to all aggregators share."""

    credentials: grpc.ChannelCredentials | None  # replaced in one go
    limit: SendLimit


class Channels:
    """Opens, keeps and closes the channels to one aggregator, and those to other members. Its methods run on the loop's thread.

    Args:
        endpoints: HOST:PORT of the aggregator, tried in turn.
        credentials: of this peer; None: plaintext, for tests.
        limit: of what is sent over all of them.

    Raises ConfigError when the environment names a proxy that is none.
    """

    moves = False  # whether another host may take the aggregator's place at any time

    def __init__(
        self, endpoints: Sequence[str], credentials: grpc.ChannelCredentials | None = None, limit: SendLimit = UNLIMITED
    ) -> None:
        self._held = _Held(credentials, limit)
        self._endpoints = tuple(endpoints)
        for each in self._endpoints:
            proxy_for(each)  # a wrong proxy is known at once
        self._turn = 0
        self.failures = 0  # turns since a control connection has begun
        self.rtt_s = 0.0  # the least time in which a small question was answered here, in seconds; 0: none was
        self._data: dict[
            tuple[bool, _Wanted], grpc.aio.Channel
        ] = {}  # the data plane's, and those beside them; to each endpoint
        self._open: set[grpc.aio.Channel] = set()
        self._here: set[asyncio.Timeout] = set()  # see `while_here`
        self._news = asyncio.Event()  # see `pause`; each piece of news has another

    def to(self, endpoints: Sequence[str]) -> Channels:
        """Return the channels to another aggregator, with the same limit and credentials, also once these are renewed."""
        other = Channels(endpoints)
        other._held = self._held
        return other

    def share(self, other: Channels) -> None:
        """Have the credentials of others, also once they are renewed."""
        self._held = other._held

    def renew(self, credentials: grpc.ChannelCredentials) -> None:
        """Open channels with these credentials from now on. Those that are open stay: calls may still use them."""
        self._held.credentials = credentials

    @property
    def endpoint(self) -> str:
        """The endpoint whose turn it is; may be read on any thread."""
        return self._endpoints[self._turn % len(self._endpoints)]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All that are known."""
        return self._endpoints

    @property
    def limit(self) -> SendLimit:
        """What bounds the bytes that are sent to the endpoint."""
        return self._held.limit

    def rotate(self) -> None:
        """Let the next channel go to the next endpoint."""
        self._turn += 1
        self.failures += 1
        self.rtt_s = 0.0

    def welcomed(self, first_round_id: int) -> None:
        """Take note that the control connection has begun. first_round_id: see Welcome."""
        self.failures = 0

    @property
    def known(self) -> int:
        """How many endpoints are known."""
        return len(self._endpoints)

    def learn(self, endpoints: Sequence[str]) -> None:
        """Try these next, before those that were known; at most MAX_ENDPOINTS stay."""
        self._endpoints = tuple(dict.fromkeys((*endpoints, *self._endpoints)))[:MAX_ENDPOINTS]
        self._turn, self.failures, self.rtt_s = 0, 0, 0.0
        self._wake()

    def move(self, endpoint: str) -> None:
        """The aggregator is served there from now on, and nowhere else. What goes on with another address ends."""
        self._endpoints = (endpoint,)
        self._turn, self.failures, self.rtt_s = 0, 0, 0.0
        self._moved()

    @contextlib.asynccontextmanager
    async def while_here(self) -> AsyncIterator[None]:
        """Raise TransportError in what this surrounds as soon as the aggregator is known to be elsewhere."""
        try:
            async with asyncio.timeout(None) as bound:
                self._here.add(bound)
                try:
                    yield
                finally:
                    self._here.discard(bound)
        except TimeoutError:
            if not bound.expired():
                raise
            raise TransportError(f"it is at {self.endpoint} now") from None

    async def pause(self, seconds: float) -> None:
        """Wait; no longer than until the aggregator was found again, or is known to be elsewhere."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _moved(self) -> None:
        """End whatever is `while_here`, and all pauses."""
        for bound in self._here:
            bound.reschedule(asyncio.get_running_loop().time())
        self._here.clear()
        self._wake()

    def _wake(self) -> None:
        """End all pauses."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def answered(self, seconds: float) -> None:
        """Take note that a small question was answered after so long: a round trip, and more where the other side was busy."""
        self.rtt_s = min(self.rtt_s, seconds) if self.rtt_s else seconds

    def control(self) -> grpc.aio.Channel:
        """Open a channel for one attempt of the control connection; `release` it afterwards."""
        return self._channel(self.endpoint, within_ms=connect_ms(self.failures, self.known))

    def data(self) -> grpc.aio.Channel:
        """Return the data plane's channel: the same one until the endpoint or the credentials change."""
        return self._kept(beside=False)

    def beside(self) -> grpc.aio.Channel:
        """Return the data plane's second channel, likewise."""
        return self._kept(beside=True)

    def _kept(self, *, beside: bool) -> grpc.aio.Channel:
        return self._kept_to(self.endpoint, beside=beside)

    def _kept_to(self, endpoint: str, *, beside: bool = False) -> grpc.aio.Channel:
        wanted = beside, (endpoint, self._held.credentials)
        if wanted not in self._data:
            self._data[wanted] = self._channel(endpoint)
        return self._data[wanted]

    def bound(self, stub: _Stub, *, taken: bool = False) -> _Stub:
        """Return the stub, whose calls say what these channels are for. taken: those on the channel `taken`."""
        return stub

    @property
    def takes_itself(self) -> bool:
        """Whether this peer's own host takes the outer steps, too, and is not the aggregator at present."""
        return False

    def taken(self) -> grpc.aio.Channel | None:
        """Return the channel to this peer's own host, which has the updates that it took; None: ask the aggregator."""
        return None

    def not_taken(self) -> None:
        """Take note that it did not have one: it is behind, or away."""

    def refused(self, error: grpc.aio.AioRpcError) -> None:
        """Take note of how a connection ended: the other side may have said where to go."""

    def member(self, address: str, server_name: str, within_ms: int = CONNECT_MS) -> grpc.aio.Channel:
        """Open a channel to another member, whose certificate must say `server_name` (`editpb.identity.Identity`)."""
        return self._channel(address, server_name, within_ms)

    async def release(self, channel: grpc.aio.Channel) -> None:
        """Close one channel."""
        self._open.discard(channel)
        self._data = {wanted: known for wanted, known in self._data.items() if known is not channel}
        await channel.close()

    async def close(self) -> None:
        """Close all channels; a later call opens a new one."""
        for channel in tuple(self._open):
            await self.release(channel)

    def _channel(self, address: str, server_name: str = "", within_ms: int = CONNECT_MS) -> grpc.aio.Channel:
        if (credentials := self._held.credentials) is None:
            channel = grpc.aio.insecure_channel(address, options=channel_options(address, within_ms=within_ms))
        else:
            options = channel_options(address, server_name=server_name, within_ms=within_ms)
            channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._open.add(channel)
        return channel


def enrolment_channel(
    endpoint: str,
    authority: bytes,
    *,
    server_name: str = "",
    guest: tuple[bytes | None, bytes | None] = (None, None),
    within_ms: int = CONNECT_MS,
) -> grpc.Channel:
    """Open a blocking channel to a server whose certificate `authority` (PEM) has signed; a context manager that closes it.

    server_name: what its certificate must name, if not the endpoint's host. guest: key and certificate (PEM) to show, if any.
    within_ms: how long an attempt to connect may take.
    """
    credentials = grpc.ssl_channel_credentials(authority, *guest)
    options = channel_options(endpoint, ENROLMENT_BYTES, server_name=server_name, within_ms=within_ms)
    return grpc.secure_channel(endpoint, credentials, options=options)


def first_answer(
    endpoints: Sequence[str],
    credentials: grpc.ChannelCredentials,
    call: Callable[[grpc.aio.Channel], Coroutine[Any, Any, _Answer]],
    who: Callable[[str], str],
) -> _Answer:
    """Make a call at each endpoint in turn, over a channel of its own, until one answers. For a command, which runs no loop.

    who: names an endpoint in an error. Raises RefusedError where another run's server is at each endpoint, TransportError where
    none answers, and what else `call` raises.
    """

    async def at(endpoint: str, within_ms: int) -> _Answer:
        options = channel_options(endpoint, within_ms=within_ms)
        async with grpc.aio.secure_channel(endpoint, credentials, options=options) as channel:
            return await call(channel)

    failures = dict[str, tuple[str, bool]]()  # why, and whether it is a stranger's
    for turn in attempts(len(endpoints)):
        endpoint = endpoints[turn % len(endpoints)]
        try:
            return asyncio.run(at(endpoint, connect_ms(turn, len(endpoints))))
        except TransportError as error:
            stranger = handshake_refusal(str(error))
            failures[endpoint] = f"{who(endpoint)}{through(endpoint)}: {stranger or error}", stranger is not None
    raise none_answered(failures.values())
