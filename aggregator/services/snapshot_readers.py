"""How many read snapshots here at a time, and how long one is waited for that reads nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edit.errors import BusyError

if TYPE_CHECKING:
    from editpb import tensors_pb2 as pb

__all__ = ["MAX_OBSERVERS", "MAX_OF_MEMBER", "MAX_READERS", "STALL_S", "Place", "SnapshotReaders"]

MAX_READERS = 32  # at a time, those that have stalled not counted
MAX_OF_MEMBER = 8  # of one identity, those that have stalled counted; the ranks of a replica share one
MAX_OBSERVERS = 16  # who is no peer; the other places are the peers'
STALL_S = 30.0  # a reader that takes no chunk for so long gives its place to others


class SnapshotReaders:
    """The readers of one coordinator. Used on the event loop.

    Args:
        stall_s: a reader that takes no chunk for so many seconds has stalled.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._reading: set[Place] = set()  # without those that have stalled
        self._of_member: Counter[str] = Counter()  # by peer_id, with those that have stalled

    def __len__(self) -> int:
        return len(self._reading)

    @contextmanager
    def place(self, peer_id: str, role: str) -> Iterator[Place]:
        """Take a place, until the block ends. Raises BusyError when there is none."""
        others = sum(place.role != "peer" for place in self._reading)
        if self._of_member[peer_id] >= MAX_OF_MEMBER:
            raise BusyError(f"{peer_id} reads {MAX_OF_MEMBER} snapshots here already; end one of them, or try again later")
        if len(self._reading) >= MAX_READERS or (role != "peer" and others >= MAX_OBSERVERS):
            raise BusyError(f"{len(self._reading)} others read snapshots here already; try again later")
        place = Place(role, self._stall_s, self._reading)
        self._reading.add(place)
        self._of_member[peer_id] += 1
        try:
            yield place
        finally:
            self._reading.discard(place)
            self._of_member[peer_id] -= 1
            if not self._of_member[peer_id]:
                del self._of_member[peer_id]


class Place:
    """The place of one reader."""

    def __init__(self, role: str, stall_s: float, reading: set[Place]) -> None:
        self.role = role
        self._stall_s, self._reading = stall_s, reading

    async def write(self, write: Callable[[pb.Chunk], Awaitable[None]], chunks: Iterable[pb.Chunk]) -> None:
        """Send the chunks. Raises BusyError once a reader that has stalled reads again.

        Until then, or until its connection is gone, its last chunk stays in memory, and it counts among its member's readers:
        no status would reach it before.
        """
        for chunk in chunks:
            writing = asyncio.ensure_future(write(chunk))
            try:
                done, _ = await asyncio.wait((writing,), timeout=self._stall_s)
                if not done:
                    self._reading.discard(self)
                await writing
            finally:
                writing.cancel()
            if not done:
                raise BusyError(f"nothing was read for {self._stall_s:g} s, so others came first; read on from here")
