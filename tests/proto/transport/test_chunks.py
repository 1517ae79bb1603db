"""A byte string arrives whole and in order, or not at all."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.errors import RemoteProtocolError
from editpb import tensors_pb2 as pb
from editpb.limits import MAX_CHUNK_BYTES
from editpb.transport.chunks import Reassembly, make_chunks
from tests.support.exhaustive import examples


@given(data=st.binary(max_size=200), chunk_bytes=st.integers(1, 70), broke_at=st.integers(0, 200))
@settings(deadline=None, max_examples=examples(150))
def test_chunks_cover_every_byte_once_also_when_resumed(data: bytes, chunk_bytes: int, broke_at: int) -> None:
    into = Reassembly("x", len(data), 200)
    for chunk in make_chunks(memoryview(data)[: min(broke_at, len(data))], chunk_bytes):
        into.take(chunk)
    for chunk in make_chunks(bytearray(data), chunk_bytes, start=into.received):
        assert 0 < len(chunk.data) <= chunk_bytes
        into.take(chunk)
    assert into.complete and into.finish() == data


def numbers(count: int = 4) -> list[pb.Chunk]:
    return list(make_chunks(bytes(range(5 * count)), 5))


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ([1], "byte 5 where 0 was due"),
        ([0, 0], "byte 0 where 5 was due"),
        ([0, 2], "byte 10 where 5 was due"),
        ([0, 1, 2, 3], "more than the announced 15"),
    ],
)
def test_reordered_duplicated_missing_or_surplus_chunks_are_refused(order: list[int], reason: str) -> None:
    into = Reassembly("fragment 3", 15, 100)
    for i in order[:-1]:
        into.take(numbers()[i])
    before = into.received
    with pytest.raises(RemoteProtocolError, match=f"fragment 3: .*{reason}"):
        into.take(numbers()[order[-1]])
    assert into.received == before


def test_a_truncated_stream_is_refused() -> None:
    into = Reassembly("fragment 3", 15, 100)
    into.take(numbers()[0])
    with pytest.raises(RemoteProtocolError, match="5 of 15 bytes arrived"):
        into.finish()


def test_what_is_announced_above_the_cap_is_refused_and_what_is_below_takes_no_memory_yet() -> None:
    with pytest.raises(RemoteProtocolError, match="101 bytes announced, 100 are allowed"):
        Reassembly("x", 101, 100)
    assert Reassembly("x", 1 << 42, 1 << 43).received == 0


@pytest.mark.parametrize("size", [0, MAX_CHUNK_BYTES + 1])
def test_empty_and_oversized_chunks_are_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"a chunk of {size} bytes"):
        Reassembly("x", 1 << 30, 1 << 30).take(pb.Chunk(data=bytes(size)))


def test_bytes_of_another_digest_are_refused_at_the_end_and_may_be_sent_again() -> None:
    data = bytes(range(100))
    into = Reassembly("fragment 3", len(data), len(data), blake3(data).digest())
    for chunk in make_chunks(data[::-1], 40):
        into.take(chunk)
    assert into.complete
    with pytest.raises(RemoteProtocolError, match="fragment 3: its BLAKE3 is not the manifest's"):
        into.finish()
    into.clear()
    assert into.received == 0
    for chunk in make_chunks(data, 40):
        into.take(chunk)
    assert into.finish() == data
