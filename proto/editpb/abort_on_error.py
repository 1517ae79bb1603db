"""How a servicer refuses a call: an error raised on purpose becomes a gRPC status code and one line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from edit.errors import EditError
from editpb.status import to_status

if TYPE_CHECKING:
    import grpc

__all__ = ["abort_on_error"]


@asynccontextmanager
async def abort_on_error(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Abort the call with the status of an EditError raised inside. Any other exception is a bug, and becomes gRPC's UNKNOWN.

    async with abort_on_error(context):
        ...
    """
    try:
        yield
    except EditError as error:
        code, details = to_status(error)
        await context.abort(code, details)
