"""Options of every gRPC channel and server.

They share a module because both ends must agree on how often a client may ping and on the largest message.
"""

from __future__ import annotations

from editpb.transport.http_proxy import proxy_for

__all__ = [
    "CONNECTION_AGE_S",
    "CONNECT_MS",
    "MAX_STREAMS",
    "MESSAGE_BYTES",
    "Options",
    "attempts",
    "channel_options",
    "connect_ms",
    "server_options",
]

Options = tuple[tuple[str, int | str], ...]

MESSAGE_BYTES = 8 << 20  # the largest message of either side; a chunk is at most 1 MiB
HANDSHAKE_MS = 10_000  # a connection whose TLS handshake takes longer is closed
CONNECT_MS = 12_000  # for an attempt to connect: the server's HANDSHAKE_MS, and the way there and back before and after
QUICK_MS = 2_000  # for one after which another address is tried, in every other pass over all of them
MAX_STREAMS = 32  # calls at a time on one connection; further ones wait at the caller
CONNECTION_AGE_S = 3600.0
_KEEPALIVE: Options = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


def connect_ms(turn: int, addresses: int) -> int:
    """Return how long an attempt to connect may take where so many addresses are tried in turn.

    Passes over several addresses are quick and patient by turns: one that swallows what is sent holds the next one up for no
    longer than QUICK_MS at first, and a slow link connects in the second pass.

    turn: the attempt's number, from 0.
    """
    return QUICK_MS if addresses > 1 and turn // addresses % 2 == 0 else CONNECT_MS


def attempts(addresses: int) -> range:
    """Return the turns of who gives up after both kinds of passes over so many addresses; one alone is tried once."""
    return range(addresses if addresses < 2 else 2 * addresses)


def channel_options(
    address: str, max_receive_bytes: int = MESSAGE_BYTES, *, server_name: str = "", within_ms: int = CONNECT_MS
) -> Options:
    """Return the options of a client's channel to HOST:PORT. Raises ConfigError when the environment names a wrong proxy.

    Every channel has a connection of its own, so that control and data never share one. A lost connection is tried again
    after 0.2 s, then every 2 s; an attempt that is not answered takes longer.

    Args:
        address: where it goes; `http_proxy` says what lies between.
        max_receive_bytes: limit of one received message.
        server_name: the name that the server's certificate must bear, if it is not the host of the address.
        within_ms: how long an attempt to connect may take, its TLS handshake included.
    """
    override: Options = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    proxy = proxy_for(address)
    return (
        ("grpc.http_proxy", proxy) if proxy else ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_receive_bytes),
        *_KEEPALIVE,
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", within_ms),  # by its name a pause; gRPC gives each attempt so long
        ("grpc.max_reconnect_backoff_ms", 2_000),
        *override,
    )


def server_options(
    max_receive_bytes: int = MESSAGE_BYTES,
    *,
    max_connections: int = 0,
    max_streams: int = MAX_STREAMS,
    connection_age_s: float = CONNECTION_AGE_S,
    connection_grace_s: float = 0.0,
) -> Options:
    """Return the options of a server; a port that another process listens on is refused instead of shared.

    Args:
        max_receive_bytes: limit of one received message.
        max_connections: further ones are closed at once, those in their handshake counted; 0: no limit.
        max_streams: calls at a time on one connection.
        connection_age_s: an older connection takes no new calls, so that the client's certificate is checked again. The calls
            under way end by themselves: an Attend stream lives as long as its certificate.
        connection_grace_s: after which they are ended; 0: never.
    """
    limit: Options = (("grpc.max_allowed_incoming_connections", max_connections),) if max_connections else ()
    grace: Options = (("grpc.max_connection_age_grace_ms", int(connection_grace_s * 1000)),) if connection_grace_s else ()
    return (
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_connection_age_ms", int(connection_age_s * 1000)),
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", max_streams),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        *limit,
        *grace,
    )
