"""The client's side of Watch: the statuses of a run as they come, each of them whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from edit.errors import RemoteProtocolError, TransportError
from editpb import control_pb2 as pb
from editpb.run_status import RunStatus
from editpb.status_messages import status_from_pb
from editpb.transport.status import StrangerError, from_status, handshake_refusal

__all__ = ["watch"]

SILENT_S = 30.0  # beyond the pace; an aggregator whose connection stands and that says nothing for so long does not answer


async def watch(stub: Any, who: str, every_s: float = 1.0) -> AsyncGenerator[RunStatus, None]:
    """Yield how the run stands, again and again, until the aggregator ends the call.

    Args:
        stub: a ControlStub.
        who: that is asked, for messages.
        every_s: between two statuses.

    Raises TransportError when it does not answer, or no longer; StrangerError when the handshake fails; RefusedError,
    EvictedError, BusyError and RemoteProtocolError as the aggregator says.
    """
    call = stub.Watch(pb.WatchRequest(every_s=every_s, curves_kept=True))
    status: RunStatus | None = None
    try:
        while True:
            async with asyncio.timeout(every_s + SILENT_S):
                reply = await call.read()
            if reply is grpc.aio.EOF:
                break
            try:
                news = status_from_pb(reply)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"{who}: {error}") from error
            status = news if status is None else status.updated(news)
            yield status
        if (code := await call.code()) is not grpc.StatusCode.OK:
            raise from_status(code, await call.details() or "")
    except TimeoutError:
        raise TransportError(f"{who} does not answer") from None
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        if (stranger := handshake_refusal(details)) is not None:
            raise StrangerError(f"{who}: {stranger}") from error
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise TransportError(f"{who} does not answer") from error
        raise from_status(error.code(), details) from error
    finally:
        call.cancel()
