"""The bytes that hosts fetch from each other: an update that is offered or kept, and the whole state of a part.

Who fetches knows the part's schema, and so how many bytes there can be: a header that announces more is refused before memory
is taken. A source that sends nothing for STALL_S, or less than MIN_BYTES_PER_S, is given up. It sends its metadata at once,
even if it is still busy with other readers or with its journal; after that the first message may take as long as the bytes of
the answer's tensors may take.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import torch
from torch import Tensor

from aggregator.data.round_runner import Source
from aggregator.storage.upload_buffer import Upload, UploadBuffer
from aggregator.swarm.offers import MOST_MANIFEST, Offer
from aggregator.swarm.replication import PartSnapshot
from edit.codecs import codec
from edit.config.average import AverageConfig
from edit.council.record import Update
from edit.errors import RemoteProtocolError, TransportError
from edit.fragments.schema import Schema
from edit.merging.outer_state import OuterState
from edit.plain_text import parse_json
from editpb import council_pb2 as pb
from editpb.council_messages import (
    MergedContribution,
    OfferHeader,
    StateHeader,
    merged_contribution_from_pb,
    merged_contribution_to_pb,
    offer_header_from_pb,
    offer_header_to_pb,
    state_header_from_pb,
    state_header_to_pb,
)
from editpb.limits import CHUNK_BYTES, fail
from editpb.transport.chunk_frames import ReceivedChunk, update_frames
from editpb.transport.chunks import Reassembly
from editpb.transport.parts import metadata_of
from editpb.transport.status import from_rpc

if TYPE_CHECKING:
    from editpb.council_pb2_grpc import CouncilStub

__all__ = [
    "body_sizes",
    "contribution_parts",
    "fetch_contributions",
    "fetch_offer",
    "fetch_phi",
    "fetch_state",
    "offer_parts",
    "state_parts",
]

STALL_S = 10.0
MIN_BYTES_PER_S = 1 << 17  # about 1 Mbit/s; of sources and, where they serve, of readers
MOST_DESCRIPTION = 64 << 20  # bytes: the statistics of all peers, and names
_BYTES_PER_ELEMENT = 16  # of a state: theta, two slots and a residual, fp32
_DTYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.bfloat16, torch.uint8, torch.int8)}
_T = TypeVar("_T")


def body_sizes(outer: OuterState) -> tuple[int, ...]:
    """Return how many bytes each fragment has in an update."""
    named = zip(outer.recorded_as, outer.schema.fragments, strict=True)
    return tuple(codec(name).encoded_size(fragment.numel) for name, fragment in named)


# -- who is asked ----------------------------------------------------------------------------------------------------------


async def offer_parts(offer: Offer, chunk_bytes: int = CHUNK_BYTES) -> AsyncGenerator[pb.OfferPart | bytes, None]:
    """Yield the messages that bring an update, in chunks of so many bytes."""
    sizes = tuple(len(memoryview(body).cast("B")) for body in offer.bodies)
    yield pb.OfferPart(header=offer_header_to_pb(OfferHeader(offer.update, len(offer.manifest), sizes)))
    for i, data in enumerate((offer.manifest, *offer.bodies)):
        for frame in update_frames(i, memoryview(data), chunk_bytes=lambda: chunk_bytes):
            yield frame


async def contribution_parts(
    sources: Sequence[Source], chunk_bytes: int = CHUNK_BYTES
) -> AsyncGenerator[pb.ContributionsPart | bytes, None]:
    """Yield the messages that bring what an update was merged from, likewise. Raises StorageError when that is gone."""
    for i, source in enumerate(sources):
        yield pb.ContributionsPart(header=merged_contribution_to_pb(MergedContribution(source.shard.header, source.work)))
        for frame in update_frames(i, source.shard.upload.payload(), chunk_bytes=lambda: chunk_bytes):
            yield frame


async def state_parts(snapshot: PartSnapshot, chunk_bytes: int = CHUNK_BYTES) -> AsyncGenerator[pb.StatePart | bytes, None]:
    """Yield the messages that bring a part's state, likewise."""
    tensors = [(name, each.contiguous().view(-1)) for name, each in sorted(snapshot.tensors.items())]
    named = [(name, str(each.dtype).removeprefix("torch.")) for name, each in tensors]
    description = json.dumps({"metadata": snapshot.metadata, "tensors": named}, allow_nan=False).encode()
    sizes = tuple(each.numel() * each.element_size() for _, each in tensors)
    yield pb.StatePart(header=state_header_to_pb(StateHeader(snapshot.name, snapshot.tokens, len(description), sizes)))
    for i, data in enumerate([memoryview(description), *(each.view(torch.uint8).numpy().data for _, each in tensors)]):
        for frame in update_frames(i, data, chunk_bytes=lambda: chunk_bytes):
            yield frame


# -- who asks --------------------------------------------------------------------------------------------------------------


async def fetch_offer(stub: CouncilStub, part: int, outer_step: int, update_id: str, sizes: Sequence[int]) -> Offer:
    """Return the update TO this outer step with this id. Its hashes are not checked yet.

    Args:
        sizes: the bytes of each fragment (`body_sizes`): no update has more.

    Raises RemoteProtocolError, TransportError, GoneError, RefusedError.
    """

    def announced(first: pb.OfferPart) -> tuple[OfferHeader, list[int]]:
        header = offer_header_from_pb(first.header)
        update, bodies = header.update, header.body_bytes
        if (update.part, update.outer_step, update.id) != (part, outer_step, update_id):
            fail(f"part {part}: another update than the one to outer step {outer_step} that was asked for")
        most, longest = sum(sizes), max(sizes)
        if len(bodies) > len(sizes) or max(bodies, default=0) > longest or sum(bodies) > most:
            fail(f"part {part}: an update of {sum(bodies)} bytes in {len(bodies)} fragments; it has at most {most}")
        if header.manifest_bytes > MOST_MANIFEST:
            fail(f"part {part}: a manifest of {header.manifest_bytes} bytes")
        return header, [header.manifest_bytes, *bodies]

    request = pb.OfferRequest(outer_step=outer_step, id=bytes.fromhex(update_id))
    call: Any = stub.FetchOffer(request, metadata=metadata_of(part))
    header, (manifest, *bodies) = await _received(call, announced, sum(sizes))
    return Offer(header.update, bytes(manifest), tuple(bodies))


async def fetch_contributions(
    stub: CouncilStub, part: int, update: Update, schema: Schema, take: Callable[[MergedContribution], Upload]
) -> None:
    """Receive what an update was merged from, one shard after the other.

    Args:
        schema: of the part.
        take: checks each, and returns where its bytes go.

    Raises what `take` raises, RemoteProtocolError, TransportError, GoneError, RefusedError.
    """
    request = pb.OfferRequest(outer_step=update.outer_step, id=bytes.fromhex(update.id))
    call: Any = stub.FetchContributions(request, metadata=metadata_of(part))
    clock, uploads = asyncio.get_running_loop().time, list[Upload]()
    give_up_at = clock() + STALL_S
    try:
        while True:
            async with asyncio.timeout(min(STALL_S, give_up_at - clock())):
                message = await call.read()
            if message is grpc.aio.EOF:
                break
            if isinstance(message, ReceivedChunk):
                if not uploads or message.fragment_id != len(uploads) - 1:
                    fail(f"part {part}: a chunk without the header of its contribution")
                await uploads[-1].write(message.offset, message.data)
                continue
            if message.WhichOneof("kind") != "header" or (uploads and not uploads[-1].complete):
                fail(f"part {part}: a contribution ends before it is whole")
            uploads.append(take(merged_contribution_from_pb(message.header, schema)))
            give_up_at += uploads[-1].total_bytes / MIN_BYTES_PER_S
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
    except TimeoutError:
        raise TransportError("the source of a fetch is too slow") from None
    finally:
        call.cancel()


async def fetch_state(stub: CouncilStub, part: int, schema: Schema, average: AverageConfig) -> PartSnapshot:
    """Return a part's state of now, not checked but for its size. schema: of the part. Raises as `fetch_offer`."""
    most = _BYTES_PER_ELEMENT + average.bytes_per_parameter
    return await _state(stub.FetchState(pb.StateRequest(), metadata=metadata_of(part)), part, schema, most)


async def fetch_phi(stub: CouncilStub, settling: int, schema: Schema, uploads: UploadBuffer | None = None) -> PartSnapshot:
    """Return outer parameters of one peer (see PhiRequest), not checked but for their size.

    uploads: holds them, until it is closed; None: memory of their own does. Raises as `fetch_offer`, and StorageError.
    """
    return await _state(stub.FetchPhi(pb.PhiRequest(settling=settling)), 0, schema, 4, uploads)


async def _state(
    call: Any, part: int, schema: Schema, bytes_per_element: int, uploads: UploadBuffer | None = None
) -> PartSnapshot:
    most = bytes_per_element * schema.numel

    def announced(first: pb.StatePart) -> tuple[StateHeader, list[int]]:
        header = state_header_from_pb(first.header)
        if header.description_bytes > MOST_DESCRIPTION or sum(header.tensor_bytes) > most:
            fail(
                f"part {part}: a state of {header.description_bytes} + {sum(header.tensor_bytes)} bytes; it has at most {most}"
            )
        return header, [header.description_bytes, *header.tensor_bytes]

    header, (description, *data) = await _received(call, announced, most, uploads)
    try:
        values = parse_json(bytes(description), finite=True)
        if not isinstance(values, dict) or not isinstance(values["metadata"], dict):
            raise ValueError("no description")
        tensors = {str(name): _tensor(dtype, each) for (name, dtype), each in zip(values["tensors"], data, strict=True)}
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"part {part}: the state cannot be read ({error or type(error).__name__})") from error
    return PartSnapshot(header.name, header.tokens, schema.to_json(), tensors, values["metadata"])


def _tensor(dtype: str, data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=_DTYPES[dtype]) if len(data) else torch.empty(0, dtype=_DTYPES[dtype], device="cpu")


async def _received(
    call: Any, announced: Callable[[Any], tuple[_T, list[int]]], most: int, uploads: UploadBuffer | None = None
) -> tuple[_T, list[memoryview]]:
    """Return the header of an answer, and the byte strings that follow it.

    most: bytes that its tensors have. uploads: holds the strings; nothing of an answer that fails.
    """
    opened = list[Upload]()

    def buffer(name: str, size: int) -> Reassembly | Upload:
        if uploads is None or size == 0:
            return Reassembly(name, size, size)
        opened.append(uploads.open(name, size))
        return opened[-1]

    try:
        first = await _first(call, most)
        if first is grpc.aio.EOF or isinstance(first, ReceivedChunk) or first.WhichOneof("kind") != "header":
            fail("an answer begins with its header")
        header, sizes = announced(first)
        buffers = [buffer(f"byte string {i}", size) for i, size in enumerate(sizes)]
        async with asyncio.timeout(STALL_S + sum(sizes) / MIN_BYTES_PER_S):
            await _fill(call, buffers)
        whole = [_whole(each) for each in buffers]
        opened.clear()
        return header, whole
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
    except TimeoutError:
        raise TransportError("the source of a fetch is too slow") from None
    finally:
        call.cancel()
        for upload in opened:
            upload.drop("its fetch has failed")


def _whole(buffer: Reassembly | Upload) -> memoryview:
    if isinstance(buffer, Reassembly):
        return buffer.finish()
    if not buffer.complete:
        fail(f"{buffer.received_bytes} of {buffer.total_bytes} bytes arrived")
    return buffer.payload()


async def _first(call: Any, most: int) -> Any:
    """Return the first message. Raises TimeoutError."""
    reading = asyncio.ensure_future(call.read())
    begun = asyncio.ensure_future(call.initial_metadata())
    try:
        async with asyncio.timeout(STALL_S):
            await asyncio.wait((reading, begun), return_when=asyncio.FIRST_COMPLETED)
        async with asyncio.timeout(STALL_S + most / MIN_BYTES_PER_S):
            return await reading
    finally:
        reading.cancel()
        begun.cancel()


async def _fill(call: Any, buffers: Sequence[Reassembly | Upload]) -> None:
    while True:
        async with asyncio.timeout(STALL_S):
            part = await call.read()
        if part is grpc.aio.EOF:
            return
        if not isinstance(part, ReceivedChunk) or part.fragment_id >= len(buffers):
            fail("after the header only chunks of what it announces follow")
        into = buffers[part.fragment_id]
        if isinstance(into, Upload):
            await into.write(part.offset, part.data)
        else:
            into.take(part)
