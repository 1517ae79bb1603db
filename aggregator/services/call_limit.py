"""How many calls one member has under way, so that none takes all that the coordinator serves at a time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

from edit.errors import BusyError, EditError, RefusedError
from editpb.identity import from_auth_context
from editpb.transport.guarded_calls import Context, Guard, counted, guarded, placed

__all__ = ["CALLS_OF_GUEST", "CALLS_OF_MEMBER", "CALLS_OF_RANK", "MAX_GUESTS", "RESERVED", "CallLimit"]

CALLS_OF_MEMBER = 64  # while none of its ranks attends: they all connect at once
RESERVED = 16  # of all calls, for operators, so that they can always say who is to leave
CALLS_OF_RANK = 24  # more for each rank that attends: its stream, 16 fragments of a contribution, an update, a snapshot
MAX_GUESTS = 64  # calls of all whose certificate names no member, such as that of an invitation
CALLS_OF_GUEST = 4  # of one such certificate


class CallLimit(grpc.aio.ServerInterceptor):
    """Aborts calls of a member that has too many under way, with the status of BusyError. Used on the event loop.

    A call with one request begins with its headers here: its caller is admitted and has a place before the request is waited
    for. Give the server a greater `maximum_concurrent_rpcs` than `most`: calls beyond these end at once, but not in no time.

    Args:
        most: calls that are served at a time. One member gets at most half of them, and RESERVED are left for the operator.
        ranks: returns how many ranks of a member attend.
        admit: refuses a caller that no service here would answer, while its request is waited for. The service itself decides
            what a caller may, and refuses streams of requests: some say more than a status.
        spoke: told of each call of who is admitted over whose connection it comes, as gRPC names that.
    """

    def __init__(
        self, most: int, ranks: Callable[[str], int], admit: Guard, spoke: Callable[[str], None] = lambda _: None
    ) -> None:
        self._most, self._ranks, self._admit, self._spoke = most, ranks, admit, spoke
        self._under_way: Counter[str] = Counter()  # by peer_id
        self._guests: Counter[bytes] = Counter()  # by certificate

    @contextlib.contextmanager
    def place(self, peer_id: str, role: str = "peer") -> Iterator[None]:
        """Count a call of this member, until the block ends. Raises BusyError when it, or all but operators, have too many."""
        most = min(CALLS_OF_MEMBER + CALLS_OF_RANK * self._ranks(peer_id), self._most // 2)
        if self._under_way[peer_id] >= most:
            raise BusyError(f"{peer_id} has {most} calls under way here already; end one of them, or try again later")
        if role != "operator" and self._under_way.total() >= self._most - RESERVED:
            raise BusyError("too many calls are under way here; try again later")
        with counted(self._under_way, peer_id):
            yield

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, behind the limit; None when there is no such method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.request_streaming:
            return placed(handler, self._place_of_stream)
        return guarded(handler, self._admitted, self._place_of)

    @contextlib.contextmanager
    def _admitted(self, context: Context) -> Iterator[None]:
        with self._admit(context):
            self._spoke(context.peer())
            yield

    def _place_of_stream(self, context: Context) -> contextlib.AbstractContextManager[None]:
        with contextlib.suppress(EditError), self._admitted(context):
            pass
        return self._place_of(context)

    def _place_of(self, context: Context) -> contextlib.AbstractContextManager[None]:
        try:
            caller = from_auth_context(context.auth_context())
        except RefusedError:
            return self._place_of_guest(next(iter(context.auth_context().get("x509_pem_cert", ())), b""))
        return self.place(caller.peer_id, caller.role)

    @contextlib.contextmanager
    def _place_of_guest(self, certificate: bytes) -> Iterator[None]:
        if self._guests[certificate] >= CALLS_OF_GUEST or self._guests.total() >= MAX_GUESTS:
            raise BusyError("too many calls of who is no member are under way here; try again later")
        with counted(self._guests, certificate):
            yield
