"""Cut a byte string into bounded chunks, and reassemble it under a cap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from blake3 import blake3

from edit.codecs.base import new_buffer
from editpb import tensors_pb2 as pb
from editpb.limits import CHUNK_BYTES, MAX_CHUNK_BYTES, fail

__all__ = ["Chunk", "Reassembly", "make_chunks"]


def make_chunks(data: bytes | bytearray | memoryview, chunk_bytes: int = CHUNK_BYTES, *, start: int = 0) -> Iterator[pb.Chunk]:
    """Cut `data[start:]` into chunks of at most `chunk_bytes`; offsets count from the beginning of `data`."""
    view = memoryview(data).cast("B")
    for offset in range(start, len(view), chunk_bytes):
        yield pb.Chunk(offset=offset, data=bytes(view[offset : offset + chunk_bytes]))


class Chunk(Protocol):
    """A chunk on its arrival, as protobuf or `editpb.transport.chunk_frames` decoded it."""

    @property
    def offset(self) -> int: ...
    @property
    def data(self) -> bytes | memoryview: ...


class Reassembly:
    """Puts `total` bytes together that must come in order, without gap, overlap or surplus, over as many streams as it takes.

    Memory is taken with the first chunk, and the system gives it page by page with what has really arrived. Raises
    RemoteProtocolError; a chunk that is refused changes nothing.

    Args:
        name: what the bytes are, for messages.
        total: how many are announced.
        cap: the most bytes that the receiver is willing to hold.
        digest: BLAKE3 of all bytes, checked at the end; None: it is not known.
    """

    def __init__(self, name: str, total: int, cap: int, digest: bytes | None = None) -> None:
        if not 0 <= total <= cap:
            fail(f"{name}: {total} bytes announced, {cap} are allowed")
        self.total = total
        self._name, self._digest = name, digest
        self.clear()

    @property
    def received(self) -> int:
        """Bytes so far: where the next chunk must begin."""
        return self._received

    @property
    def complete(self) -> bool:
        """Whether all bytes are here."""
        return self._received == self.total

    @property
    def arrived(self) -> memoryview:
        """What has arrived; may be written into, where no digest is checked."""
        return self._data[: self._received]

    def clear(self) -> None:
        """Throw away what has arrived."""
        self._data, self._received = memoryview(bytearray()), 0
        self._hash = blake3() if self._digest is not None else None

    def take(self, chunk: Chunk) -> None:
        """Append the next chunk."""
        offset, data = chunk.offset, chunk.data
        if not data or len(data) > MAX_CHUNK_BYTES:
            fail(f"{self._name}: a chunk of {len(data)} bytes; 1 to {MAX_CHUNK_BYTES} are allowed")
        if offset != self._received:
            fail(f"{self._name}: a chunk at byte {offset} where {self._received} was due")
        if (end := offset + len(data)) > self.total:
            fail(f"{self._name}: more than the announced {self.total} bytes")
        if not self._data:
            self._data = new_buffer(self.total)
        self._data[offset:end] = data
        self._received = end
        if self._hash is not None:
            self._hash.update(data)

    def finish(self) -> memoryview:
        """Return all bytes, once complete."""
        if not self.complete:
            fail(f"{self._name}: {self._received} of {self.total} bytes arrived")
        if self._hash is not None and self._hash.digest() != self._digest:
            fail(f"{self._name}: its BLAKE3 is not the manifest's")
        return self._data
