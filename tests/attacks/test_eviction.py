"""An eviction ends what is under way and drops what is not merged; a certificate that is over counts no more."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch

from aggregator.resources import Clock
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from editpb import data_pb2
from editpb.channel_options import server_options
from editpb.chunks import make_chunks
from editpb.data_messages import contribution_header_to_pb, found_header_to_pb, snapshot_request_to_pb
from editpb.messages import FoundHeader, SnapshotRequest
from tests.support.encoded import encode
from tests.support.loops import until
from tests.support.served import LIFETIME_S, SCHEMA, WAIT_S, found_run, new_folder, served, theta

LARGE = Schema((FragmentSpec(fragment_id=0, name="w", tensors=(TensorSpec(name="w", shape=(1 << 23,)),)),))  # 32 MiB


async def ended(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(WAIT_S):
        return await call.code(), await call.details()


def test_what_an_evicted_peer_delivered_is_not_merged(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
            await a.attend()
            await a.view(lambda view: view.found)
            await b.attend()
            await a.found(theta())
            for peer in (a, b):
                await peer.report(0)
            round_id = (await a.view(lambda view: view.round_id > 0)).round_id
            await b.contribute(round_id, 0, [torch.ones(5), torch.ones(300)])
            run.coordinator.run.evict("b", "bad manners")
            own = [torch.full((5,), 0.5), torch.full((300,), 0.5)]
            await a.contribute(round_id, 0, own)
            committed = await a.view(lambda view: view.outer_step == 1)
            commit = await a.fetch(1)
            assert [[v.peer_id for v in f.verdicts] for f in commit.fragments] == [["a"], ["a"]]
            assert committed.digest == digest([t - d for t, d in zip(theta(), own, strict=True)])

    asyncio.run(scenario())


def test_an_eviction_ends_a_contribution_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            round_id = (await found_run(a)).round_id
            data = bytes(encode("fp32", torch.ones(300)).data)
            call = a.data.Contribute()
            header = contribution_header_to_pb(a.header(round_id, 0, 1, len(data)))
            await call.write(data_pb2.ContributePart(header=header))
            await call.write(data_pb2.ContributePart(chunk=next(iter(make_chunks(data, 512)))))
            await until(lambda: run.coordinator.run.rounds.upload("a")[0] > 0)
            run.coordinator.run.evict("a", "bad manners")
            assert await ended(call) == (grpc.StatusCode.PERMISSION_DENIED, "evicted: bad manners")

    asyncio.run(scenario())


def test_an_eviction_ends_a_founding_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.peer("b") as b:
            await a.attend()
            await a.view(lambda view: view.found)
            await b.attend()
            call = a.data.Found()
            header = FoundHeader(run_id=a.run_id, schema_hash=SCHEMA.schema_hash, digest=digest(theta()))
            await call.write(data_pb2.FoundPart(header=found_header_to_pb(header)))
            chunk = next(iter(make_chunks(theta()[0].numpy().tobytes())))
            await call.write(data_pb2.FoundPart(chunk=data_pb2.FragmentChunk(fragment_id=0, chunk=chunk)))
            await until(lambda: (turn := run.coordinator.run.founding.turn) and turn.received_bytes)
            run.coordinator.run.evict("a", "bad manners")
            assert await ended(call) == (grpc.StatusCode.PERMISSION_DENIED, "evicted: bad manners")
            await b.view(lambda view: view.found)
            await b.found(theta())

    asyncio.run(scenario())


def test_an_eviction_ends_a_snapshot_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run, run.peer("a", LARGE) as a, run.channel("eve", "observer") as channel:
            await found_run(a)
            request = SnapshotRequest(run_id=a.run_id, outer_step=0, fragment_id=0)
            eve = type(a)("eve", a.run_id, channel, LARGE)
            await eve.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=a.run_id))
            call = eve.data.FetchSnapshot(snapshot_request_to_pb(request))
            received = len((await call.read()).data)
            run.coordinator.run.evict("eve", "bad manners")
            with pytest.raises(grpc.aio.AioRpcError, match="evicted: bad manners"):
                async with asyncio.timeout(WAIT_S):
                    while (chunk := await call.read()) is not grpc.aio.EOF:
                        received += len(chunk.data)
            assert received < 4 * LARGE.numel

    asyncio.run(scenario())


def test_a_certificate_that_is_over_counts_no_more_on_a_warm_connection(tmp_path: Path) -> None:
    ahead = 0.0

    async def scenario() -> None:
        nonlocal ahead
        async with served(new_folder(tmp_path / "run"), Clock(unix=lambda: time.time() + ahead)) as run, run.peer("a") as a:
            await found_run(a)
            ahead = 2 * LIFETIME_S
            with pytest.raises(grpc.aio.AioRpcError, match=r"the certificate of a expired on .* UTC; renew it") as refused:
                await a.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=a.run_id))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert await ended(a._call) == (grpc.StatusCode.UNAVAILABLE, "the certificate of a has expired; renew it")

    asyncio.run(scenario())


def test_an_aged_connection_takes_no_new_call_and_keeps_its_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggregator.server.server_options", partial(server_options, connection_age_s=0.2))

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            async with asyncio.timeout(WAIT_S):
                while (state := a.channel.get_state()) is grpc.ChannelConnectivity.READY:
                    await a.channel.wait_for_state_change(state)
            await a.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=a.run_id))  # over a new connection
            a.received.clear()
            run.coordinator.run.pause()
            assert (await a.view()).reason.startswith("paused")  # over the old one
            assert run.coordinator.run.attendances.get("a") is not None

    asyncio.run(scenario())
