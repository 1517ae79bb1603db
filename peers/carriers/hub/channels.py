"""The gRPC channels of one peer: who opens them, with which credentials, and what a failed handshake means.

`Channels` owns every channel to a coordinator, an aggregator or another member; mutual TLS unless a test says otherwise.
Control and data never share a connection. `enrolment_channel` is the one channel of a process that is not a member yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from editpb.channel_options import channel_options

__all__ = ["Channels", "enrolment_channel", "handshake_refusal"]

ENROLMENT_BYTES = 1 << 20  # the largest answer to an enrolment
HANDSHAKE_WORDS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from this run's authority (is another run served there?)",
    "UNKNOWN_CA": "the coordinator does not accept this peer's certificate",
    "CERTIFICATE_REQUIRED": "the coordinator asks for a certificate",
    "Hostname Verification": "the coordinator's certificate does not name the address connected to (server.advertise)",
}


class Channels:
    """Opens, keeps and closes the channels to one aggregator, and those to other members. Its methods run on the loop's thread.

    Args:
        endpoints: HOST:PORT of the aggregator, tried in turn.
        credentials: of this peer; None: plaintext, for tests.
    """

    def __init__(self, endpoints: Sequence[str], credentials: grpc.ChannelCredentials | None = None) -> None:
        self.credentials = credentials
        self._endpoints = tuple(endpoints)
        self._turn = 0
        self._data: tuple[str, grpc.aio.Channel] | None = None  # its endpoint, and the data plane's present channel
        self._open: set[grpc.aio.Channel] = set()  # also the data channels to earlier endpoints: calls may still use them

    @property
    def endpoint(self) -> str:
        """The endpoint whose turn it is; may be read on any thread."""
        return self._endpoints[self._turn % len(self._endpoints)]

    def rotate(self) -> None:
        """Let the next channel go to the next endpoint."""
        self._turn += 1

    def control(self) -> grpc.aio.Channel:
        """Open a channel for one attempt of the control connection; `release` it afterwards."""
        return self._channel(self.endpoint)

    def data(self) -> grpc.aio.Channel:
        """Return the data plane's channel: the same one until the endpoint changes."""
        if self._data is None or self._data[0] != self.endpoint:
            self._data = self.endpoint, self._channel(self.endpoint)
        return self._data[1]

    def member(self, address: str, server_name: str) -> grpc.aio.Channel:
        """Open a channel to another member, whose certificate must say `server_name` (`editpb.identity.Identity`)."""
        return self._channel(address, server_name)

    async def release(self, channel: grpc.aio.Channel) -> None:
        """Close one channel."""
        self._open.discard(channel)
        if self._data is not None and self._data[1] is channel:
            self._data = None
        await channel.close()

    async def close(self) -> None:
        """Close all channels; a later call opens a new one."""
        for channel in tuple(self._open):
            await self.release(channel)

    def _channel(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        if self.credentials is None:
            channel = grpc.aio.insecure_channel(address, options=channel_options())
        else:
            channel = grpc.aio.secure_channel(address, self.credentials, options=channel_options(server_name=server_name))
        self._open.add(channel)
        return channel


def enrolment_channel(endpoint: str, authority: bytes) -> grpc.Channel:
    """Open a blocking channel to a server whose certificate `authority` (PEM) has signed; a context manager that closes it."""
    credentials = grpc.ssl_channel_credentials(authority)
    return grpc.secure_channel(endpoint, credentials, options=channel_options(ENROLMENT_BYTES))


def handshake_refusal(details: str) -> str | None:
    """Return in one line which certificate was refused; None when the `details` of a failed call are about something else."""
    return next((meaning for word, meaning in HANDSHAKE_WORDS.items() if word in details), None)
