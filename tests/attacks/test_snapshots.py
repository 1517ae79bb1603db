"""Members that ask for snapshots or updates and read none: what they hold in memory is bounded, and honest peers are served."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import torch

import aggregator.data.published
import aggregator.services.data
from aggregator.data.published import MAX_PAST
from aggregator.services.readers import (
    CALLS_OF_RANK,
    MAX_OBSERVERS,
    MAX_OF_MEMBER,
    SHARDS_OF_MEMBER,
    Place,
    SnapshotReaders,
    UpdateReaders,
    send,
)
from edit.errors import TransportError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.records import EncodedTensor
from editpb import data_pb2, data_pb2_grpc
from editpb.data_messages import snapshot_request_to_pb, update_request_to_pb
from editpb.limits import MAX_READ_S
from editpb.messages import SnapshotRequest, UpdateRequest
from editpb.transport.channel_options import MAX_STREAMS
from editpb.transport.status import from_status
from tests.support.loops import WAIT_S, on_a_loop, until
from tests.support.served import BarePeer, Served, found_run, new_folder, served, theta

SIDE = 2048
LARGE = Schema((FragmentSpec(fragment_id=0, name="layer", tensors=(TensorSpec(name="layer.weight", shape=(2 * SIDE, SIDE)),)),))
HALF = Shard(LARGE.fragments[0], [Box(0, (0, 0), (2 * SIDE, SIDE // 2))])  # columns: no run of it is contiguous
READS = 120
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))  # else gRPC reads ahead, at last all of it


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
            stub = data_pb2_grpc.DataStub(
                await stack.enter_async_context(run.channel(f"observer-{i}", "observer", options=NARROW))
            )
            opened += [stub.FetchSnapshot(request(run), timeout=MAX_READ_S) for _ in range(calls)]
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


@pytest.mark.sampled(2)
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


class CountedReaders(SnapshotReaders):
    """Counts the places that were ever taken."""

    taken = 0

    def place(self, peer_id: str, role: str) -> contextlib.AbstractContextManager[Place]:
        self.taken += 1
        return super().place(peer_id, role)


def stall_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator.services.data, "send", functools.partial(send, stall_s=0.2))


async def told_to_try_again(calls: list[grpc.aio.UnaryStreamCall]) -> None:
    """Read them now: each ends with a status that may be tried again."""
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert isinstance(from_status(caught.value.code(), caught.value.details()), TransportError)


@on_a_loop
async def test_whoever_stalls_gives_its_place_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = CountedReaders()
    monkeypatch.setattr(aggregator.services.data, "SnapshotReaders", lambda: readers)
    stall_soon(monkeypatch)
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        await peer.data.DescribeSnapshot(described(run))
        async with readers_of(run, MAX_OBSERVERS, 1) as opened, asyncio.timeout(WAIT_S):
            await until(lambda: readers.taken == MAX_OBSERVERS and not len(readers))
            await told_to_try_again(opened[:2])


FROZEN = """
import sys
from pathlib import Path
import grpc
from editpb import data_pb2, data_pb2_grpc

ca, key, certificate, message = (Path(sys.argv[2], name).read_bytes() for name in ("ca", "key", "certificate", "message"))
channel = grpc.secure_channel(sys.argv[1], grpc.ssl_channel_credentials(ca, key, certificate))
stub = data_pb2_grpc.DataStub(channel)
calls = [stub.FetchSnapshot(data_pb2.SnapshotRequest.FromString(message), timeout=5.0) for _ in range(int(sys.argv[3]))]
sys.stdin.read()
"""


@on_a_loop
async def test_a_read_that_has_stalled_ends_with_its_deadline_whatever_its_reader_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is a process that is stopped: it reads nothing, answers nothing, and takes back nothing."""
    readers = SnapshotReaders()
    monkeypatch.setattr(aggregator.services.data, "SnapshotReaders", lambda: readers)
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        await peer.data.DescribeSnapshot(described(run))
        key, certificate = run.certificate("eve", "observer")
        files = {"ca": run.ca, "key": key, "certificate": certificate, "message": request(run).SerializeToString()}
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        command = (sys.executable, "-c", FROZEN, run.coordinator.listen, tmp_path, str(MAX_OF_MEMBER))
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        try:
            await until(lambda: len(readers) == MAX_OF_MEMBER)
            process.send_signal(signal.SIGSTOP)
            assert readers._of_member["eve"] == MAX_OF_MEMBER
            await until(lambda: not readers._of_member["eve"])
        finally:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("deadline_s", [None, 2 * MAX_READ_S])
@on_a_loop
async def test_a_read_without_a_deadline_is_refused(tmp_path: Path, deadline_s: float | None) -> None:
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        await peer.data.DescribeSnapshot(described(run))
        with pytest.raises(grpc.aio.AioRpcError, match="a snapshot is read with a deadline of at most 600 s"):
            async for _ in peer.data.FetchSnapshot(request(run), timeout=deadline_s):
                pass


def count_cuts(monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """The shards that were cut of updates, each of which is in memory until its reader has taken it."""
    cuts, codec = list[Shard](), aggregator.data.published.codec

    def counted(spec: str) -> SimpleNamespace:
        def cut(payload: EncodedTensor, shard: Shard) -> EncodedTensor:
            cuts.append(shard)
            return codec(spec).cut(payload, shard)

        of = codec(spec)
        return SimpleNamespace(cut=cut, cut_numel=of.cut_numel, encoded_size=of.encoded_size)

    monkeypatch.setattr(aggregator.data.published, "codec", counted)
    return cuts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 3])
@on_a_loop
async def test_updates_that_are_never_read_are_few_and_a_peer_is_served_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Each call that is not read would hold a shard of a fragment, and the whole update that it is of."""
    most, cuts = ranks * CALLS_OF_RANK, count_cuts(monkeypatch)
    readers = UpdateReaders()
    monkeypatch.setattr(aggregator.services.data, "UpdateReaders", lambda: readers)
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        async with run.replica("thief", ranks, LARGE, NARROW) as thieves:
            for thief in thieves:
                await thief.attend()
            await commit(peer, 1)
            wanted = update_request_to_pb(UpdateRequest(run_id=run.folder.run_id, outer_step=1, shards=(HALF,)))
            calls = [thief.data.FetchUpdate(wanted) for thief in thieves for _ in range(READS // ranks)]
            await refused(calls, len(calls) - most)
            await until(lambda: len(cuts) == min(most, SHARDS_OF_MEMBER))
            assert len(readers) == most
            update = await peer.fetch(1)
            assert update.outer_step == 1
            await commit(peer, 2)
            assert len(cuts) == min(most, SHARDS_OF_MEMBER)
            for call in calls:
                call.cancel()
            await until(lambda: not len(readers))


@on_a_loop
async def test_all_who_read_updates_share_the_memory_of_their_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator.services.readers, "SENT_BYTES", 3000)
    monkeypatch.setattr(aggregator.services.readers, "LEAST_CHUNK_BYTES", 100)
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        await commit(peer, 1)
        wanted = update_request_to_pb(UpdateRequest(run_id=run.folder.run_id, outer_step=1))
        sizes = [len(part.chunk.chunk.data) async for part in peer.data.FetchUpdate(wanted) if part.HasField("chunk")]
        assert max(sizes) == 3000 and len(sizes) > 1


@on_a_loop
async def test_who_reads_no_update_lets_go_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call goes on, with one message; the shard, and the update that it is of, are others' to forget."""
    cuts = count_cuts(monkeypatch)
    stall_soon(monkeypatch)
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        async with run.replica("thief", 3, LARGE, NARROW) as thieves:
            for thief in thieves:
                await thief.attend()
            await commit(peer, 1)
            wanted = update_request_to_pb(UpdateRequest(run_id=run.folder.run_id, outer_step=1, shards=(HALF,)))
            calls = [thieves[0].data.FetchUpdate(wanted) for _ in range(2)]
            async with asyncio.timeout(WAIT_S):
                await until(lambda: len(cuts) == 2)  # they are the first whose patience ends
                calls += [thief.data.FetchUpdate(wanted) for thief in thieves for _ in range(CALLS_OF_RANK)][2:]
                await until(lambda: len(cuts) == len(calls) > SHARDS_OF_MEMBER)  # so the first ones were let go
                await told_to_try_again(calls[:2])


@on_a_loop
async def test_readers_keep_no_more_past_outer_steps_than_there_is_room_for(tmp_path: Path) -> None:
    """Each reader describes a snapshot after another commit, and reminds of all of them, so that all are kept."""
    async with served(new_folder(tmp_path / "run")) as run, run.peer("honest", LARGE) as peer:
        await found_run(peer)
        async with run.channel("observer", "observer") as channel:
            stub, kept = data_pb2_grpc.DataStub(channel), list[int]()
            for outer_step in range(1, 6):
                manifest = await stub.DescribeSnapshot(described(run))
                assert manifest.run_outer_step == outer_step - 1 >= manifest.outer_step
                kept.append(manifest.outer_step)
                await commit(peer, outer_step)
            readable = set()
            for outer_step in range(6):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in stub.FetchSnapshot(request(run, outer_step, 4 * HALF.numel), timeout=WAIT_S):
                        pass
                    readable.add(outer_step)
        assert readable <= set(kept) and len(readable) <= MAX_PAST
        assert kept[-1] < 4  # it was shared
        assert kept[-1] in readable  # who has just been told of one can read it
        assert await peer.snapshot_part(kept[-1], HALF)
