"""A bound on how long nothing may move in a call that has no other: one that waits for a connection that never comes, or for
bytes that never do, is given up and tried again.

Owns: the bound, counted anew each time something moves. Must not know: what is transferred, how it is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Self, TypeVar

import grpc

from edit.errors import TransportError

__all__ = ["STALL_S", "StallTimeout"]

STALL_S = 60.0  # far longer than one chunk takes
_Part = TypeVar("_Part")
_Request = TypeVar("_Request")


class StallTimeout:
    """A context: TransportError in what it surrounds once nothing has moved for so many seconds. On the loop's thread."""

    def __init__(self, seconds: float = STALL_S) -> None:
        self._seconds = seconds
        self._bound = asyncio.timeout(seconds)
        self._open = False

    async def __aenter__(self) -> Self:
        await self._bound.__aenter__()
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        try:
            await self._bound.__aexit__(kind, error, trace)
        except TimeoutError:
            raise TransportError(f"nothing has moved for {self._seconds:g} s") from None

    def moved(self) -> None:
        """Something has; from another task, too, and after the end, which changes nothing."""
        self._give(asyncio.get_running_loop().time() + self._seconds)

    async def reading(self, call: grpc.aio.UnaryStreamCall[_Request, _Part]) -> AsyncIterator[_Part]:
        """What comes."""
        async for part in call:
            self.moved()
            yield part

    def sending(self, parts: Iterable[_Part]) -> Iterable[_Part]:
        """What goes: each is asked for when the ones before are on their way. When all are, the answer may take as long as the
        connection lives: a large state is on disk before it comes."""
        for part in parts:
            self.moved()
            yield part
        self._give(None)

    def _give(self, until: float | None) -> None:
        if self._open and not self._bound.expired():
            self._bound.reschedule(until)
