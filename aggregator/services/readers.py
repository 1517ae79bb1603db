"""How many read snapshots, updates and audit logs at a time, in how large messages, and when a reader has stalled."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import TypeVar

from edit.errors import BusyError
from editpb.limits import CHUNK_BYTES
from editpb.transport.send_limit import UNLIMITED, SendLimit, size_of

__all__ = [
    "CALLS_OF_RANK",
    "LEAST_CHUNK_BYTES",
    "MAX_AUDITORS",
    "MAX_OBSERVERS",
    "MAX_OF_MEMBER",
    "MAX_READERS",
    "SENT_BYTES",
    "SHARDS_OF_MEMBER",
    "STALL_S",
    "AuditReaders",
    "Place",
    "SnapshotReaders",
    "UpdateReaders",
    "send",
]

MAX_READERS = 64  # calls that read snapshots at a time, those that have stalled not counted; a rank has one, or two
MAX_OF_MEMBER = 16  # of one identity, those that have stalled counted; the ranks of a replica share one
MAX_OBSERVERS = 32  # who is no peer; the other places are the peers'
MAX_AUDITORS = 2  # that fetch at a time, those that have stalled not counted: each reads as fast as the disk does
CALLS_OF_RANK = 8  # that read updates at a time, two for each, for each rank that attends; those that have stalled counted
SHARDS_OF_MEMBER = 8  # shards of fragments, cut for one member, that are in memory at a time
SENT_BYTES = 8 << 20  # of updates, in the messages that are being sent at a time; gRPC holds each of them three times
LEAST_CHUNK_BYTES = 64 << 10
STALL_S = 30.0  # a reader that takes no message for so long gives its place to others

_Message = TypeVar("_Message")


async def send(
    write: Callable[[_Message], Awaitable[None]],
    messages: AsyncGenerator[_Message, None],
    stall_s: float = STALL_S,
    stalled: Callable[[], object] = lambda: None,
    limit: SendLimit = UNLIMITED,
    least_bytes_per_s: float = 0.0,
) -> None:
    """Send the messages of a stream, each as soon as `limit` lets it go, and close `messages`.

    A reader that takes none for `stall_s` seconds has stalled, and so has one that was waited for so long altogether and takes
    less than `least_bytes_per_s` on the whole (0: that is not asked for): `messages` is closed with all that it holds,
    and `stalled` is called. The message that is not read stays in memory until the reader reads again, which raises BusyError,
    or the deadline of its call, if it has one, or its connection is gone: gRPC can neither take it back nor send a status past
    it.
    """
    clock, waited, taken = asyncio.get_running_loop().time, 0.0, 0
    async with contextlib.aclosing(messages):
        async for message in messages:
            await limit.room(size_of(message))
            writing, begun = asyncio.ensure_future(write(message)), clock()
            credit = taken / least_bytes_per_s - waited if least_bytes_per_s else 0.0
            patience = max(0.0, stall_s + min(0.0, credit))
            try:
                done, _ = await asyncio.wait((writing,), timeout=patience)
            except asyncio.CancelledError:
                writing.cancel()
                raise
            if not done:
                break
            await writing
            waited, taken = waited + clock() - begun, taken + size_of(message)
        else:
            return
    stalled()
    await writing
    slow = f"nothing was read for {stall_s:g} s" if patience == stall_s else "this was read too slowly"
    raise BusyError(f"{slow}, so others came first; read on from here")


class SnapshotReaders:
    """The readers of snapshots of one coordinator. Used on the event loop."""

    def __init__(self) -> None:
        self._reading: set[Place] = set()  # without those that have stalled
        self._of_member: Counter[str] = Counter()  # by peer_id, with those that have stalled

    def __len__(self) -> int:
        return len(self._reading)

    @contextlib.contextmanager
    def place(self, peer_id: str, role: str) -> Iterator[Place]:
        """Take a place, until the block ends. Raises BusyError when there is none."""
        others = sum(place.role != "peer" for place in self._reading)
        if self._of_member[peer_id] >= MAX_OF_MEMBER:
            raise BusyError(f"{peer_id} reads {MAX_OF_MEMBER} snapshots here already; end one of them, or try again later")
        if len(self._reading) >= MAX_READERS or (role != "peer" and others >= MAX_OBSERVERS):
            raise BusyError(f"{len(self._reading)} others read snapshots here already; try again later")
        place = Place(role, self._reading)
        self._reading.add(place)
        self._of_member[peer_id] += 1
        try:
            yield place
        finally:
            place.give_up()
            self._of_member -= Counter((peer_id,))  # drops what is 0


class Place:
    """The place of one reader."""

    def __init__(self, role: str, reading: set[Place]) -> None:
        self.role, self._reading = role, reading

    def give_up(self) -> None:
        """Leave the place to others; the reader counts among its member's as long as its call lasts."""
        self._reading.discard(self)


class AuditReaders:
    """The auditors that fetch from one coordinator, one call of each. Used on the event loop."""

    def __init__(self) -> None:
        self._reading: set[Place] = set()  # without those that have stalled
        self._calling: set[str] = set()  # by peer_id, with those that have stalled

    def __len__(self) -> int:
        return len(self._reading)

    @contextlib.contextmanager
    def place(self, peer_id: str) -> Iterator[Place]:
        """Take a place, until the block ends. Raises BusyError when there is none."""
        if peer_id in self._calling:
            raise BusyError(f"{peer_id} fetches here already; end that fetch, or try again later")
        if len(self._reading) >= MAX_AUDITORS:
            raise BusyError(f"{len(self._reading)} auditors fetch here already; try again later")
        place = Place("auditor", self._reading)
        self._reading.add(place)
        self._calling.add(peer_id)
        try:
            yield place
        finally:
            place.give_up()
            self._calling.discard(peer_id)


class UpdateReaders:
    """The readers of updates of one coordinator. Used on the event loop.

    Every rank of every peer reads each update, all at the same time, so only one member's are limited.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()  # by peer_id
        self._room: dict[str, asyncio.Semaphore] = {}

    def __len__(self) -> int:
        return self._calls.total()

    @property
    def chunk_bytes(self) -> int:
        """How large the next chunk to any of them is: the more read, the smaller, so that their number costs no memory."""
        return max(LEAST_CHUNK_BYTES, min(CHUNK_BYTES, SENT_BYTES // max(1, len(self))))

    @contextlib.contextmanager
    def place(self, peer_id: str, ranks: int) -> Iterator[asyncio.Semaphore]:
        """Take a place, until the block ends; get the member's room for shards, which hold memory of their own.

        ranks: of the member, that attend. Raises BusyError when it reads as many as it may.
        """
        most = CALLS_OF_RANK * max(1, ranks)
        if self._calls[peer_id] >= most:
            raise BusyError(f"{peer_id} reads {most} updates here already; end one of them, or try again later")
        self._calls[peer_id] += 1
        try:
            yield self._room.setdefault(peer_id, asyncio.Semaphore(SHARDS_OF_MEMBER))
        finally:
            self._calls -= Counter((peer_id,))  # drops what is 0
            if peer_id not in self._calls:
                self._room.pop(peer_id)
