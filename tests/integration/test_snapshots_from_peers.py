"""A real coordinator, peers that serve snapshots, and those that read them, over mutual TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import torch
from torch import Tensor

from aggregator.security.authority import Authority
from edit.errors import TransportError
from edit.fragments.digest import combine, digest, fragment_hash
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.replica.replica import Outer
from editpb import data_pb2, data_pb2_grpc, tensors_pb2
from editpb.data_messages import snapshot_request_to_pb
from editpb.identity import Identity
from editpb.messages import Serving, SnapshotRequest
from editpb.snapshot_cache import KEPT_S
from editpb.transport import guarded_calls
from editpb.transport.channel_options import Options, channel_options
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.data_calls import DataCalls
from peers.carriers.hub.snapshot_server import MAX_CALLS, MAX_PAST, MAX_READERS, SnapshotServer
from peers.carriers.run_connection import Traffic
from tests.support.served import SCHEMA, BarePeer, Served, found_run, new_folder, served, theta

WHOLE = [Shard(fragment) for fragment in SCHEMA.fragments]


def outer(step: int, fragments: list[Tensor]) -> Outer:
    hashes = tuple(map(fragment_hash, fragments))
    return Outer(step, combine(hashes), tuple(fragments), hashes)


@asynccontextmanager
async def serving(run: Served, peer_id: str, **options: object) -> AsyncIterator[SnapshotServer]:
    """peer_id's server, with a new certificate."""
    credentials = grpc.ssl_server_credentials([run.certificate(peer_id)], run.ca, require_client_auth=True)
    server = SnapshotServer(run.folder.run_id, credentials, "127.0.0.1:0", "127.0.0.1", **options)  # type: ignore[arg-type]
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def reading(run: Served, peer_id: str) -> AsyncIterator[DataCalls]:
    channels = Channels([run.coordinator.listen], run.credentials(peer_id))
    data = DataCalls(channels, run.folder.run_id, Traffic(), lambda: 0.0)
    try:
        yield data
    finally:
        await channels.close()


@asynccontextmanager
async def donating(run: Served) -> AsyncIterator[tuple[BarePeer, SnapshotServer]]:
    """Peer a has founded the run and serves its snapshot of outer step 0. Its certificate is the first of the two, which
    counts with nobody but the coordinator."""
    async with serving(run, "a") as server, run.peer("a") as a:
        await found_run(a)
        server.show(SCHEMA, outer(0, theta()))
        await a.report(0, digest(theta()), serving=server.offer(0))
        await named(run, "a")
        yield a, server


async def named(run: Served, *donors: str, at: Serving | None = None) -> None:
    """Wait until the coordinator names these donors; at: where."""
    async with asyncio.timeout(30), reading(run, "asks") as data:
        while True:
            manifest = await data.describe(SCHEMA, lambda: True)
            who, where = [donor.peer_id for donor in manifest.donors], [donor.serving for donor in manifest.donors]
            if sorted(who) == sorted(donors) and (at is None or where == [at]):
                return


async def take(run: Served, reader: str = "b") -> tuple[str, tuple[str, ...]]:
    """(digest of what was read, where it came from)."""
    async with reading(run, reader) as data:
        manifest = await data.describe(SCHEMA, lambda: True)
        snapshot = await data.snapshot(manifest, WHOLE, lambda: True)
        assert snapshot.digest == digest(snapshot.fragments)
        assert data.origin is not None
        return snapshot.digest, data.origin.sources


def test_who_joins_takes_its_snapshot_from_a_peer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, donating(run) as (_, server):
            assert await take(run) == (digest(theta()), ("a",))
            assert server.traffic.sent > 4 * SCHEMA.numel

    asyncio.run(scenario())


def test_a_donor_below_the_committed_step_is_not_named_and_its_successor_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, donating(run) as (a, server):
            view = await a.view(lambda v: v.round_id > 0)
            step = [torch.ones(fragment.numel) for fragment in SCHEMA.fragments]
            await a.contribute(view.round_id, 0, step)
            after = await a.view(lambda v: v.outer_step == 1)
            assert await take(run) == (after.digest, ("the aggregator",))
            server.show(SCHEMA, outer(1, [t - s for t, s in zip(theta(), step, strict=True)]))
            await a.report(1, after.digest, serving=server.offer(1))
            await named(run, "a")
            assert await take(run) == (after.digest, ("a",))

    asyncio.run(scenario())


def test_a_donor_with_another_digest_or_that_has_left_is_not_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, donating(run) as (a, server):
            await a.report(0, "0" * 64, serving=server.offer(0))
            await named(run)
            await a.report(0, digest(theta()), serving=server.offer(0))
            await named(run, "a")
            await a.goodbye()
            await named(run)
            assert (await take(run))[1] == ("the aggregator",)

    asyncio.run(scenario())


@pytest.mark.parametrize("impostor", ["another peer", "the coordinator's name"])
def test_a_server_that_is_not_the_peer_that_was_named_is_not_believed(tmp_path: Path, impostor: str) -> None:
    """It has a certificate of the run, for another name, and the right bytes."""

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, donating(run) as (a, _), serving(run, "mallory") as other:
            other.show(SCHEMA, outer(0, theta()))
            place = other.offer(0)
            assert place is not None
            if impostor == "the coordinator's name":  # the coordinator's own server has no ticket to heed and no peer's name
                place = Serving(run.coordinator.listen, place.ticket)
            await a.report(0, digest(theta()), serving=place)
            await named(run, "a", at=place)
            assert await take(run) == (digest(theta()), ("the aggregator",))
            assert other.traffic.sent == 0

    asyncio.run(scenario())


def test_a_peer_that_lies_about_its_parameters_is_left_and_the_run_never_hears_of_them(tmp_path: Path) -> None:
    """It says the right digest, and serves other bytes."""

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, donating(run) as (a, server):
            poisoned = [theta()[0], theta()[1].clone()]
            poisoned[1][7] += 1e-3
            truth = outer(0, theta())
            server.show(SCHEMA, Outer(0, truth.digest, tuple(poisoned), truth.hashes))
            await a.report(0, truth.digest, serving=server.offer(0))
            await named(run, "a", at=server.offer(0))
            assert await take(run) == (truth.digest, ("a", "the aggregator")), "its first fragment was right"
            assert server.traffic.sent > 4 * SCHEMA.numel

    asyncio.run(scenario())


async def ask(channel: grpc.aio.Channel, **changes: object) -> bytes:
    values = {"outer_step": 0, "fragment_id": 1, **changes}
    request = snapshot_request_to_pb(SnapshotRequest(**values))  # type: ignore[arg-type]
    chunks = [chunk async for chunk in data_pb2_grpc.DataStub(channel).FetchSnapshot(request)]
    return b"".join(chunk.data for chunk in chunks)


@asynccontextmanager
async def calling(
    run: Served, server: SnapshotServer, reader: str, role: str = "peer", authority: Authority | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of this member to a's server."""
    place = server.offer(0)
    assert place is not None
    name = Identity(run.folder.run_id, "peer", "a").server_name
    dial = Channels([run.coordinator.listen], run.credentials(reader, role, authority))
    async with dial.member(place.address, name) as channel:
        yield channel


@asynccontextmanager
async def alone(path: Path, **options: object) -> AsyncIterator[tuple[Served, SnapshotServer]]:
    """Peer a's server at outer step 0, with nobody training."""
    tickets = iter(f"ticket-{i}" for i in range(100))
    async with served(new_folder(path)) as run, serving(run, "a", ticket=lambda: next(tickets), **options) as server:
        server.show(SCHEMA, outer(0, theta()))
        yield run, server


WANTED: dict[str, object] = {"ticket": "ticket-0"}


@pytest.mark.parametrize(
    ("changes", "role", "code", "reason"),
    [
        ({"ticket": "guessed"}, "peer", grpc.StatusCode.PERMISSION_DENIED, "not the ticket for outer step 0"),
        ({"ticket": ""}, "peer", grpc.StatusCode.PERMISSION_DENIED, "not the ticket"),
        ({"outer_step": 1}, "peer", grpc.StatusCode.NOT_FOUND, "outer step 1 is not to be had here"),
        ({"run_id": "another"}, "peer", grpc.StatusCode.PERMISSION_DENIED, "not another"),
        ({"fragment_id": 2}, "peer", grpc.StatusCode.INVALID_ARGUMENT, "fragment_id is 2"),
        ({"offset": 1201}, "peer", grpc.StatusCode.INVALID_ARGUMENT, "offset is 1201"),
        ({"boxes": (Box(0, (0,), (5,)),)}, "peer", grpc.StatusCode.INVALID_ARGUMENT, "whole fragments only"),
        ({}, "operator", grpc.StatusCode.PERMISSION_DENIED, "role operator may not do this"),
    ],
)
def test_what_a_peer_does_not_serve(
    tmp_path: Path, changes: dict[str, object], role: str, code: grpc.StatusCode, reason: str
) -> None:
    async def scenario() -> None:
        async with alone(tmp_path / "run") as (run, server), calling(run, server, "b", role) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, **{"run_id": run.folder.run_id, **WANTED, **changes})
            assert caught.value.code() is code and reason in str(caught.value.details())

    asyncio.run(scenario())


def test_an_observer_may_read_from_anywhere_in_a_fragment_and_no_other_call_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with alone(tmp_path / "run") as (run, server), calling(run, server, "eve", "observer") as channel:
            data = theta()[1].numpy().tobytes()
            for offset in (0, 700, len(data)):
                got = await ask(channel, run_id=run.folder.run_id, offset=offset, **WANTED)
                assert got == data[offset:]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await data_pb2_grpc.DataStub(channel).DescribeSnapshot(data_pb2.SnapshotManifestRequest())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(scenario())


def test_a_certificate_of_another_authority_gets_no_word_out_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        other = new_folder(tmp_path / "other")
        stranger = Authority.load(other.path, other.run_id)
        async with alone(tmp_path / "run") as (run, server), calling(run, server, "b", authority=stranger) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, run_id=run.folder.run_id, **WANTED)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(scenario())


@contextlib.contextmanager
def refused(code: grpc.StatusCode) -> Iterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code, caught.value.details()


def test_a_step_in_the_middle_of_being_read_stays_a_while_others_go_and_memory_is_bounded(tmp_path: Path) -> None:
    now = 0.0

    async def scenario() -> None:
        nonlocal now
        async with (
            alone(tmp_path / "run", clock=lambda: now) as (run, server),
            calling(run, server, "b") as channel,
        ):
            run_id, at = run.folder.run_id, theta
            assert await ask(channel, run_id=run_id, ticket="ticket-0") == theta()[1].numpy().tobytes()
            server.show(SCHEMA, outer(1, at(1)))
            server.show(SCHEMA, outer(2, at(2)))
            assert await ask(channel, run_id=run_id, ticket="ticket-0", fragment_id=0) == theta()[0].numpy().tobytes()
            with refused(grpc.StatusCode.NOT_FOUND):
                await ask(channel, run_id=run_id, ticket="ticket-1", outer_step=1)  # nobody was reading it
            assert await ask(channel, run_id=run_id, ticket="ticket-2", outer_step=2) == at(2)[1].numpy().tobytes()
            server.show(SCHEMA, outer(3, at(3)))
            assert MAX_PAST == 2
            with refused(grpc.StatusCode.UNAVAILABLE):
                await ask(channel, run_id=run_id, ticket="ticket-3", outer_step=3)
            now += KEPT_S
            server.show(SCHEMA, outer(4, at(4)))
            assert await ask(channel, run_id=run_id, ticket="ticket-4", outer_step=4) == at(4)[1].numpy().tobytes()
            with refused(grpc.StatusCode.NOT_FOUND):
                await ask(channel, run_id=run_id, ticket="ticket-0")

    asyncio.run(scenario())


def test_parameters_in_the_middle_of_landing_are_not_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with alone(tmp_path / "run") as (run, server), calling(run, server, "b") as channel:
            partial = outer(0, [theta(1)[0], theta()[1]])
            server.show(SCHEMA, Outer(0, digest(theta()), partial.fragments, partial.hashes))
            got = await ask(channel, run_id=run.folder.run_id, fragment_id=0, **WANTED)
            assert got == theta()[0].numpy().tobytes()

    asyncio.run(scenario())


LARGE = Schema((FragmentSpec(fragment_id=0, name="large", tensors=(TensorSpec(name="large.weight", shape=(1 << 22,)),)),))


def test_readers_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its first chunk, and no more is written to any: what fits into the buffers on the way depends on the machine."""
    write = SnapshotServer._write

    async def first(server: SnapshotServer, context: grpc.aio.ServicerContext, chunk: tensors_pb2.Chunk) -> None:
        await write(server, context, chunk)
        await asyncio.Event().wait()

    monkeypatch.setattr(SnapshotServer, "_write", first)

    async def scenario() -> None:
        async with alone(tmp_path / "run") as (run, server), calling(run, server, "b") as channel:
            stub = data_pb2_grpc.DataStub(channel)
            request = SnapshotRequest(run_id=run.folder.run_id, outer_step=0, fragment_id=0, ticket="ticket-0")
            idle = [stub.FetchSnapshot(snapshot_request_to_pb(request)) for _ in range(MAX_READERS)]
            for call in idle:
                await call.read()
            with refused(grpc.StatusCode.UNAVAILABLE):
                await ask(channel, run_id=run.folder.run_id, fragment_id=0, ticket="ticket-0")
            for call in idle:
                call.cancel()

    asyncio.run(scenario())


def test_readers_that_come_together_are_as_few(tmp_path: Path) -> None:
    class Context:
        """Of a call whose headers are on their way, for ever."""

        told = ""

        async def send_initial_metadata(self, metadata: object) -> None:
            await asyncio.Event().wait()

        async def abort(self, code: grpc.StatusCode, details: str) -> None:
            self.told = details
            raise grpc.aio.AbortError

    async def scenario() -> None:
        async with alone(tmp_path / "run") as (run, server):
            request = SnapshotRequest(run_id=run.folder.run_id, outer_step=0, fragment_id=0, ticket="ticket-0")
            *contexts, late = (Context() for _ in range(MAX_READERS + 1))
            calls = [asyncio.ensure_future(server._fetch(snapshot_request_to_pb(request), each)) for each in contexts]  # type: ignore[arg-type]
            await asyncio.sleep(0)
            with pytest.raises(grpc.aio.AbortError):
                async with asyncio.timeout(30):
                    await server._fetch(snapshot_request_to_pb(request), late)  # type: ignore[arg-type]
            assert late.told == f"{MAX_READERS} others read here already; ask another"
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert not server._readers

    asyncio.run(scenario())


def test_calls_without_a_request_keep_no_other_member_out_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def scenario() -> None:
        async with (
            alone(tmp_path / "run") as (run, server),
            calling(run, server, "eve") as eve,
            calling(run, server, "b") as channel,
            asyncio.timeout(30),
        ):
            calls = [eve.stream_unary("/editpb.Data/FetchSnapshot")(silence()) for _ in range(MAX_CALLS)]
            codes = [asyncio.ensure_future(call.code()) for call in calls]
            for _, code in zip(range(MAX_CALLS // 2), asyncio.as_completed(codes), strict=False):
                assert await code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await ask(channel, run_id=run.folder.run_id, **WANTED) == theta()[1].numpy().tobytes()
            monkeypatch.setattr(guarded_calls, "REQUEST_S", 0.01)
            late = channel.stream_unary("/editpb.Data/FetchSnapshot")(silence())
            assert await late.code() is grpc.StatusCode.UNAVAILABLE
            for call in calls:
                call.cancel()

    asyncio.run(scenario())


def never_grow_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give readers windows that hold less than a chunk."""

    def small_windows(address: str, **options: str) -> Options:
        return (*channel_options(address, **options), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))

    monkeypatch.setattr("peers.carriers.hub.channels.channel_options", small_windows)


def test_a_reader_that_does_not_take_the_first_chunk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_grow_windows(monkeypatch)
    write = SnapshotServer._write

    async def scenario() -> None:
        let_go, written = asyncio.Event(), 0

        async def observed(server: SnapshotServer, context: grpc.aio.ServicerContext, chunk: tensors_pb2.Chunk) -> None:
            nonlocal written
            try:
                await write(server, context, chunk)
                written += 1
            except TransportError:
                let_go.set()
                raise

        monkeypatch.setattr(SnapshotServer, "_write", observed)
        async with (
            alone(tmp_path / "run", stall_s=0.01) as (run, server),
            calling(run, server, "b") as channel,
            asyncio.timeout(30),
        ):
            server.show(LARGE, outer(0, theta(0, LARGE)))
            request = SnapshotRequest(run_id=run.folder.run_id, outer_step=0, fragment_id=0, ticket="ticket-1")
            call = data_pb2_grpc.DataStub(channel).FetchSnapshot(snapshot_request_to_pb(request))
            await let_go.wait()
            assert not written
            with refused(grpc.StatusCode.UNAVAILABLE):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.details() == "nothing was read for 0.01 s; ask again"

    asyncio.run(scenario())


def test_readers_that_take_nothing_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits for them, but not for ever. Who comes back is told."""
    never_grow_windows(monkeypatch)

    async def scenario() -> None:
        async with alone(tmp_path / "run", stall_s=0.3) as (run, server), calling(run, server, "b") as channel:
            server.show(LARGE, outer(0, theta(0, LARGE)))
            request = SnapshotRequest(run_id=run.folder.run_id, outer_step=0, fragment_id=0, ticket="ticket-1")
            stub = data_pb2_grpc.DataStub(channel)
            idle = [stub.FetchSnapshot(snapshot_request_to_pb(request)) for _ in range(MAX_READERS)]
            for call in idle:
                await call.read()
            wanted, got = {"run_id": run.folder.run_id, "fragment_id": 0, "ticket": "ticket-1"}, b""
            async with asyncio.timeout(30):
                while not got:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        got = await ask(channel, **wanted)
            assert got == theta(0, LARGE)[0].numpy().tobytes()
            assert not any(call.done() for call in idle), "their bytes are still on the way"
            async with asyncio.timeout(30):  # one of them at least has been let go; now they read on
                for call in idle:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        while await call.read() is not grpc.aio.EOF:
                            pass
                ends = {(await call.code(), await call.details()) for call in idle}
            told = (grpc.StatusCode.UNAVAILABLE, "nothing was read for 0.3 s; ask again")
            assert told in ends and ends <= {told, (grpc.StatusCode.OK, "")}

    asyncio.run(scenario())
