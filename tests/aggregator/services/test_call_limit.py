"""What is left of a call when it has ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from aggregator.services.call_limit import CallLimit
from edit.errors import RemoteProtocolError
from tests.support.loops import on_a_loop


class Context:
    """The context of a call of somebody without a certificate."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.AbortError


class Requests:
    """A stream of requests as gRPC makes it: an object whose iterator is an asynchronous generator."""

    def __init__(self) -> None:
        self.held = 0
        self._messages = self._read()

    def __aiter__(self) -> AsyncIterator[int]:
        return self._messages

    async def __anext__(self) -> int:
        return await anext(self._messages)

    async def _read(self) -> AsyncIterator[int]:
        for number in range(3):
            self.held += 1
            try:
                yield number
            finally:
                self.held -= 1


async def handler_of(behaviour: Any, kind: str) -> Any:
    make: Any = getattr(grpc, f"{kind}_rpc_method_handler")

    async def continuation(_: object) -> Any:
        return make(behaviour)

    handler: Any = await CallLimit(10, lambda _: 1, lambda _: contextlib.nullcontext()).intercept_service(continuation, None)  # type: ignore[arg-type]
    return getattr(handler, kind)


async def refuse(requests: Any, context: Any) -> None:
    await anext(requests)
    raise RemoteProtocolError("bad manners")


async def answer(requests: Any, context: Any) -> int:
    return int(await anext(requests))


async def stream(requests: Any, context: Any) -> AsyncIterator[int]:
    yield await anext(requests)


async def stream_and_refuse(requests: Any, context: Any) -> AsyncIterator[int]:
    yield await anext(requests)
    raise RemoteProtocolError("bad manners")


@pytest.mark.parametrize("behaviour", [refuse, answer])
@on_a_loop
async def test_the_last_message_of_a_stream_is_held_no_longer_than_its_call(behaviour: Any) -> None:
    requests, call = Requests(), await handler_of(behaviour, "stream_unary")
    try:
        await call(requests, Context())
    except grpc.aio.AbortError:
        assert behaviour is refuse
    assert requests.held == 0


@pytest.mark.parametrize("behaviour", [stream, stream_and_refuse])
@on_a_loop
async def test_the_same_where_answers_are_streamed(behaviour: Any) -> None:
    requests, call = Requests(), await handler_of(behaviour, "stream_stream")
    try:
        assert [each async for each in call(requests, Context())] == [0]
    except grpc.aio.AbortError:
        assert behaviour is stream_and_refuse
    assert requests.held == 0
