"""Cut a byte string into bounded chunks, and reassemble it under a cap."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from blake3 import blake3

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
    """Return (offset, bytes) of a chunk. Raises RemoteProtocolError when it is empty, too large or damaged (CRC-32)."""
    data = chunk.data
    if not data or len(data) > MAX_CHUNK_BYTES:
        fail(f"a chunk of {len(data)} bytes; 1 to {MAX_CHUNK_BYTES} are allowed")
    if zlib.crc32(data) != chunk.crc32:
        fail(f"the chunk at byte {chunk.offset} is damaged (CRC-32)")
    return chunk.offset, data


class Reassembly:
    """Puts `total` bytes together that must come in order, without gap, overlap or surplus, over as many streams as it takes.

    Memory grows with what has really arrived, never with what was announced. Raises RemoteProtocolError; a chunk that is
    refused changes nothing.

    Args:
        name: what the bytes are, for messages.
        total: how many are announced.
        cap: the most bytes that the receiver is willing to hold.
        digest: BLAKE3 of all bytes, checked at the end; None: it is not known.
    """

    def __init__(self, name: str, total: int, cap: int, digest: bytes | None = None) -> None:
        if not 0 <= total <= cap:
            fail(f"{name}: {total} bytes announced, {cap} are allowed")
        self._name, self._total, self._digest = name, total, digest
        self.clear()

    @property
    def received(self) -> int:
        """Bytes so far: where the next chunk must begin."""
        return len(self._data)

    @property
    def complete(self) -> bool:
        """Whether all bytes are here."""
        return len(self._data) == self._total

    def clear(self) -> None:
        """Throw away what has arrived."""
        self._data = bytearray()
        self._hash = blake3() if self._digest is not None else None

    def take(self, chunk: pb.Chunk) -> None:
        """Append the next chunk."""
        offset, data = checked(chunk)
        if offset != len(self._data):
            fail(f"{self._name}: a chunk at byte {offset} where {len(self._data)} was due")
        if offset + len(data) > self._total:
            fail(f"{self._name}: more than the announced {self._total} bytes")
        self._data += data
        if self._hash is not None:
            self._hash.update(data)

    def finish(self) -> bytearray:
        """Return all bytes, once complete."""
        if not self.complete:
            fail(f"{self._name}: {len(self._data)} of {self._total} bytes arrived")
        if self._hash is not None and self._hash.digest() != self._digest:
            fail(f"{self._name}: its BLAKE3 is not the manifest's")
        return self._data
