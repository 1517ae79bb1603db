"""A call that the other side ends while this side writes to it keeps the status that the other side sent."""

from __future__ import annotations

from typing import Any

from grpc.aio import _call

__all__ = ["keep_early_statuses"]


class _KeepsStatus:
    """A call of gRPC's core. The first status that it comes to stays."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def set_internal_error(self, text: str) -> None:
        if not self._call.done():
            self._call.set_internal_error(text)


def keep_early_statuses() -> None:
    """Make grpc.aio report why the other side ended a call, in this process. Calling it again does nothing.

    A write to a call that has ended fails, and grpc.aio 1.85 then replaces the call's status by "Internal error from Core",
    also where the status has arrived before: in up to 94 of 100 calls that a server refuses while the client writes, the
    client never learns why (https://github.com/grpc/grpc/issues/36066). The change is that of
    https://github.com/grpc/grpc/pull/43486: where there is a status, it is not replaced. On a later gRPC without the method
    that this needs, nothing is changed.
    """
    mixin: Any = getattr(_call, "_StreamRequestMixin", None)
    begin = getattr(mixin, "_init_stream_request_mixin", None)
    if begin is None or hasattr(begin, "keeps_status"):
        return

    def begin_keeping(self: Any, request_iterator: Any) -> None:
        self._cython_call = _KeepsStatus(self._cython_call)
        begin(self, request_iterator)

    begin_keeping.keeps_status = True  # type: ignore[attr-defined]
    mixin._init_stream_request_mixin = begin_keeping
