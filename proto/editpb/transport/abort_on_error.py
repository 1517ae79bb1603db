"""How a servicer refuses a call: an error raised on purpose becomes a gRPC status code and one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from edit.errors import EditError
from editpb.transport.status import to_status

if TYPE_CHECKING:
    import grpc

__all__ = ["abort_on_error"]


@asynccontextmanager
async def abort_on_error(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Abort the call with the status of an EditError raised inside. Any other exception is a bug, and becomes gRPC's UNKNOWN.

    async with abort_on_error(context):
        ...

    It must be the outermost block of a servicer's method.
    """
    try:
        yield
    except EditError as error:
        code, details = to_status(error)
        try:
            await context.abort(code, details)
        except Exception as abort:
            asyncio.get_running_loop().call_soon(_forget_frames, abort)  # once the method has ended
            raise


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what an error that was answered refers to.

    gRPC keeps the exception of an aborted call until Python's garbage collector comes by, which takes hundreds of calls. Its
    traceback holds the frames of the method, with the request in them: 8 MB each, if the caller likes.
    """
    while error is not None:
        error.__traceback__, error = None, error.__context__
