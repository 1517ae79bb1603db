"""Members that ask for snapshots and do not read them: what they hold in memory is bounded, and honest peers are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch

import aggregator.services.data
from aggregator.data.published import MAX_PAST
from aggregator.services.snapshot_readers import MAX_OBSERVERS, MAX_OF_MEMBER, SnapshotReaders
from edit.errors import TransportError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from editpb import data_pb2, data_pb2_grpc
from editpb.channel_options import MAX_STREAMS
from editpb.data_messages import snapshot_request_to_pb
from editpb.messages import SnapshotRequest
from editpb.status import from_status
from tests.support.loops import WAIT_S, on_a_loop, until
from tests.support.served import BarePeer, Served, found_run, new_folder, served, theta

SIDE = 2048
LARGE = Schema((FragmentSpec(fragment_id=0, name="layer", tensors=(TensorSpec(name="layer.weight", shape=(2 * SIDE, SIDE)),)),))
HALF = Shard(LARGE.fragments[0], [Box(0, (0, 0), (2 * SIDE, SIDE // 2))])  # columns: no run of it is contiguous
READS = 120


def request(run: Served, outer_step: int = 0, offset: int = 0) -> data_pb2.SnapshotRequest:
    return snapshot_request_to_pb(
        SnapshotRequest(run_id=run.folder.run_id, outer_step=outer_step, fragment_id=0, offset=offset, boxes=HALF.boxes)
    )


def described(run: Served) -> data_pb2.SnapshotManifestRequest:
    return data_pb2.SnapshotManifestRequest(run_id=run.folder.run_id)


async def commit(peer: BarePeer, outer_step: int) -> None:
    """One round more; it leads TO `outer_step`."""
    view = await peer.view(lambda view: view.round_id > 0 and view.outer_step == outer_step - 1)
    await peer.contribute(view.round_id, outer_step - 1, [torch.ones(LARGE.numel)])
    done = await peer.view(lambda view: view.outer_step == outer_step)
    await peer.report(outer_step, done.digest)


@contextlib.asynccontextmanager
async def readers_of(run: Served, members: int, calls: int) -> AsyncIterator[list[grpc.aio.UnaryStreamCall]]:
    """So many observers, and of each so many calls that are never read."""
    async with contextlib.AsyncExitStack() as stack:
        opened: list[grpc.aio.UnaryStreamCall] = []
        for i in range(members):
            stub = data_pb2_grpc.DataStub(await stack.enter_async_context(run.channel(f"observer-{i}", "observer")))
            opened += [stub.FetchSnapshot(request(run)) for _ in range(calls)]
        yield opened
        for call in opened:
            call.cancel()


async def refused(calls: list[grpc.aio.UnaryStreamCall], count: int) -> None:
    """Wait until so many are refused, each with one line, as something that may be tried again."""
    codes = {asyncio.ensure_future(call.code()): call for call in calls}
    ended: set[asyncio.Future[grpc.StatusCode]] = set()
    async with asyncio.timeout(WAIT_S):
        while len(ended) < count:
            done, _ = await asyncio.wait(codes.keys() - ended, return_when=asyncio.FIRST_COMPLETED)
            ended |= done
    for one in ended:
        details = await codes[one].details()
        assert isinstance(from_status(one.result(), details), TransportError) and "\n" not in details
        if one.result() is not grpc.StatusCode.UNAVAILABLE:  # gRPC's own, for more streams than a connection may have
            assert one.result() is grpc.StatusCode.RESOURCE_EXHAUSTED and "try again later" in details
    for one in codes.keys() - ended:
        one.cancel()


@pytest.mark.parametrize(
    ("members", "calls", "count"),
    [(READS, 1, READS - MAX_OBSERVERS), (1, READS, READS - MAX_OF_MEMBER)],
    ids=["one of each of 120 observers", "120 of one observer"],
)
@on_a_loop
async def test_reads_that_are_never_read_are_few_and_a_peer_is_served_beside_them(
    tmp_path: Path, members: int, calls: int, count: int
) -> None:
    assert calls < MAX_STREAMS or members == 1
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        await peer.data.DescribeSnapshot(described(run))
        async with readers_of(run, members, calls) as opened:
            await refused(opened, count)
            whole = theta(0, LARGE)[0]
            assert await peer.snapshot_part(0, HALF) == HALF.take(whole).numpy().tobytes()
            await commit(peer, 1)


@on_a_loop
async def test_whoever_stalls_gives_its_place_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = SnapshotReaders(stall_s=0.2)
    monkeypatch.setattr(aggregator.services.data, "SnapshotReaders", lambda: readers)
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        await peer.data.DescribeSnapshot(described(run))
        async with readers_of(run, MAX_OBSERVERS, 1) as opened, asyncio.timeout(WAIT_S):
            await until(lambda: len(readers) == MAX_OBSERVERS)
            await until(lambda: not len(readers))
            for call in opened[:2]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                assert isinstance(from_status(caught.value.code(), caught.value.details()), TransportError)


@on_a_loop
async def test_readers_keep_no_more_past_outer_steps_than_there_is_room_for(tmp_path: Path) -> None:
    """Each reader describes a snapshot after another commit, and reminds of all of them, so that all are kept."""
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        async with run.channel("observer", "observer") as channel:
            stub, kept = data_pb2_grpc.DataStub(channel), list[int]()
            for outer_step in range(1, 6):
                kept.append((await stub.DescribeSnapshot(described(run))).outer_step)
                await commit(peer, outer_step)
            readable = set()
            for outer_step in range(6):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in stub.FetchSnapshot(request(run, outer_step, 4 * HALF.numel)):
                        pass
                    readable.add(outer_step)
        assert readable <= set(kept) and len(readable) <= MAX_PAST
        assert kept[-1] in readable  # who has just been told of one can read it
        assert await peer.snapshot_part(kept[-1], HALF)
