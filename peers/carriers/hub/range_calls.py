"""Reading a long byte string in calls of a bounded size, one behind the other, from wherever an earlier try broke off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from peers.carriers.hub.pace import Pace

__all__ = ["Assembly", "read_in_ranges"]

_Part = TypeVar("_Part")


class Assembly(Protocol):
    """What is put together. Positions count over all of its fragments."""

    @property
    def received(self) -> int:
        """Bytes so far: where to go on."""
        ...

    @property
    def total_bytes(self) -> int | None:
        """Of all of it; None while that is unknown."""
        ...

    @property
    def complete(self) -> bool: ...

    @property
    def at_an_end(self) -> bool:
        """Whether a fragment has just become complete: a call may end here, before its limit."""
        ...

    def refuse_end(self) -> None:
        """Raise RemoteProtocolError: the stream has ended too early."""
        ...


class Call(Protocol):
    """As much of `grpc.aio.UnaryStreamCall` as is needed here."""

    def cancel(self) -> bool: ...


_SomeCall = TypeVar("_SomeCall", bound=Call)


@dataclass(frozen=True, slots=True)
class _Range(Generic[_SomeCall]):
    call: _SomeCall
    start: int
    limit: int
    opened_at: float

    @property
    def stop(self) -> int:
        return self.start + self.limit


async def read_in_ranges(
    assembly: Assembly,
    pace: Pace,
    ask: Callable[[int, int], _SomeCall],
    read: Callable[[_SomeCall], Awaitable[_Part | None]],
    take: Callable[[_Part], object],
) -> None:
    """Complete `assembly`.

    Raises what `read` and `take` do, and RemoteProtocolError for a call that ends too early; the next try goes on from there.

    The next call is made when half of the present one's bytes are here, so that its own follow without a gap: at most one and
    a half calls' bytes are on the way.

    Args:
        pace: how many bytes a call asks for.
        ask: makes the call for so many bytes from a position on.
        read: returns a call's next message; None at its end.
        take: puts a message into `assembly`.
    """
    now = asyncio.get_running_loop().time
    calls: list[_Range[_SomeCall]] = []  # the present one, and the one ahead

    def begin(start: int) -> _Range[_SomeCall]:
        calls.append(_Range(ask(start, limit := pace.bytes), start, limit, now()))
        return calls[-1]

    try:
        while not assembly.complete:
            present = calls[0] if calls else begin(assembly.received)
            while (part := await read(present.call)) is not None:
                take(part)
                total = assembly.total_bytes
                half = present.stop - present.limit // 2
                if len(calls) == 1 and total is not None and half <= assembly.received and present.stop < total:
                    begin(present.stop)
            count = assembly.received - present.start
            if count:
                pace.carried(count, now() - present.opened_at, asked=present.limit)
            if not assembly.complete and not (count and (count == present.limit or assembly.at_an_end)):
                assembly.refuse_end()
            calls.pop(0)
            if calls and calls[0].start != assembly.received:
                calls.pop().call.cancel()
    finally:
        for each in calls:
            each.call.cancel()
