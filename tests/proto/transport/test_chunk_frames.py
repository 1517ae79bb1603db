"""Chunks that are joined and split by hand are what protobuf makes and reads, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from editpb import data_pb2 as pb
from editpb import tensors_pb2 as tpb
from editpb.limits import CHUNK_BYTES
from editpb.transport.chunk_frames import (
    ReceivedChunk,
    contribute_frames,
    contribute_part,
    serialize,
    update_frames,
    update_part,
)
from editpb.transport.chunks import make_chunks
from tests.support.exhaustive import examples

SIZES = (0, 1, 127, 128, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17)
BYTES = bytes(range(256)) * (SIZES[-1] // 256 + 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("start", [0, 1, 1 << 20])
def test_a_frame_is_the_message_that_protobuf_makes(size: int, start: int) -> None:
    data = memoryview(BYTES)[:size]
    up = [pb.ContributePart(chunk=chunk).SerializeToString() for chunk in make_chunks(data, start=start)]
    assert list(contribute_frames(data, start=start)) == up
    for fragment_id in (0, 1, 127, 128, 70_000):
        chunks = [pb.FragmentChunk(fragment_id=fragment_id, chunk=chunk) for chunk in make_chunks(data)]
        assert list(update_frames(fragment_id, data)) == [pb.UpdatePart(chunk=chunk).SerializeToString() for chunk in chunks]


def test_each_chunk_is_as_large_as_is_said_when_it_is_made() -> None:
    sizes = iter([300, 1 << 20, 1, 5000, 1 << 21])
    read = [update_part(frame) for frame in update_frames(3, BYTES[: 2 << 20], start=77, chunk_bytes=lambda: next(sizes))]
    parts = [part for part in read if isinstance(part, ReceivedChunk)]
    assert [len(part.data) for part in parts] == [300, 1 << 20, 1, 5000, (1 << 20) - 77 - 300 - 1 - 5000]
    assert b"".join(part.data for part in parts) == BYTES[77 : 2 << 20]
    assert [part.offset for part in parts] == [77, 377, 377 + (1 << 20), 378 + (1 << 20), 5378 + (1 << 20)]


@pytest.mark.parametrize("size", SIZES)
def test_a_frame_is_read_without_a_copy(size: int) -> None:
    offset = 0
    for frame in contribute_frames(BYTES[:size]):
        part = contribute_part(frame)
        assert isinstance(part, ReceivedChunk) and isinstance(part.data, memoryview) and part.data.obj is frame
        assert (part.fragment_id, part.offset) == (0, offset) and part.data == BYTES[offset : offset + len(part.data)]
        offset += len(part.data)
    assert offset == size
    for frame in update_frames(70_000, BYTES[:size]):
        read = update_part(frame)
        assert isinstance(read, ReceivedChunk) and isinstance(read.data, memoryview) and read.fragment_id == 70_000


@given(offset=st.integers(0, 1 << 64 - 1), data=st.binary(max_size=40), fragment_id=st.integers(0, (1 << 32) - 1))
@settings(deadline=None, max_examples=examples(200))
def test_every_message_of_protobuf_is_read_alike(offset: int, data: bytes, fragment_id: int) -> None:
    chunk = tpb.Chunk(offset=offset % (1 << 64), data=data)
    up = contribute_part(pb.ContributePart(chunk=chunk).SerializeToString())
    assert isinstance(up, ReceivedChunk) and (up.offset, bytes(up.data)) == (chunk.offset, data)
    part = pb.UpdatePart(chunk=pb.FragmentChunk(fragment_id=fragment_id, chunk=chunk))
    down = update_part(part.SerializeToString())
    assert isinstance(down, ReceivedChunk)
    assert (down.fragment_id, down.offset, bytes(down.data)) == (fragment_id, chunk.offset, data)


def test_fields_in_another_order_and_unknown_ones_are_read_by_protobuf() -> None:
    chunk = b"\x12\x03abc" + b"\x08\x05" + b"\x1d\x00\x00\x00\x00"  # data, offset, and the CRC of protocol 3
    part = contribute_part(b"\x12" + bytes([len(chunk)]) + chunk)
    assert isinstance(part, ReceivedChunk) and (part.offset, bytes(part.data)) == (5, b"abc")


def test_a_header_stays_a_message() -> None:
    header = pb.ContributePart(header=pb.ContributionHeader(run_id="run"))
    assert contribute_part(serialize(header)) == header
    manifest = pb.UpdatePart(manifest=pb.UpdateManifest(outer_step=3))
    assert update_part(serialize(manifest)) == manifest
    assert contribute_part(b"") == pb.ContributePart()


@given(message=st.binary(max_size=60))
@settings(deadline=None, max_examples=examples(500))
def test_arbitrary_bytes_are_read_as_protobuf_reads_them(message: bytes) -> None:
    try:
        expected = pb.ContributePart.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            contribute_part(message)
        return
    part = contribute_part(message)
    if expected.WhichOneof("kind") == "chunk":
        assert isinstance(part, ReceivedChunk)
        assert (part.offset, bytes(part.data)) == (expected.chunk.offset, expected.chunk.data)
    else:
        assert part == expected
