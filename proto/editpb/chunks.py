"""Cutting a byte string into bounded chunks, and putting it together again under a cap.

Owns: offsets and checksums. Must not know: what the bytes mean, connections.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from editpb import tensors_pb2 as pb
from editpb.limits import MAX_CHUNK_BYTES, fail

__all__ = ["CHUNK_BYTES", "Reassembly", "checked", "make_chunks"]

CHUNK_BYTES = 1 << 20


def make_chunks(data: bytes | bytearray | memoryview, chunk_bytes: int = CHUNK_BYTES, *, start: int = 0) -> Iterator[pb.Chunk]:
    """Cut `data[start:]` into chunks of at most `chunk_bytes`; offsets count from the beginning of `data`."""
    view = memoryview(data).cast("B")
    for offset in range(start, len(view), chunk_bytes):
        piece = bytes(view[offset : offset + chunk_bytes])
        yield pb.Chunk(offset=offset, data=piece, crc32=zlib.crc32(piece))


def checked(chunk: pb.Chunk) -> tuple[int, bytes]:
    """(offset, bytes) of a chunk. Raises RemoteProtocolError when it is empty, too large, or its CRC-32 is another."""
    data = chunk.data
    if not data or len(data) > MAX_CHUNK_BYTES:
        fail(f"a chunk of {len(data)} bytes; 1 to {MAX_CHUNK_BYTES} are allowed")
    if zlib.crc32(data) != chunk.crc32:
        fail(f"the chunk at byte {chunk.offset} is damaged (CRC-32)")
    return chunk.offset, data


class Reassembly:
    """Puts `total` bytes together that must come in order, without gap, overlap or surplus.

    name: what they are, for messages; cap: the most bytes the receiver is willing to hold. Memory grows with what has really
    arrived, never with what was announced. Raises RemoteProtocolError; a chunk that is refused changes nothing.
    """

    def __init__(self, name: str, total: int, cap: int) -> None:
        if not 0 <= total <= cap:
            fail(f"{name}: {total} bytes announced, {cap} are allowed")
        self._name, self._total, self._data = name, total, bytearray()

    @property
    def received(self) -> int:
        """Bytes so far: where the next chunk must begin."""
        return len(self._data)

    @property
    def complete(self) -> bool:
        return len(self._data) == self._total

    def take(self, chunk: pb.Chunk) -> None:
        """Append the next chunk."""
        offset, data = checked(chunk)
        if offset != len(self._data):
            fail(f"{self._name}: a chunk at byte {offset} where {len(self._data)} was due")
        if offset + len(data) > self._total:
            fail(f"{self._name}: more than the announced {self._total} bytes")
        self._data += data

    def finish(self) -> bytearray:
        """All bytes, once complete."""
        if not self.complete:
            fail(f"{self._name}: {len(self._data)} of {self._total} bytes arrived")
        return self._data
