"""The data plane of the scripted coordinator: takes contributions, gives updates and snapshots, breaks what it is told to."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import grpc
import torch

from edit.fragments.digest import digest, fragment_hash
from edit.fragments.shards import Shard
from edit.merging.outer_state import OuterState
from edit.records import Commit
from editpb import data_pb2, data_pb2_grpc, tensors_pb2
from editpb.data_messages import (
    contribution_header_from_pb,
    snapshot_manifest_to_pb,
    snapshot_request_from_pb,
    update_manifest_to_pb,
    update_request_from_pb,
)
from editpb.messages import ContributionHeader, RunPhase, SnapshotManifest
from editpb.transport.chunks import make_chunks
from tests.support.encoded import cut

if TYPE_CHECKING:
    from tests.support.fake_coordinator import FakeCoordinator

Slot = tuple[int, int, int]  # round_id, fragment_id, rank
AHEAD = -1  # the gate of a call that asks ahead of the commit


class FakeData(data_pb2_grpc.DataServicer):
    def __init__(self, fake: FakeCoordinator) -> None:
        self._fake = fake

    async def Contribute(
        self, requests: AsyncIterator[data_pb2.ContributePart], context: grpc.aio.ServicerContext
    ) -> data_pb2.ContributionReceipt:
        fake = self._fake
        fake.calls["Contribute"] += 1
        header = contribution_header_from_pb((await anext(requests)).header, fake.schema)
        if fake.refuse_contributions:
            await context.abort(*fake.refuse_contributions.pop(0))
        slot = header.round_id, header.fragment_id, header.rank
        if late := fake.refusal(header):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, late)
        if not fake.io.change(lambda: self._offer(slot, header)):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a newer attempt is on its way")
        into, limit = fake.received[slot], fake.break_contribution_after.pop(0) if fake.break_contribution_after else None
        fake.io.change(lambda: fake.starts.append(len(into)))
        async for part in requests:
            assert part.chunk.offset == len(into)
            into += part.chunk.data
            if limit is not None and len(into) >= limit:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
        if len(into) == header.total_bytes:
            fake.io.change(lambda: self._contributed(slot, header))
        return data_pb2.ContributionReceipt(complete=len(into) == header.total_bytes, received_bytes=len(into))

    def _offer(self, slot: Slot, header: ContributionHeader) -> bool:
        """Whether this attempt is the newest; what an older one left is thrown away."""
        fake, before = self._fake, self._fake.offered.get(slot, header)
        if header.attempt < before.attempt:
            return False
        if header.attempt > before.attempt:
            fake.headers.pop(slot, None)
            fake.received[slot] = bytearray()
        fake.offered[slot] = header
        return True

    def _contributed(self, slot: Slot, header: ContributionHeader) -> None:
        fake = self._fake
        if fake.offered[slot].attempt != header.attempt:
            return
        fake.headers[slot] = header
        if not fake.refusal(header) and fake.complete(header.round_id):
            fake.script(fake)

    async def Probe(self, request: data_pb2.ContributionHeader, context: grpc.aio.ServicerContext) -> data_pb2.ProbeReply:
        fake = self._fake
        fake.calls["Probe"] += 1
        header = contribution_header_from_pb(request, fake.schema)
        if fake.config.rounds.max_staleness and (late := fake.refusal(header)):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, late)
        slot = header.round_id, header.fragment_id, header.rank
        fake.io.change(lambda: self._offer(slot, header))
        held = len(fake.received[slot])
        return data_pb2.ProbeReply(received_bytes=held, complete=held == request.total_bytes)

    async def FetchUpdate(
        self, request: data_pb2.UpdateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[data_pb2.UpdatePart]:
        fake = self._fake
        commit, shards = fake.updates.get(request.outer_step), update_request_from_pb(request, fake.schema).shards
        if commit is None and request.round_id:
            fake.io.change(lambda: fake.calls.update(ahead=fake.calls["ahead"] + 1))
            await fake.gate(AHEAD)
            await context.abort(grpc.StatusCode.NOT_FOUND, "no longer kept")
        fake.calls["FetchUpdate"] += 1
        if commit is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no longer kept")
            return
        if (refusal := fake.refuse_update(shards)) is not None:
            await context.abort(*refusal)
        commit = _cut(commit, shards) if shards is not None else commit
        fake.update_offsets.append(request.offset)
        if request.offset == 0:
            fake.asked_for.append(shards)
            yield data_pb2.UpdatePart(manifest=update_manifest_to_pb(commit))
        else:
            assert request.digest == commit.digest
        at, stop, sent = 0, request.offset + request.limit, 0
        limit = fake.break_update_after.pop(0) if fake.break_update_after else None
        for fragment in commit.fragments:
            data = memoryview(fragment.payload.data).cast("B") if fragment.payload is not None else memoryview(b"")
            start, end = max(0, request.offset - at), min(len(data), stop - at)
            at += len(data)
            if start >= end:
                continue
            if await fake.gate(fragment.fragment_id):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            for chunk in make_chunks(data[:end], 1 << 16, start=start):
                if limit is not None and sent >= limit:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
                sent += len(chunk.data)
                if fake.damage_updates > 0:
                    fake.damage_updates -= 1
                    chunk = tensors_pb2.Chunk(offset=chunk.offset + 1, data=chunk.data)
                yield data_pb2.UpdatePart(chunk=data_pb2.FragmentChunk(fragment_id=fragment.fragment_id, chunk=chunk))

    async def DescribeSnapshot(
        self, request: data_pb2.SnapshotManifestRequest, context: grpc.aio.ServicerContext
    ) -> data_pb2.SnapshotManifest:
        fake = self._fake
        fake.calls["DescribeSnapshot"] += 1
        assert fake.state is not None
        return snapshot_manifest_to_pb(
            SnapshotManifest(
                outer_step=fake.state.outer_step,
                digest=fake.state.digest,
                schema=fake.schema,
                fragment_hash=tuple(fragment_hash(part) for part in fake.state.theta),
            )
        )

    async def FetchSnapshot(
        self, request: data_pb2.SnapshotRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[tensors_pb2.Chunk]:
        fake = self._fake
        fake.calls["FetchSnapshot"] += 1
        if fake.lose_snapshots > 0:
            fake.lose_snapshots -= 1
            await context.abort(grpc.StatusCode.NOT_FOUND, "no longer kept")
        fake.starts.append(request.offset)
        assert fake.state is not None
        sent, limit = 0, fake.break_snapshot_after.pop(0) if fake.break_snapshot_after else None
        for wanted in snapshot_request_from_pb(request, fake.schema).one_by_one():
            part = Shard(fake.schema.fragments[wanted.fragment_id], wanted.boxes).take(fake.state.theta[wanted.fragment_id])
            for chunk in make_chunks(part.numpy().data, 1024, start=wanted.offset):
                if limit is not None and sent >= limit:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
                if fake.damage_snapshots > 0:
                    fake.damage_snapshots -= 1
                    chunk = _damaged(chunk)
                sent += len(chunk.data)
                yield chunk

    async def Found(
        self, requests: AsyncIterator[data_pb2.FoundPart], context: grpc.aio.ServicerContext
    ) -> data_pb2.FoundReply:
        fake = self._fake
        fake.calls["Found"] += 1
        header = (await anext(requests)).header
        data = fake.founding.setdefault(header.digest, [bytearray() for _ in fake.schema.fragments])
        total, limit = 4 * fake.schema.numel, fake.break_founding_after.pop(0) if fake.break_founding_after else None
        fake.founding_starts.append(sum(map(len, data)))
        async for part in requests:
            assert part.chunk.chunk.offset == len(data[part.chunk.fragment_id])
            data[part.chunk.fragment_id] += part.chunk.chunk.data
            if limit is not None and sum(map(len, data)) >= limit:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
        received = sum(map(len, data))
        if received == total:
            fake.io.change(lambda: self._founded(header.digest, data))
        return data_pb2.FoundReply(received_bytes=received, complete=received == total)

    def _founded(self, claimed: str, data: Sequence[bytearray]) -> None:
        fake = self._fake
        fake.founded = [torch.frombuffer(each, dtype=torch.float32) for each in data]
        assert digest(fake.founded) == claimed
        fake.state = OuterState(fake.schema, fake.config, fake.founded)
        fake.change_view(phase=RunPhase.GATHERING, digest=fake.state.digest, found=False)


def _cut(commit: Commit, shards: Sequence[Shard]) -> Commit:
    return dataclasses.replace(
        commit,
        fragments=tuple(
            dataclasses.replace(part, payload=part.payload and cut(part.payload, shards[part.fragment_id]))
            for part in commit.fragments
        ),
    )


def _damaged(chunk: tensors_pb2.Chunk) -> tensors_pb2.Chunk:
    return tensors_pb2.Chunk(offset=chunk.offset, data=bytes([chunk.data[0] ^ 1]) + chunk.data[1:])
