"""How many calls one member has under way, so that none takes all that the coordinator serves at a time."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from edit.errors import BusyError, RefusedError
from editpb.identity import from_auth_context
from editpb.transport.abort_on_error import abort_on_error

__all__ = ["CALLS_OF_MEMBER", "CALLS_OF_RANK", "RESERVED", "CallLimit"]

CALLS_OF_MEMBER = 64  # while none of its ranks attends: they all connect at once
RESERVED = 16  # of all calls, for operators, so that they can always say who is to leave
CALLS_OF_RANK = 24  # more for each rank that attends: its stream, 16 fragments of a contribution, an update, a snapshot

_Behaviour = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Any]


@contextlib.asynccontextmanager
async def _released(request: Any) -> AsyncIterator[None]:
    """Close a stream of requests when the block ends.

    gRPC keeps it until Python's garbage collector comes by, which takes hundreds of calls, and its last message with it. One
    that is just being read ends with the task that reads it.
    """
    try:
        yield
    finally:
        if hasattr(request, "__aiter__"):
            messages = aiter(request)
            if not messages.ag_running:
                await messages.aclose()


class CallLimit(grpc.aio.ServerInterceptor):
    """Aborts calls of a member that has too many under way, with the status of BusyError. Used on the event loop.

    Who a caller is, its certificate says; whether it may call, the service decides.

    Args:
        most: calls that are served at a time. One member gets at most half of them, and RESERVED are left for the operator.
        ranks: returns how many ranks of a member attend.
        spoke: told of each call over whose connection it comes, as gRPC names that.
    """

    def __init__(self, most: int, ranks: Callable[[str], int], spoke: Callable[[str], None] = lambda _: None) -> None:
        self._most, self._ranks, self._spoke = most, ranks, spoke
        self._under_way: Counter[str] = Counter()  # by peer_id

    @contextlib.contextmanager
    def place(self, peer_id: str, role: str = "peer") -> Iterator[None]:
        """Count a call of this member, until the block ends. Raises BusyError when it, or all but operators, have too many."""
        most = min(CALLS_OF_MEMBER + CALLS_OF_RANK * self._ranks(peer_id), self._most // 2)
        if self._under_way[peer_id] >= most:
            raise BusyError(f"{peer_id} has {most} calls under way here already; end one of them, or try again later")
        if role != "operator" and self._under_way.total() >= self._most - RESERVED:
            raise BusyError("too many calls are under way here; try again later")
        self._under_way[peer_id] += 1
        try:
            yield
        finally:
            self._under_way -= Counter((peer_id,))  # drops what is 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, behind the limit; None when there is no such method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(kind for kind in kinds if getattr(handler, kind) is not None)
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        limited: grpc.RpcMethodHandler[Any, Any] = make(
            self._limited(getattr(handler, kind)), handler.request_deserializer, handler.response_serializer
        )
        return limited

    def _limited(self, behaviour: _Behaviour) -> _Behaviour:
        async def one(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with abort_on_error(context), _released(request):
                with self._place_of(context):
                    return await behaviour(request, context)

        async def many(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            async with abort_on_error(context), _released(request):
                with self._place_of(context):
                    async with contextlib.aclosing(behaviour(request, context)) as messages:
                        async for message in messages:
                            yield message

        return many if inspect.isasyncgenfunction(behaviour) else one

    def _place_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> contextlib.AbstractContextManager[None]:
        try:
            caller = from_auth_context(context.auth_context())
        except RefusedError:  # no member: the service refuses it
            return contextlib.nullcontext()
        self._spoke(context.peer())
        return self.place(caller.peer_id, caller.role)
