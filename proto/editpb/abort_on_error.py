"""How a servicer says no: an error raised on purpose becomes its status code and one line.

Owns: that. Must not know: services, messages.
"""

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
    """Abort the call with what an EditError means; anything else is a bug, and gRPC's UNKNOWN."""
    try:
        yield
    except EditError as error:
        code, details = to_status(error)
        await context.abort(code, details)
