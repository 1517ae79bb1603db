"""Readers of snapshots and updates: as many as there are places, and whoever stalls gives its place to others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack

import pytest

from aggregator.services.readers import (
    CALLS_OF_RANK,
    LEAST_CHUNK_BYTES,
    MAX_AUDITORS,
    MAX_OBSERVERS,
    MAX_OF_MEMBER,
    MAX_READERS,
    SENT_BYTES,
    SHARDS_OF_MEMBER,
    AuditReaders,
    SnapshotReaders,
    UpdateReaders,
    send,
)
from edit.errors import BusyError
from editpb import tensors_pb2 as pb
from editpb.limits import CHUNK_BYTES
from tests.support.loops import on_a_loop, pass_time, run_held, until


def take(readers: SnapshotReaders, peer_id: str, count: int = 1, role: str = "peer") -> ExitStack:
    """Take so many places; they are free again when the stack is closed."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(readers.place(peer_id, role))
        return stack.pop_all()


def test_a_member_takes_no_more_places_than_its_own() -> None:
    readers = SnapshotReaders()
    with take(readers, "one", MAX_OF_MEMBER):
        with pytest.raises(BusyError, match="one reads 16 snapshots here already"):
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
        with pytest.raises(BusyError, match=f"{MAX_READERS} others read snapshots here already"):
            take(readers, "peer")
    assert len(readers) == 0


def test_an_auditor_has_one_place_and_stalled_ones_leave_theirs_to_others() -> None:
    readers = AuditReaders()
    with ExitStack() as taken:
        first, _ = (taken.enter_context(readers.place(f"auditor-{i}")) for i in range(MAX_AUDITORS))
        with pytest.raises(BusyError, match="auditor-0 fetches here already; end that fetch"):
            taken.enter_context(readers.place("auditor-0"))
        with pytest.raises(BusyError, match=f"{MAX_AUDITORS} auditors fetch here already; try again later"):
            taken.enter_context(readers.place("another"))
        first.give_up()
        taken.enter_context(readers.place("another"))
        with pytest.raises(BusyError, match="auditor-0 fetches here already"):  # its call goes on
            taken.enter_context(readers.place("auditor-0"))
    assert len(readers) == 0
    with readers.place("auditor-0"):
        pass


def test_a_member_reads_so_many_updates_for_each_rank_that_attends() -> None:
    readers = UpdateReaders()
    for ranks, most in ((0, CALLS_OF_RANK), (1, CALLS_OF_RANK), (3, 3 * CALLS_OF_RANK)):
        with ExitStack() as taken:
            rooms = [taken.enter_context(readers.place("one", ranks)) for _ in range(most)]
            with pytest.raises(BusyError, match=f"one reads {most} updates here already"):
                taken.enter_context(readers.place("one", ranks))
            other = taken.enter_context(readers.place("another", 1))
            assert len({id(room) for room in rooms}) == 1 and other is not rooms[0]
            assert rooms[0]._value == SHARDS_OF_MEMBER
        assert len(readers) == 0


@pytest.mark.parametrize("readers", [0, 1, 8, 9, 32, 128, 1000])
def test_the_more_read_the_smaller_their_messages(readers: int) -> None:
    updates = UpdateReaders()
    with ExitStack() as taken:
        for i in range(readers):
            taken.enter_context(updates.place(f"peer-{i}", 1))
        size = updates.chunk_bytes
    assert size == CHUNK_BYTES if readers <= 8 else size < CHUNK_BYTES
    assert readers * size <= max(SENT_BYTES, readers * LEAST_CHUNK_BYTES)


@on_a_loop
async def test_a_stalled_reader_gives_its_place_to_others_and_hears_why_once_it_reads_again() -> None:
    readers, reads, stalled, held = SnapshotReaders(), asyncio.Event(), asyncio.Event(), ["all that the stream would send"]

    async def chunks() -> AsyncGenerator[pb.Chunk, None]:
        try:
            yield pb.Chunk()
            yield pb.Chunk()
        finally:
            held.clear()

    async def write(chunk: pb.Chunk) -> None:
        stalled.set()
        await reads.wait()

    async def read() -> None:
        with readers.place("one", "observer") as place:
            await send(write, chunks(), 0.0, place.give_up)

    async with asyncio.timeout(30):
        reading = asyncio.ensure_future(read())
        await stalled.wait()
        await until(lambda: not len(readers))
        assert not held
        with pytest.raises(BusyError):  # its call goes on, so it counts still
            take(readers, "one", MAX_OF_MEMBER)
        reads.set()
        with pytest.raises(BusyError, match="nothing was read for 0 s"):
            await reading
        with take(readers, "one", MAX_OF_MEMBER):
            pass


def test_a_reader_that_is_slow_on_the_whole_gives_its_place_to_others_though_it_never_stalls() -> None:
    """It takes 64 bytes each 2 s; 64 bytes per second are asked for, beyond 10 s that are waited for altogether."""
    sent, stalled = list[int](), list[int]()

    async def chunks() -> AsyncGenerator[pb.Chunk, None]:
        for i in range(100):
            yield pb.Chunk(data=bytes(62))  # of 64 bytes in all
            sent.append(i)

    async def write(chunk: pb.Chunk) -> None:
        await asyncio.sleep(2.0)

    async def passing() -> None:
        while True:
            pass_time(0.05)
            await asyncio.sleep(0)

    async def read(least_bytes_per_s: float) -> None:
        time_passes = asyncio.ensure_future(passing())
        try:
            await send(write, chunks(), 10.0, lambda: stalled.append(1), least_bytes_per_s=least_bytes_per_s)
        finally:
            time_passes.cancel()

    run_held(read(0.0))
    assert len(sent) == 100 and not stalled
    sent.clear()
    with pytest.raises(BusyError, match="this was read too slowly"):
        run_held(read(64.0))
    assert 5 <= len(sent) <= 12 and stalled
    sent.clear()
    run_held(read(16.0))
    assert len(sent) == 100


@on_a_loop
async def test_a_reader_that_goes_away_leaves_nothing_behind() -> None:
    readers, stalled, cancelled = SnapshotReaders(), asyncio.Event(), asyncio.Event()

    async def chunks() -> AsyncGenerator[pb.Chunk, None]:
        yield pb.Chunk()

    async def write(chunk: pb.Chunk) -> None:
        stalled.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def read(stall_s: float) -> None:
        with readers.place("one", "observer") as place:
            await send(write, chunks(), stall_s, place.give_up)

    for stall_s in (0.0, 1e6):
        reading = asyncio.ensure_future(read(stall_s))
        async with asyncio.timeout(30):
            await stalled.wait()
            await until(lambda expected=int(stall_s > 0): len(readers) == expected)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await cancelled.wait()
        assert len(readers) == 0
        stalled.clear(), cancelled.clear()
