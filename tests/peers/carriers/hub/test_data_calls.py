"""Calls in which nothing moves are given up; those in which something does take as long as they like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest
import torch

from edit.config.codec import CodecChoice
from edit.errors import GoneError, TransportError
from edit.fragments.digest import combine, fragment_hash
from edit.fragments.shards import Shard
from edit.records import Commit, FragmentCommit
from editpb import data_pb2, data_pb2_grpc, tensors_pb2
from editpb.data_messages import update_manifest_to_pb
from editpb.messages import SnapshotManifest, SnapshotRequest
from editpb.transport.chunks import make_chunks
from editpb.transport.sealing import Seal, new_key
from editpb.transport.send_limit import UNLIMITED
from peers.carriers.hub.assemblies import UpdateAssembly
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.data_calls import STALL_S, DataCalls, StallTimeout
from peers.carriers.run_connection import Traffic
from tests.support.encoded import encode
from tests.support.fake_donor import Break, FakeDonor, dripping, listening, silent
from tests.support.fake_run import schema_of, vectors
from tests.support.loops import pass_time, run_held
from tests.support.wire import header

SIZES = (40,)
SCHEMA = schema_of(SIZES)
THETA = vectors(SIZES, seed=3)
HASHES = tuple(fragment_hash(theta) for theta in THETA)
MUCH = 1 << 26  # more than travels to who does not read
WHOLE = [Shard(fragment) for fragment in SCHEMA.fragments]
PAYLOAD = encode("fp32", THETA[0])


class Speechless(data_pb2_grpc.DataServicer):
    """Takes every call, reads nothing of it and never answers."""

    async def Contribute(
        self, requests: AsyncIterator[data_pb2.ContributePart], context: grpc.aio.ServicerContext
    ) -> data_pb2.ContributionReceipt:
        await asyncio.Event().wait()
        return data_pb2.ContributionReceipt()

    async def Found(
        self, requests: AsyncIterator[data_pb2.FoundPart], context: grpc.aio.ServicerContext
    ) -> data_pb2.FoundReply:
        await asyncio.Event().wait()
        return data_pb2.FoundReply()

    async def FetchUpdate(
        self, request: data_pb2.UpdateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[data_pb2.UpdatePart]:
        await asyncio.Event().wait()
        yield data_pb2.UpdatePart()


@asynccontextmanager
async def serving(servicer: data_pb2_grpc.DataServicer) -> AsyncIterator[Channels]:
    server = grpc.aio.server()
    data_pb2_grpc.add_DataServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = Channels([f"127.0.0.1:{port}"])
    try:
        yield channels
    finally:
        await channels.close()
        await server.stop(None)


def ask(call: Callable[[DataCalls], Awaitable[object]]) -> None:
    """Make this call to a coordinator that never answers."""

    async def scenario() -> None:
        async with serving(Speechless()) as channels:
            await call(DataCalls(channels, "run-0a1b2c3d", Traffic(), stall_s=0.2))  # it always passes

    asyncio.run(scenario())


class Taking(data_pb2_grpc.DataServicer):
    """Takes contributions, knows no update, and keeps over which connection each call came."""

    def __init__(self) -> None:
        self.came: list[tuple[str, str]] = []

    async def Contribute(
        self, requests: AsyncIterator[data_pb2.ContributePart], context: grpc.aio.ServicerContext
    ) -> data_pb2.ContributionReceipt:
        self.came.append(("Contribute", context.peer()))
        end = 0
        async for part in requests:
            if part.WhichOneof("kind") == "chunk":
                end = part.chunk.offset + len(part.chunk.data)
        return data_pb2.ContributionReceipt(complete=end == MUCH, received_bytes=end)

    async def FetchUpdate(
        self, request: data_pb2.UpdateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[data_pb2.UpdatePart]:
        self.came.append(("FetchUpdate", context.peer()))
        await context.abort(grpc.StatusCode.NOT_FOUND, "no longer kept")
        yield data_pb2.UpdatePart()


@pytest.mark.parametrize("slow", [True, False])
def test_over_a_slow_link_updates_have_a_connection_beside_the_contributions(slow: bool) -> None:
    async def scenario() -> list[tuple[str, str]]:
        async with serving(taking := Taking()) as channels:
            data = DataCalls(channels, "run-0a1b2c3d", Traffic())
            data._pace_up.carried(MUCH, 100.0 if slow else 0.1, asked=MUCH)
            await data.contribute(header(total_bytes=MUCH), memoryview(bytes(MUCH)), never)
            data._pace_up.carried(MUCH, 100.0 if slow else 0.1, asked=MUCH)  # whatever it took just now
            for _ in range(2):
                with pytest.raises(GoneError):
                    await data.update(UpdateAssembly(SCHEMA, 3, (0,), WHOLE), never, lambda: None)
        return taking.came

    came = asyncio.run(scenario())
    contributed = {peer for call, peer in came if call == "Contribute"}
    updated = [peer for call, peer in came if call == "FetchUpdate"]
    assert len(contributed) == 1 and len(set(updated)) == 1 and len(updated) == 2
    assert (updated[0] in contributed) is not slow
    assert (sum(call == "Contribute" for call, _ in came) > 1) is slow, "in pieces"


class Marking(data_pb2_grpc.DataServicer):
    """Says that bytes come ahead of the commit, and sends none, three times."""

    def __init__(self) -> None:
        self.calls = 0

    async def FetchUpdate(
        self, request: data_pb2.UpdateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[data_pb2.UpdatePart]:
        self.calls += 1
        if self.calls > 3:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no longer kept")
        yield data_pb2.UpdatePart(ahead=data_pb2.UpdateAhead())


def test_a_call_that_brings_nothing_ahead_of_the_commit_has_failed() -> None:
    """Else who sends the mark and no bytes is asked again at once, for ever."""

    async def scenario() -> int:
        async with serving(marking := Marking()) as channels:
            assembly = UpdateAssembly(SCHEMA, 3, (0,), WHOLE, round_id=7, choice=CodecChoice("fp32"))
            with pytest.raises(TransportError, match="nothing has come ahead of the commit"):
                await DataCalls(channels, "run-0a1b2c3d", Traffic()).update(assembly, never, lambda: None)
        return marking.calls

    assert asyncio.run(scenario()) == 1


class Breaking(data_pb2_grpc.DataServicer):
    """Sends some of an update ahead of its commit; then the manifest with the key, and breaks. From then on it is away."""

    def __init__(self, ahead: int) -> None:
        self._ahead, self._key, self.calls = ahead, new_key(), 0

    async def FetchUpdate(
        self, request: data_pb2.UpdateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[data_pb2.UpdatePart]:
        self.calls += 1
        if self.calls == 1:
            sealed = Seal(self._key, WHOLE[0])(bytes(PAYLOAD.data)[: self._ahead])
            yield data_pb2.UpdatePart(ahead=data_pb2.UpdateAhead())
            yield chunk(0, sealed)
            return
        if self.calls == 2:
            yield manifest(self._key)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")


class OwnHost(data_pb2_grpc.DataServicer):
    """Has the update, from the second call on."""

    def __init__(self) -> None:
        self.calls = 0

    async def FetchUpdate(
        self, request: data_pb2.UpdateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[data_pb2.UpdatePart]:
        self.calls += 1
        if self.calls == 1:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here yet")
        if request.offset == 0:
            yield manifest()
        data = bytes(PAYLOAD.data)
        if request.offset < len(data):
            yield chunk(request.offset, data[request.offset :])


def manifest(key: bytes = b"") -> data_pb2.UpdatePart:
    fragment = FragmentCommit(fragment_id=0, payload=PAYLOAD, verdicts=(), merged_norm=1.0, clip=1.0)
    commit = Commit(outer_step=3, round_id=7, digest="0" * 64, reason="all in", fragments=(fragment,))
    return data_pb2.UpdatePart(manifest=update_manifest_to_pb(commit, key=key))


def chunk(offset: int, data: bytes) -> data_pb2.UpdatePart:
    return data_pb2.UpdatePart(chunk=data_pb2.FragmentChunk(fragment_id=0, chunk=tensors_pb2.Chunk(offset=offset, data=data)))


def fetched_beside(own: data_pb2_grpc.DataServicer, aggregator: data_pb2_grpc.DataServicer) -> bytes:
    """Fetch the update as a peer with a host of its own does; return its bytes."""

    async def scenario() -> bytes:
        async with serving(own) as near, serving(aggregator) as channels:
            channels.taken = lambda: near.data()  # type: ignore[method-assign]
            assembly = UpdateAssembly(SCHEMA, 3, (0,), WHOLE, round_id=7, choice=CodecChoice("fp32"))
            await DataCalls(channels, "run-0a1b2c3d", Traffic()).update(
                assembly, partial(next, iter([True]), False), lambda: None
            )
            payload = assembly.payload(0)
            assert payload is not None
            return bytes(payload.data)

    return asyncio.run(scenario())


@pytest.mark.parametrize("ahead", [1, 4 * SIZES[0] - 1, 4 * SIZES[0]])
def test_an_owner_that_dies_with_its_manifest_sent_leaves_what_came_sealed_to_be_used(ahead: int) -> None:
    """The peer has the key by then, goes on at its own host, and may need no byte more from there."""
    assert fetched_beside(OwnHost(), Breaking(ahead)) == bytes(PAYLOAD.data)


def never() -> bool:
    return False


def snapshot(aggregator: FakeDonor, traffic: Traffic | None = None) -> list[torch.Tensor]:
    """Read it on a `HeldLoop`."""

    async def scenario() -> list[torch.Tensor]:
        async with listening(aggregator):
            hashes = {"digest": combine(HASHES), "fragment_hash": HASHES}
            manifest = SnapshotManifest(outer_step=12, schema=SCHEMA, run_outer_step=14, **hashes)
            channels = Channels([aggregator.address])
            data = DataCalls(channels, "run-0a1b2c3d", traffic or Traffic())
            try:
                got = await data.snapshot(manifest, WHOLE, never)
            finally:
                await channels.close()
            assert (got.outer_step, got.run_outer_step) == (12, 14)
            return list(got.fragments)

    return run_held(scenario())


CALLS: dict[str, Callable[[DataCalls], Awaitable[object]]] = {
    "contribute": lambda data: data.contribute(header(total_bytes=MUCH), memoryview(bytes(MUCH)), never),
    "found": lambda data: data.found(schema_of((MUCH // 4,)), [torch.zeros(MUCH // 4)], combine(HASHES), never),
    "update": lambda data: data.update(UpdateAssembly(SCHEMA, 3, (0,), WHOLE), never, lambda: None),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_that_never_comes_is_not_waited_for(name: str) -> None:
    with pytest.raises(TransportError, match=r"nothing has moved for 0\.2 s"):
        ask(CALLS[name])


def test_a_snapshot_that_never_comes_is_not_waited_for() -> None:
    with pytest.raises(TransportError, match="nothing has moved"):
        snapshot(FakeDonor(SCHEMA, THETA, silent))


def test_a_snapshot_that_drips_takes_as_long_as_it_takes() -> None:
    traffic = Traffic()
    aggregator = FakeDonor(SCHEMA, THETA, dripping(traffic, gap_s=0.9 * STALL_S))
    assert all(map(torch.equal, snapshot(aggregator, traffic), THETA))


async def at_its_deadline(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
    """Each call ends after a few bytes more."""
    for chunk in make_chunks(data, 32, start=wanted.offset):
        yield chunk
        if chunk.offset + len(chunk.data) < len(data):
            raise Break(grpc.StatusCode.DEADLINE_EXCEEDED)


async def past_its_deadline(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
    raise Break(grpc.StatusCode.DEADLINE_EXCEEDED)
    yield


def test_a_snapshot_that_takes_longer_than_a_call_may_is_read_on() -> None:
    aggregator = FakeDonor(SCHEMA, THETA, at_its_deadline)
    assert all(map(torch.equal, snapshot(aggregator), THETA))
    assert [offset for _, offset, _ in aggregator.asked] == list(range(0, 4 * SIZES[0], 32))


def test_a_call_that_brought_nothing_by_its_deadline_has_failed() -> None:
    with pytest.raises(TransportError):
        snapshot(FakeDonor(SCHEMA, THETA, past_its_deadline))


def test_each_movement_gives_the_whole_time_anew() -> None:
    async def scenario() -> float:
        async with StallTimeout(10.0) as moving:
            for _ in range(5):
                pass_time(9.0)
                moving.moved()
                await asyncio.sleep(0)
        moving.moved()  # after the end: nothing
        return asyncio.get_running_loop().time()

    assert run_held(scenario()) == 45.0


def test_when_all_is_sent_the_answer_may_take_its_time() -> None:
    async def scenario() -> list[tensors_pb2.Chunk]:
        async with StallTimeout(10.0) as moving:
            chunks = [chunk async for chunk in moving.sending(UNLIMITED.paced(make_chunks(memoryview(bytes(10)), 4)))]
            pass_time(1000.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return chunks

    assert [len(chunk.data) for chunk in run_held(scenario())] == [4, 4, 2]


def test_what_is_not_all_sent_has_its_bound() -> None:
    async def scenario() -> None:
        async with StallTimeout(10.0) as moving:
            await anext(moving.sending(UNLIMITED.paced(make_chunks(memoryview(bytes(10)), 4))))
            pass_time(1000.0)
            await asyncio.Event().wait()

    with pytest.raises(TransportError, match="nothing has moved for 10 s"):
        run_held(scenario())


def test_cancelled_is_cancelled() -> None:
    async def scenario() -> None:
        async def hangs() -> None:
            async with StallTimeout(10.0):
                await asyncio.Event().wait()

        task = asyncio.create_task(hangs())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())
