"""A real coordinator sends what it has merged of an update ahead of the commit, sealed; only the commit brings the key."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch

from aggregator.data.contributions import ShardUpload
from aggregator.data.round_runner import _FAST_S, _measured
from aggregator.resources import Clock
from edit.config.codec import CodecChoice
from edit.errors import GoneError
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Shard
from edit.records import Commit
from edit.rounds import events
from editpb import data_pb2, data_pb2_grpc
from editpb.data_messages import update_manifest_from_pb, update_request_to_pb
from editpb.messages import UpdateManifest, UpdateRequest
from editpb.transport.chunk_frames import ReceivedChunk
from editpb.transport.chunks import make_chunks
from editpb.transport.sealing import Seal
from peers.carriers.hub.assemblies import UpdateAssembly
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.data_calls import DataCalls
from peers.carriers.run_connection import Traffic
from tests.support.encoded import encode
from tests.support.loops import on_a_loop, until
from tests.support.served import SCHEMA, TOML, WAIT_S, BarePeer, Served, held_clock, new_folder, served, sharded, theta

SIZES = tuple(4 * fragment.numel for fragment in SCHEMA.fragments)
WHOLE = tuple(map(Shard, SCHEMA.fragments))


def deltas(value: float) -> list[torch.Tensor]:
    return [torch.full((fragment.numel,), value) for fragment in SCHEMA.fragments]


@dataclass
class Answer:
    """What one FetchUpdate brought."""

    ahead: bool = False
    manifest: UpdateManifest | None = None
    data: bytes = b""


async def ask(
    peer: BarePeer,
    outer_step: int,
    round_id: int,
    offset: int = 0,
    shards: Sequence[Shard] = WHOLE,
    into: Answer | None = None,
    limit: int = 0,
) -> Answer:
    wanted = UpdateRequest(peer.run_id, outer_step, tuple(shards), offset, limit, round_id=round_id)
    answer = into or Answer()
    async with asyncio.timeout(WAIT_S):
        async for part in peer.data.FetchUpdate(update_request_to_pb(wanted)):
            match part.WhichOneof("kind"):
                case "ahead":
                    answer.ahead = True
                case "manifest":
                    answer.manifest = update_manifest_from_pb(part.manifest, SCHEMA, outer_step, shards=shards)
                case "chunk":
                    answer.data += part.chunk.chunk.data
    return answer


async def send(peer: BarePeer, round_id: int, fragment_id: int, value: float, outer_step: int = 0) -> None:
    data = bytes(encode("fp32", deltas(value)[fragment_id]).data)
    await peer.send(peer.header(round_id, outer_step, fragment_id, len(data)), make_chunks(data, 512))


@asynccontextmanager
async def two_peers(run: Served) -> AsyncIterator[tuple[BarePeer, BarePeer, int]]:
    """Both are expected in the open round."""
    async with run.peer("a") as a, run.peer("b") as b:
        await a.attend()
        await a.view(lambda view: view.found)
        await b.attend()
        await a.found(theta())
        for peer in (a, b):
            await peer.report(0)
        yield a, b, (await a.view(lambda view: view.round_id > 0)).round_id


async def first_fragment(a: BarePeer, b: BarePeer, round_id: int) -> Answer:
    """Both send fragment 0, and it comes down ahead."""
    for peer in (a, b):
        await send(peer, round_id, 0, 1.0)
    answer = await ask(a, 1, round_id)
    assert answer.ahead and answer.manifest is None and len(answer.data) == SIZES[0]
    return answer


def update(commit: Commit) -> bytes:
    return b"".join(bytes(fragment.payload.data) for fragment in commit.fragments if fragment.payload is not None)


@on_a_loop
async def test_what_is_merged_goes_ahead_and_the_commit_opens_it(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run", start=2)) as run, two_peers(run) as (a, b, round_id):
        sealed = (await first_fragment(a, b, round_id)).data
        waiting = asyncio.create_task(ask(b, 1, round_id, len(sealed)))
        await send(a, round_id, 1, 1.0)
        await send(b, round_id, 1, 1.0)
        last = await waiting
        if last.ahead:  # the call was made before the commit
            sealed, last = sealed + last.data, await ask(b, 1, round_id, sum(SIZES))
        manifest = last.manifest
        assert manifest is not None and len(manifest.key) == 32 and manifest.round_id == round_id
        plain = update(await a.fetch(1))
        opened = Seal(manifest.key, WHOLE[0])(sealed[: SIZES[0]]) + Seal(manifest.key, WHOLE[1])(sealed[SIZES[0] :])
        assert opened + last.data == plain
        assert sealed[: SIZES[0]] != plain[: SIZES[0]]
        assert manifest.digest == digest([t - 1 for t in theta()])


@asynccontextmanager
async def reader(
    run: Served, round_id: int, begun: UpdateAssembly | None = None
) -> AsyncIterator[tuple[UpdateAssembly, Traffic, asyncio.Task[None]]]:
    """A member that fetches the update to outer step 1 from now on, as a peer does. begun: what it has of it."""
    assembly = begun or UpdateAssembly(SCHEMA, 1, (0, 1), WHOLE, round_id=round_id, choice=CodecChoice("fp32"))
    traffic = Traffic()
    channels = Channels([run.coordinator.listen], run.credentials("reader"))
    data = DataCalls(channels, run.folder.run_id, traffic)
    task = asyncio.create_task(data.update(assembly, lambda: True, lambda: None))
    try:
        yield assembly, traffic, task
    finally:
        task.cancel()
        await channels.close()


@on_a_loop
async def test_a_peer_reads_an_update_while_its_round_is_open_and_every_byte_once(tmp_path: Path) -> None:
    async with (
        served(new_folder(tmp_path / "run", start=2)) as run,
        two_peers(run) as (a, b, round_id),
        reader(run, round_id) as (assembly, traffic, task),
    ):
        await first_fragment(a, b, round_id)
        await until(lambda: assembly.received == SIZES[0])
        assert assembly.manifest is None and not task.done()
        for peer in (a, b):
            await send(peer, round_id, 1, 1.0)
        await task
        commit = assembly.finish()
        assert update(commit) == update(await a.fetch(1))
        assert commit.digest == digest([t - 1 for t in theta()])
        assert sum(SIZES) < traffic.received < sum(SIZES) + 1000


@on_a_loop
async def test_a_peer_stops_reading_when_the_round_comes_to_nothing(tmp_path: Path) -> None:
    async with (
        served(new_folder(tmp_path / "run", start=2)) as run,
        two_peers(run) as (a, b, round_id),
        reader(run, round_id) as (assembly, _, task),
    ):
        await first_fragment(a, b, round_id)
        await until(lambda: assembly.received == SIZES[0])
        run.coordinator.run.rounds.feed(events.RoundFailed(round_id, "the disk is full"))
        with pytest.raises(GoneError):
            await task
        assert assembly.manifest is None


@on_a_loop
async def test_an_update_that_is_asked_for_without_a_round_or_of_another_round_comes_whole_and_without_a_key(
    tmp_path: Path,
) -> None:
    async with served(new_folder(tmp_path / "run", start=2)) as run, two_peers(run) as (a, b, round_id):
        for peer in (a, b):
            await peer.contribute(round_id, 0, deltas(1.0))
        await a.view(lambda view: view.outer_step == 1)
        for named, offset in ((0, 0), (round_id + 1, 7), (round_id - 1, 7)):
            answer = await ask(b, 1, named, offset)
            assert answer.manifest is not None and answer.manifest.key == b"" and len(answer.data) == sum(SIZES)


@on_a_loop
async def test_a_round_that_comes_to_nothing_takes_its_key_with_it(tmp_path: Path) -> None:
    """Who waits for the rest is told at once; the next round seals the same bytes otherwise, and begins anew."""
    async with served(new_folder(tmp_path / "run", start=2)) as run, two_peers(run) as (a, b, round_id):
        lost = (await first_fragment(a, b, round_id)).data
        waiting = asyncio.create_task(ask(a, 1, round_id, len(lost)))
        published = run.coordinator.run.rounds.published
        await until(lambda: published._waiting)
        run.coordinator.run.rounds.feed(events.RoundFailed(round_id, "the disk is full"))
        with pytest.raises(grpc.aio.AioRpcError) as over:
            await waiting
        assert over.value.code() is grpc.StatusCode.NOT_FOUND
        again = (await a.view(lambda view: view.round_id > round_id)).round_id
        assert (await first_fragment(a, b, again)).data != lost
        for peer in (a, b):
            await send(peer, again, 1, 1.0)
        await a.view(lambda view: view.outer_step == 1)
        answer = await ask(a, 1, round_id, len(lost))
        assert answer.manifest is not None and answer.manifest.key == b"" and len(answer.data) == sum(SIZES)
        assert answer.manifest.digest == digest([t - 1 for t in theta()])


@on_a_loop
async def test_a_coordinator_that_was_killed_knows_no_key(tmp_path: Path) -> None:
    """What it committed is sent whole after the restart; what it had not committed is over."""
    folder = new_folder(tmp_path / "run", start=2)
    async with served(folder, kill=True) as run, two_peers(run) as (a, b, round_id):
        await first_fragment(a, b, round_id)
        for peer in (a, b):
            await send(peer, round_id, 1, 1.0)
        await a.view(lambda view: view.outer_step == 1)
        await b.report(1)
        await a.report(1)
        open_then = (await a.view(lambda view: view.round_id > round_id)).round_id
        for peer in (a, b):
            await send(peer, open_then, 0, 1.0, outer_step=1)
    async with served(folder) as run, run.peer("a") as a:
        await a.attend()
        answer = await ask(a, 1, round_id, 7)
        assert answer.manifest is not None and answer.manifest.key == b"" and len(answer.data) == sum(SIZES)
        with pytest.raises(grpc.aio.AioRpcError) as over:
            await ask(a, 2, open_then, 7)
        assert over.value.code() is grpc.StatusCode.NOT_FOUND


@on_a_loop
async def test_each_rank_gets_its_shards_ahead_and_can_open_only_those(tmp_path: Path) -> None:
    layout = sharded(SCHEMA, 2, 0)
    async with served(new_folder(tmp_path / "run", start=2)) as run, two_peers(run) as (a, b, round_id):
        whole = (await first_fragment(a, b, round_id)).data
        ahead = [(await ask(a, 1, round_id, shards=shards)).data for shards in layout]
        assert [len(one) for one in ahead] == [4 * shards[0].numel for shards in layout]
        assert not any(one[:4] == whole[:4] for one in ahead), "no keystream is used twice"
        for peer in (a, b):
            await send(peer, round_id, 1, 1.0)
        await a.view(lambda view: view.outer_step == 1)
        for shards, sealed in zip(layout, ahead, strict=True):
            answer = await ask(a, 1, round_id, len(sealed), shards)
            assert answer.manifest is not None
            opened = Seal(answer.manifest.key, shards[0])(sealed)
            assert opened == bytes(encode("fp32", torch.ones(shards[0].numel)).data)
            assert answer.data == bytes(encode("fp32", torch.ones(shards[1].numel)).data)


@on_a_loop
async def test_without_memory_nothing_goes_ahead_and_the_commit_is_the_same(tmp_path: Path) -> None:
    toml = TOML.replace("[storage]\n", f"[storage]\nbuffer_bytes = {SIZES[0] - 1}\n")
    async with served(new_folder(tmp_path / "run", start=2, toml=toml)) as run, two_peers(run) as (a, b, round_id):
        for peer in (a, b):
            await send(peer, round_id, 0, 1.0)
        waiting = asyncio.create_task(ask(a, 1, round_id))
        await until(lambda: run.coordinator.run.rounds.published._waiting)
        for peer in (a, b):
            await send(peer, round_id, 1, 1.0)
        answer = await waiting
        assert not answer.ahead and answer.manifest is not None and len(answer.data) == sum(SIZES)
        assert answer.manifest.digest == digest([t - 1 for t in theta()])
        assert run.coordinator.run.rounds._uploads.held_bytes == 0


@pytest.mark.parametrize("fast", [True, False])
@on_a_loop
async def test_after_a_round_over_fast_links_nothing_goes_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr("aggregator.data.round_runner._FAST_BYTES_PER_S", 0.0 if fast else 1e15)
    async with served(new_folder(tmp_path / "run", start=2, toml=TOML)) as run, two_peers(run) as (a, b, round_id):
        for i in range(len(SIZES)):
            for peer in (a, b):
                await send(peer, round_id, i, 1.0)
        second = (await a.view(lambda v: v.outer_step == 1 and v.round_id > round_id)).round_id
        for peer in (a, b):
            await send(peer, second, 0, 1.0, 1)
        waiting = asyncio.create_task(ask(a, 2, second))
        if not fast:
            assert (await waiting).ahead
            return
        await until(lambda: run.coordinator.run.rounds.published._waiting)
        for peer in (a, b):
            await send(peer, second, 1, 1.0, 1)
        answer = await waiting
        assert not answer.ahead and answer.manifest is not None and len(answer.data) == sum(SIZES)
        assert answer.manifest.digest == run.coordinator.run.rounds.published.digest


@on_a_loop
async def test_how_fast_contributions_come_in_does_not_depend_on_how_long_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, held, measured = [0.0], held_clock(), list[float]()

    def measuring(shard: ShardUpload) -> float:
        measured.append(_measured(shard))
        now[0] += 0.5 if len(measured) == 2 * len(SIZES) else 0.0  # the last one
        return measured[-1]

    monkeypatch.setattr("aggregator.data.round_runner._measured", measuring)
    clock = Clock(monotonic=lambda: held.monotonic() + now[0], unix=held.unix)
    async with served(new_folder(tmp_path / "run", start=2, toml=TOML), clock) as run, two_peers(run) as (a, b, round_id):
        for i in range(len(SIZES)):
            for peer in (a, b):
                await send(peer, round_id, i, 1.0)
        await a.view(lambda view: view.outer_step == 1)
        assert now == [0.5] and run.coordinator.run.rounds._bytes_per_s == 2 * sum(SIZES) / _FAST_S


@on_a_loop
async def test_merged_contributions_make_room_and_are_whole_for_who_sends_them_again(tmp_path: Path) -> None:
    """There is memory for two contributions to fragment 1, or for one and its update."""
    toml = TOML.replace("[storage]\n", f"[storage]\nbuffer_bytes = {2 * SIZES[1] * 4 // 3}\n")
    async with served(new_folder(tmp_path / "run", start=2, toml=toml)) as run, two_peers(run) as (a, b, round_id):
        uploads = run.coordinator.run.rounds._uploads
        for peer in (a, b):
            await send(peer, round_id, 1, 1.0)
        await until(lambda: uploads.held_bytes == SIZES[1])
        await send(a, round_id, 1, 1.0)
        assert uploads.held_bytes == SIZES[1]
        data = bytes(encode("fp32", deltas(2.0)[1]).data)
        with pytest.raises(grpc.aio.AioRpcError, match="was declared with another tokens before"):
            await b.send(b.header(round_id, 0, 1, len(data), {"tokens": 11}), make_chunks(data, 512))
        for peer in (a, b):
            await peer.disconnect()


@on_a_loop
async def test_an_evicted_member_that_waits_for_the_key_does_not_get_it(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run", start=2)) as run, two_peers(run) as (a, b, round_id), run.peer("c") as c:
        await c.attend()
        await first_fragment(a, b, round_id)
        answer = Answer()
        waiting = asyncio.create_task(ask(c, 1, round_id, sum(SIZES), into=answer))
        published = run.coordinator.run.rounds.published
        await until(lambda: published._waiting)
        run.coordinator.run.evict("c", "bad manners")
        for peer in (a, b):
            await send(peer, round_id, 1, 1.0)
        await a.view(lambda view: view.outer_step == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await waiting
        assert refused.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
        assert answer.manifest is None and answer.data == b""


@on_a_loop
async def test_an_offset_without_a_digest_needs_a_round(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run", start=2)) as run, two_peers(run) as (a, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await a.data.FetchUpdate(data_pb2.UpdateRequest(run_id=a.run_id, outer_step=1, offset=1)).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@on_a_loop
async def test_a_member_whose_certificate_ends_while_it_waits_does_not_get_the_key(tmp_path: Path) -> None:
    now = [time.time()]
    async with (
        served(new_folder(tmp_path / "run", start=2), held_clock(lambda: now[0])) as run,
        two_peers(run) as (a, b, round_id),
    ):
        await first_fragment(a, b, round_id)
        credentials = grpc.ssl_channel_credentials(run.ca, *run.certificate("c", lifetime_s=3600.0))
        async with grpc.aio.secure_channel(run.coordinator.listen, credentials) as channel:
            answer, c = Answer(), BarePeer("c", run.folder.run_id, channel, SCHEMA)
            waiting = asyncio.create_task(ask(c, 1, round_id, sum(SIZES), into=answer))
            await until(lambda: run.coordinator.run.rounds.published._waiting)
            now[0] += 7200.0
            for peer in (a, b):
                await send(peer, round_id, 1, 1.0)
            await a.view(lambda view: view.outer_step == 1)
            with pytest.raises(grpc.aio.AioRpcError, match="set that clock if it is wrong"):
                await waiting
        assert answer.manifest is None and answer.data == b""


@pytest.mark.parametrize("ranks", [1, 2])
@on_a_loop
async def test_what_is_sealed_is_read_on_from_any_byte(tmp_path: Path, ranks: int) -> None:
    """In ranges that no block of the cipher and no element fits; the last of them after the commit."""
    layout = sharded(SCHEMA, ranks, 0) if ranks > 1 else [WHOLE]
    async with served(new_folder(tmp_path / "run", start=2)) as run, two_peers(run) as (a, b, round_id):
        for peer in (a, b):
            await send(peer, round_id, 0, 1.0)
        ahead = []
        for shards in layout:
            size, sealed = 4 * shards[0].numel, b""
            while len(sealed) < size:
                answer = await ask(a, 1, round_id, len(sealed), shards, limit=7)
                assert answer.ahead and 0 < len(answer.data) <= 7
                sealed += answer.data
            ahead.append(sealed)
        for peer in (a, b):
            await send(peer, round_id, 1, 1.0)
        await a.view(lambda view: view.outer_step == 1)
        for shards, sealed in zip(layout, ahead, strict=True):
            assembly = UpdateAssembly(SCHEMA, 1, (0, 1), shards, round_id=round_id, choice=CodecChoice("fp32"))
            assembly.request(run.folder.run_id, 0, 0)
            assembly.take(data_pb2.UpdatePart(ahead=data_pb2.UpdateAhead()))
            half = len(sealed) // 2 + 1
            assembly.take(ReceivedChunk(0, 0, sealed[:half]))
            async for part in a.data.FetchUpdate(update_request_to_pb(assembly.request(run.folder.run_id, half, 0))):
                chunked = part.WhichOneof("kind") == "chunk"
                of = part.chunk
                assembly.take(ReceivedChunk(of.fragment_id, of.chunk.offset, of.chunk.data) if chunked else part)
            ones = b"".join(bytes(encode("fp32", torch.ones(shard.numel)).data) for shard in shards)
            assert update(assembly.finish()) == ones


@pytest.mark.parametrize("committed", [True, False])
@on_a_loop
async def test_what_came_from_a_coordinator_that_was_killed_is_thrown_away(tmp_path: Path, committed: bool) -> None:
    """Killed after its commit, which the restart replays, or before: then another round comes to that outer step."""
    folder = new_folder(tmp_path / "run", start=2)
    async with served(folder, kill=True) as run, two_peers(run) as (a, b, round_id):
        async with reader(run, round_id) as (assembly, _, task):
            await first_fragment(a, b, round_id)
            await until(lambda: assembly.received == SIZES[0])
            task.cancel()
        if committed:
            for peer in (a, b):
                await send(peer, round_id, 1, 1.0)
            await a.view(lambda view: view.outer_step == 1)
    async with served(folder) as run, run.peer("a") as a, run.peer("b") as b:
        for peer in (a, b):
            await peer.attend()
        if not committed:
            async with reader(run, round_id, assembly) as (_, _, task):
                with pytest.raises(GoneError):
                    await task
            for peer in (a, b):
                await peer.report(0)
            view = await a.view(lambda view: view.round_id > round_id)
            for i in range(len(SIZES)):
                for peer in (a, b):
                    await send(peer, view.round_id, i, 2.0)
            await a.view(lambda view: view.outer_step == 1)
        async with reader(run, round_id, assembly) as (_, traffic, task):
            await task
        assert traffic.received > sum(SIZES), "all of it came again"
        plain = encode("fp32", torch.full((SCHEMA.numel,), 1.0 if committed else 2.0)).data
        assert update(assembly.finish()) == bytes(plain)


@on_a_loop
async def test_of_a_round_that_came_to_nothing_no_more_is_sent_and_nothing_is_held(tmp_path: Path) -> None:
    """For a member that reads slowly, or not at all."""
    large = FragmentSpec(fragment_id=0, name="layer0", tensors=(TensorSpec(name="layer0.weight", shape=(1 << 20,)),))
    schema = Schema((large, SCHEMA.fragments[1]))
    payload = encode("fp32", torch.ones(1 << 20))
    size, windows = memoryview(payload.data).nbytes, (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
    async with served(new_folder(tmp_path / "run")) as run, run.peer("a", schema) as a:
        await a.attend()
        await a.view(lambda view: view.found)
        await a.found(theta(0, schema))
        await a.report(0)
        round_id = (await a.view(lambda view: view.round_id > 0)).round_id
        async with run.channel("reader", options=windows) as channel:
            data = bytes(payload.data)
            await a.send(a.header(round_id, 0, 0, len(data)), make_chunks(data))
            shards = tuple(map(Shard, schema.fragments))
            wanted = update_request_to_pb(UpdateRequest(run.folder.run_id, 1, shards, round_id=round_id))
            call = data_pb2_grpc.DataStub(channel).FetchUpdate(wanted)
            async with asyncio.timeout(WAIT_S):
                assert (await call.read()).WhichOneof("kind") == "ahead"
                coming = run.coordinator.run.rounds.published._coming
                assert coming is not None
                staged = weakref.ref(memoryview(next(payload for _, payload in coming.fragments).data).obj)
                run.coordinator.run.rounds.feed(events.RoundFailed(round_id, "the disk is full"))
                del coming
                received = 0
                while (part := await call.read()) is not grpc.aio.EOF:
                    received += len(part.chunk.chunk.data)
                assert received <= size // 2
            await until(lambda: (gc.collect(), staged())[1] is None)  # what was at work on it has still to end


@on_a_loop
async def test_of_several_groups_the_fragments_that_are_due_go_ahead(tmp_path: Path) -> None:
    """Each outer step has a key of its own."""
    numels = (5, 300, 7, 40)
    schema = Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=(TensorSpec(name=f"layer{i}.weight", shape=(n,)),))
            for i, n in enumerate(numels)
        )
    )
    shards, keys = tuple(map(Shard, schema.fragments)), set()
    toml = TOML.replace("every = 2\n", 'every = 2\ngroups = 2\npattern = "strided"\n')
    async with served(new_folder(tmp_path / "run", toml=toml)) as run, run.peer("a", schema) as a:
        await a.attend()
        await a.view(lambda view: view.found)
        await a.found(theta(0, schema))
        for step, due in enumerate(((0, 2), (1, 3))):
            await a.report(step)
            round_id = (await a.view(lambda view, step=step: view.round_id > step)).round_id
            assembly = UpdateAssembly(schema, step + 1, due, shards, round_id=round_id, choice=CodecChoice("fp32"))
            async with reader(run, round_id, assembly) as (_, _, task):
                for i in due:
                    data = bytes(encode("fp32", torch.ones(numels[i])).data)
                    await a.send(a.header(round_id, step, i, len(data)), make_chunks(data))
                    if i == due[0]:
                        await until(lambda known=assembly, i=i: known.received == 4 * numels[i])
                        assert assembly.manifest is None
                await task
            plain = encode("fp32", torch.ones(sum(numels[i] for i in due))).data
            assert update(assembly.finish()) == bytes(plain)
            assert assembly._manifest is not None
            keys.add(assembly._manifest.key)
    assert len(keys) == 2 and all(keys)
