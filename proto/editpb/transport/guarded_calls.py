"""A call counts from its headers on: who calls is checked, and its place taken, before its request is waited for.

gRPC calls the handler of a call with one request only once that is here as a whole. It waits for it without end, holds what has
come of it, and counts the call. So such a handler is made into one of a stream of requests, which is the same on the wire, and
reads its one request itself: from a caller that may call, and for a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import grpc

from edit.errors import RemoteProtocolError, TransportError
from editpb.transport.abort_on_error import abort_on_error

__all__ = ["REQUEST_S", "Context", "Guard", "counted", "guarded", "in_time", "placed"]

REQUEST_S = 30.0  # how long a request may take to arrive; over a slow link it shares that with megabytes of a contribution

_T = TypeVar("_T")
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Guard = Callable[[Context], AbstractContextManager[object]]  # raises EditError to refuse the call


def guarded(handler: Handler, admitted: Guard, place: Guard) -> Handler:
    """Return the handler of a call with one request, which that arrives at within REQUEST_S.

    Args:
        handler: its behaviour is a coroutine function, or an asynchronous generator.
        admitted: entered at the headers, until the request is there.
        place: entered after it, until the call has ended.
    """

    @contextlib.asynccontextmanager
    async def request_of(context: Context) -> AsyncIterator[Any]:
        with contextlib.ExitStack() as held:
            with admitted(context):
                held.enter_context(place(context))
                request = await in_time(context.read(), "the request")
            if request is grpc.aio.EOF:
                raise RemoteProtocolError("the call has no request")
            yield request

    return _made(handler, lambda _, context: request_of(context))


def placed(handler: Handler, place: Guard) -> Handler:
    """Return the handler of a call with a stream of requests, with `place` entered until it has ended."""

    @contextlib.asynccontextmanager
    async def requests_of(requests: Any, context: Context) -> AsyncIterator[Any]:
        async with _released(requests):
            with place(context):
                yield requests

    return _made(handler, requests_of)


@contextlib.contextmanager
def counted(calls: Counter[_T], caller: _T) -> Iterator[None]:
    """Count a call of this caller until the block ends; who has none is not kept."""
    calls[caller] += 1
    try:
        yield
    finally:
        calls[caller] -= 1
        if not calls[caller]:
            del calls[caller]


async def in_time(awaitable: Awaitable[_T], what: str) -> _T:
    """Return what is awaited. Raises TransportError when it does not come within REQUEST_S."""
    try:
        async with asyncio.timeout(REQUEST_S):
            return await awaitable
    except TimeoutError:
        raise TransportError(f"{what} did not arrive within {REQUEST_S:g} s") from None


def _made(handler: Any, entered: Callable[[Any, Context], AbstractAsyncContextManager[Any]]) -> Handler:
    """Return a handler of a stream of requests. entered: gives the behaviour its first argument, until the call has ended."""
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    behaviour = next(filter(None, (getattr(handler, kind) for kind in kinds)))

    async def one(requests: Any, context: Context) -> Any:
        async with abort_on_error(context), entered(requests, context) as first:
            return await behaviour(first, context)

    async def many(requests: Any, context: Context) -> AsyncIterator[Any]:
        async with (
            abort_on_error(context),
            entered(requests, context) as first,
            contextlib.aclosing(behaviour(first, context)) as messages,
        ):
            async for message in messages:
                yield message

    make: Any = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    made: Handler = make(
        many if inspect.isasyncgenfunction(behaviour) else one, handler.request_deserializer, handler.response_serializer
    )
    return made


@contextlib.asynccontextmanager
async def _released(requests: Any) -> AsyncIterator[None]:
    """Close a stream of requests when the block ends.

    gRPC keeps it until Python's garbage collector comes by, which takes hundreds of calls, and its last message with it. One
    that is just being read ends with the task that reads it.
    """
    try:
        yield
    finally:
        messages = aiter(requests)
        if not messages.ag_running:
            await messages.aclose()
