"""Readers of snapshots: as many as there are places, and whoever stalls gives its place to others."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from aggregator.services.snapshot_readers import MAX_OBSERVERS, MAX_OF_MEMBER, MAX_READERS, SnapshotReaders
from edit.errors import BusyError
from editpb import tensors_pb2 as pb
from tests.support.loops import on_a_loop, until


def take(readers: SnapshotReaders, peer_id: str, count: int = 1, role: str = "peer") -> ExitStack:
    """Take so many places; they are free again when the stack is closed."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(readers.place(peer_id, role))
        return stack.pop_all()


def test_a_member_takes_no_more_places_than_its_own() -> None:
    readers = SnapshotReaders()
    with take(readers, "one", MAX_OF_MEMBER):
        with pytest.raises(BusyError, match="one reads 8 snapshots here already"):
            take(readers, "one")
        with take(readers, "another"):
            assert len(readers) == MAX_OF_MEMBER + 1
    with take(readers, "one"):
        assert len(readers) == 1


def test_observers_leave_places_for_the_peers() -> None:
    readers = SnapshotReaders()
    with ExitStack() as taken:
        for i in range(MAX_OBSERVERS):
            taken.enter_context(take(readers, f"observer-{i}", role="observer"))
        with pytest.raises(BusyError):
            take(readers, "observer", role="observer")
        for i in range(MAX_READERS - MAX_OBSERVERS):
            taken.enter_context(take(readers, f"peer-{i}"))
        with pytest.raises(BusyError, match="32 others read snapshots here already"):
            take(readers, "peer")
    assert len(readers) == 0


@on_a_loop
async def test_a_stalled_reader_gives_its_place_to_others_and_hears_why_once_it_reads_again() -> None:
    readers, reads, stalled = SnapshotReaders(stall_s=0.0), asyncio.Event(), asyncio.Event()

    async def write(chunk: pb.Chunk) -> None:
        stalled.set()
        await reads.wait()

    async def read() -> None:
        with readers.place("one", "observer") as place:
            await place.write(write, [pb.Chunk(), pb.Chunk()])

    async with asyncio.timeout(30):
        reading = asyncio.ensure_future(read())
        await stalled.wait()
        await until(lambda: not len(readers))
        with pytest.raises(BusyError):  # what it holds in memory still counts as its own
            take(readers, "one", MAX_OF_MEMBER)
        reads.set()
        with pytest.raises(BusyError, match="nothing was read for 0 s"):
            await reading
