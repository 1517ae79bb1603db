"""A call is admitted and has its place before its request is waited for, and waits for it only so long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest

from edit.errors import EvictedError
from editpb.transport import guarded_calls
from editpb.transport.guarded_calls import guarded
from tests.support.loops import WAIT_S, on_a_loop, until

ENTERED: list[str] = []


@contextlib.contextmanager
def noted(name: str) -> Iterator[None]:
    ENTERED.append(name)
    try:
        yield
    finally:
        ENTERED.remove(name)


async def double(request: bytes, context: Any) -> bytes:
    context.set_trailing_metadata((("entered", ",".join(ENTERED)),))
    return request * 2


async def thrice(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for _ in range(3):
        yield request


async def written(request: bytes, context: Any) -> None:
    await context.write(request)


METHODS = {
    "double": grpc.unary_unary_rpc_method_handler(double),
    "thrice": grpc.unary_stream_rpc_method_handler(thrice),
    "written": grpc.unary_stream_rpc_method_handler(written),
}


@contextlib.asynccontextmanager
async def channel(
    admitted: Callable[[Any], Any] = lambda _: noted("admitted"), **options: Any
) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    methods = {name: guarded(each, admitted, lambda _: noted("placed")) for name, each in METHODS.items()}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", **options) as opened:
            yield opened
    finally:
        await server.stop(None)


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@on_a_loop
async def test_a_call_is_answered_as_ever(compression: grpc.Compression) -> None:
    async with channel(compression=compression) as opened:
        call = opened.unary_unary("/s/double")(b"ab" * 99)
        assert await call == b"ab" * 198
        assert ("entered", "placed") in list(await call.trailing_metadata())
        assert [each async for each in opened.unary_stream("/s/thrice")(b"x")] == [b"x"] * 3
        assert [each async for each in opened.unary_stream("/s/written")(b"y")] == [b"y"]
    assert not ENTERED


@pytest.mark.parametrize("method", ["double", "thrice"])
@on_a_loop
async def test_a_request_that_does_not_come_ends_the_call(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    async with channel() as opened, asyncio.timeout(WAIT_S):
        held = opened.stream_unary(f"/s/{method}")(silence())
        await until(lambda: ENTERED == ["admitted", "placed"])
        monkeypatch.setattr(guarded_calls, "REQUEST_S", 0.01)
        call = opened.stream_unary(f"/s/{method}")(silence())
        assert (await call.code(), await call.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the request did not arrive within 0.01 s",
        )
        held.cancel()
        await until(lambda: not ENTERED)


@on_a_loop
async def test_a_call_that_ends_without_a_request_is_refused() -> None:
    async with channel() as opened, asyncio.timeout(WAIT_S):
        assert await opened.stream_unary("/s/double")(nothing()).code() is grpc.StatusCode.INVALID_ARGUMENT


@on_a_loop
async def test_who_may_not_call_hears_it_before_a_byte_of_the_request() -> None:
    @contextlib.contextmanager
    def refused(_: Any) -> Iterator[None]:
        raise EvictedError("gone")
        yield

    async with channel(refused) as opened, asyncio.timeout(WAIT_S):
        assert await opened.stream_unary("/s/double")(silence()).details() == "evicted: gone"
        with pytest.raises(grpc.aio.AioRpcError, match="evicted: gone"):
            await opened.unary_unary("/s/double")(bytes(3 << 20))
    assert not ENTERED
