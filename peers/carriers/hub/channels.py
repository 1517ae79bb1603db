"""Connections to the coordinator, one per plane, never shared, and to other members; mutual TLS unless a test says otherwise.

Owns: channel options (size limit, keepalive, reconnection), the choice among several endpoints, and what a failed handshake
means. Must not know: what is said on a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

__all__ = ["MESSAGE_BYTES", "Channels", "Traffic", "handshake_refusal"]

MESSAGE_BYTES = 8 << 20
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),  # control and data never share a connection
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
HANDSHAKE_WORDS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from this run's authority (is another run served there?)",
    "UNKNOWN_CA": "the coordinator does not accept this peer's certificate",
    "CERTIFICATE_REQUIRED": "the coordinator asks for a certificate",
    "Hostname Verification": "the coordinator's certificate does not name the address dialled (server.advertise)",
}


@dataclass(slots=True)
class Traffic:
    """Bytes of the data plane since the process started: the lengths of the serialized messages, counted, never computed."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Channels:
    """Where the coordinator is, and how to reach it.

    endpoints: HOST:PORT, tried in turn; credentials None: plaintext, for tests.
    """

    endpoints: Sequence[str]
    credentials: grpc.ChannelCredentials | None = None
    _turn: int = field(default=0, init=False)

    @property
    def endpoint(self) -> str:
        """The endpoint whose turn it is."""
        return self.endpoints[self._turn % len(self.endpoints)]

    def rotate(self) -> None:
        """Let the next channel go to the next endpoint."""
        self._turn += 1

    def channel(self) -> grpc.aio.Channel:
        """A new connection of its own; must be called on the loop's thread."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.endpoint, options=OPTIONS)
        return grpc.aio.secure_channel(self.endpoint, self.credentials, options=OPTIONS)

    def member(self, endpoint: str, server_name: str) -> grpc.aio.Channel:
        """As `channel`, to another member, whose certificate must say `server_name` (see `editpb.identity.Identity`)."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(endpoint, options=OPTIONS)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", server_name)]
        return grpc.aio.secure_channel(endpoint, self.credentials, options=options)


def handshake_refusal(details: str) -> str | None:
    """One line that says which certificate was refused, or None when `details` of a failed call tell of something else."""
    return next((meaning for word, meaning in HANDSHAKE_WORDS.items() if word in details), None)
