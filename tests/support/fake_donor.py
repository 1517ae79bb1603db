"""Members that serve snapshots in every way that one may: well, and otherwise. Plaintext, on the loop of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from torch import Tensor

from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from editpb import data_pb2, data_pb2_grpc, tensors_pb2
from editpb.data_messages import snapshot_request_from_pb
from editpb.messages import Donor, Serving, SnapshotRequest
from editpb.transport.chunks import make_chunks
from peers.carriers.run_connection import Traffic
from tests.support.loops import pass_time

PIECE = 1024  # bytes of a chunk
Answer = Callable[[SnapshotRequest, bytes], AsyncIterator[tensors_pb2.Chunk]]


async def honest(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
    for chunk in make_chunks(data, PIECE, start=wanted.offset):
        yield chunk


def breaking(after: int, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Answer:
    """Sends so many chunks of a fragment, then breaks off."""

    async def answer(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
        for i, chunk in enumerate(make_chunks(data, PIECE, start=wanted.offset)):
            if i == after:
                raise Break(code)
            yield chunk

    return answer


async def lying(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
    async for chunk in honest(wanted, bytes(byte ^ 1 for byte in data)):
        yield chunk


async def short(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
    async for chunk in honest(wanted, data[:PIECE]):
        yield chunk


async def too_much(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
    """One chunk that goes beyond the end."""
    more = data[wanted.offset :] + b"more"
    yield tensors_pb2.Chunk(offset=wanted.offset, data=more)


async def damaged(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
    async for chunk in honest(wanted, data):
        yield tensors_pb2.Chunk(offset=chunk.offset, data=bytes([chunk.data[0] ^ 1]) + chunk.data[1:])


async def silent(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
    """Nothing, for longer than anybody waits. On a `HeldLoop`."""
    pass_time(3600.0)
    await asyncio.Event().wait()
    yield tensors_pb2.Chunk()


def dripping(traffic: Traffic, gap_s: float) -> Answer:
    """A byte at a time, each so many seconds after the reader, which counts `traffic`, took the one before. On a `HeldLoop`."""

    async def answer(wanted: SnapshotRequest, data: bytes) -> AsyncIterator[tensors_pb2.Chunk]:
        for chunk in make_chunks(data, 1, start=wanted.offset):
            taken = traffic.received + chunk.ByteSize()
            yield chunk
            while traffic.received != taken:  # noqa: ASYNC110 (for ever, once other bytes come instead)
                await asyncio.sleep(0)
            pass_time(gap_s)

    return answer


class Break(Exception):
    """The stream ends with this status."""


@dataclass
class FakeDonor(data_pb2_grpc.DataServicer):
    """asked: (fragment_id, offset, ticket) of every request."""

    schema: Schema
    theta: Sequence[Tensor]
    answer: Answer = honest
    asked: list[tuple[int, int, str]] = field(default_factory=list)
    address: str = ""

    def named(self, peer_id: str) -> Donor:
        return Donor(peer_id, Serving(self.address, f"ticket-of-{peer_id}"))

    async def FetchSnapshot(
        self, request: data_pb2.SnapshotRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[tensors_pb2.Chunk]:
        request_ = snapshot_request_from_pb(request, self.schema)
        self.asked.append((request_.fragment_id, request_.offset, request_.ticket))
        left = request_.limit
        try:
            for wanted in request_.one_by_one():
                part = Shard(self.schema.fragments[wanted.fragment_id], wanted.boxes).take(self.theta[wanted.fragment_id])
                data = part.numpy().tobytes()[: wanted.offset + left]
                left -= len(data) - wanted.offset
                async for chunk in self.answer(wanted, data):
                    yield chunk
                if left <= 0:
                    return
        except Break as broken:
            await context.abort(broken.args[0], "told to")


@asynccontextmanager
async def listening(*donors: FakeDonor) -> AsyncIterator[None]:
    servers = []
    for donor in donors:
        server = grpc.aio.server()
        data_pb2_grpc.add_DataServicer_to_server(donor, server)
        donor.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    try:
        yield
    finally:
        for server in servers:
            await server.stop(None)
