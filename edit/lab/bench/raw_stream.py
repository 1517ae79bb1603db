"""The limit that `edit-lab bench exchange` compares with: the same bytes over gRPC with mutual TLS, up and then down.

There is no codec, no checksum, no merge, no journal.

python -m edit.lab.bench.raw_stream server TLS PORT_FILE
python -m edit.lab.bench.raw_stream client TLS PORT_FILE BYTES PORT

TLS: the state folder of a run, for its certificates; PORT_FILE: where the server writes its port.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from edit.durable_files import write_atomic
from edit.lab.bench.turns import Exchanger

__all__: list[str] = []

_CHUNK = 1 << 20
_LIMITS = [("grpc.max_receive_message_length", 8 * _CHUNK), ("grpc.max_send_message_length", 8 * _CHUNK)]


async def _pieces(total: int) -> AsyncIterator[bytes]:
    piece = bytes(_CHUNK)
    for offset in range(0, total, _CHUNK):
        yield piece[: total - offset] if total - offset < _CHUNK else piece


async def _serve(tls: Path, port_file: Path) -> None:
    async def up(pieces: AsyncIterator[bytes], _: Any) -> bytes:
        async for _piece in pieces:
            pass
        return b""

    async def down(request: bytes, _: Any) -> AsyncIterator[bytes]:
        async for piece in _pieces(int.from_bytes(request, "little")):
            yield piece

    server = grpc.aio.server(options=_LIMITS)
    handlers: dict[str, Any] = {
        "up": grpc.stream_unary_rpc_method_handler(up),
        "down": grpc.unary_stream_rpc_method_handler(down),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
    ca, key, certificate = ((tls / name).read_bytes() for name in ("ca.pem", "server.key", "server.pem"))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], ca, True))
    await server.start()
    write_atomic(port_file, str(port).encode())
    await server.wait_for_termination()


async def _exchange(address: str, credentials: grpc.ChannelCredentials, total: int, exchanger: Exchanger) -> None:
    async with grpc.aio.secure_channel(address, credentials, options=_LIMITS) as channel:
        send: Any = channel.stream_unary("/raw/up")
        receive: Any = channel.unary_stream("/raw/down")
        while exchanger.go():
            await send(_pieces(total))
            async for _ in receive(total.to_bytes(8, "little")):
                pass
            exchanger.report("raw")


def main(role: str, tls: str, port_file: str, *more: str) -> None:
    """Serve until killed, or be a client."""
    if role == "server":
        asyncio.run(_serve(Path(tls), Path(port_file)))
    else:
        total, port = (int(text) for text in more)
        address = f"127.0.0.1:{Path(port_file).read_text()}"
        pieces = ((Path(tls) / name).read_bytes() for name in ("ca.pem", "operator.key", "operator.pem"))
        asyncio.run(_exchange(address, grpc.ssl_channel_credentials(*pieces), total, Exchanger(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
