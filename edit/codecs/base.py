"""What a codec is: four lines of protocol, and everything that follows from them.

Owns: the Codec protocol, decoding in cache-sized pieces, views of byte buffers. Must not know: one format, peers, residuals.
All formats are little-endian, as every machine that torch is built for here; another byte order is refused (`codec()`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.shards import Shard

__all__ = ["PIECE", "Buffer", "Codec", "flat_fp32", "new_buffer", "view"]

Buffer = bytes | bytearray | memoryview

PIECE = 1 << 17  # elements handled at a time: 512 KiB of fp32 stay in the cache from one operation on them to the next


class Codec(Protocol):
    """One format for a flat fp32 vector. A new one: a file with such a class, and a line in `edit.codecs`.

    lossless: decode(encode(x)) is x to the bit, so error feedback keeps no residual. granule: elements in a block,
    which has bytes of its own; 1 where each element stands alone.
    """

    name: str
    lossless: bool
    granule: int

    def encoded_size(self, numel: int) -> int:
        """Exact number of bytes that encode `numel` elements."""
        ...

    def encode(self, flat: Tensor) -> memoryview:
        """Encode a flat fp32 CPU tensor into new memory. Same input, same bytes; what is not finite decodes to not finite."""
        ...

    def pieces(self, data: Buffer, numel: int) -> Iterator[Tensor]:
        """Decode PIECE elements at a time, in order (the last piece may be shorter).

        A piece is fp32 and valid until the next one. That of a lossless codec may be `data` itself and is only to be read; any
        other is scratch that the caller may overwrite. The length of `data` has been checked.
        """
        ...

    def cut(self, data: Buffer, shard: Shard) -> memoryview:
        """What encodes a shard out of `data`, which encodes its fragment; may share `data`'s memory.

        granule 1: exactly the shard, in its own order. Else: all blocks that it touches, ascending (see
        `edit.codecs.blocks`), which is again a vector in this format. The length of `data` has been checked.
        """
        ...

    def decode_pieces(self, data: Buffer, numel: int) -> Iterator[Tensor]:
        """As `pieces`, for data from outside. Raises RemoteProtocolError when `data` has not exactly the right length."""
        size = memoryview(data).nbytes
        if numel < 0 or size != self.encoded_size(numel):
            raise RemoteProtocolError(f"{size} bytes cannot be {numel} elements in {self.name}")
        return self.pieces(data, numel)

    def decode(self, data: Buffer, numel: int) -> Tensor:
        """A new fp32 tensor, shape [numel]. Raises RemoteProtocolError when `data` has not exactly the right length."""
        pieces = self.decode_pieces(data, numel)
        out = torch.empty(numel, dtype=torch.float32)
        for i, piece in enumerate(pieces):
            out[i * PIECE : (i + 1) * PIECE] = piece
        return out

    def decode_add(self, data: Buffer, out: Tensor, weight: float) -> None:
        """out += weight * decode(data), in place, rounded after the product and after the sum. Raises as `decode`."""
        pieces = self.decode_pieces(data, out.numel())
        scratch = torch.empty(min(PIECE, out.numel()) if self.lossless else 0, dtype=torch.float32)
        for i, piece in enumerate(pieces):
            weighted = torch.mul(piece, weight, out=scratch[: piece.numel()]) if self.lossless else piece.mul_(weight)
            out[i * PIECE : (i + 1) * PIECE].add_(weighted)


def flat_fp32(flat: Tensor) -> Tensor:
    """`flat` without history and contiguous. Raises LocalProtocolError when it is not a flat fp32 CPU tensor."""
    if flat.ndim != 1 or flat.dtype != torch.float32 or flat.device.type != "cpu":
        raise LocalProtocolError(f"a codec takes a flat fp32 CPU tensor, not {list(flat.shape)} {flat.dtype} on {flat.device}")
    return flat.detach().contiguous()


def new_buffer(size: int) -> memoryview:
    """`size` writable bytes of arbitrary contents, from torch's allocator: a bytearray would clear its memory first."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


def view(data: Buffer, dtype: torch.dtype, count: int, offset: int, spare: bytearray) -> Tensor:
    """`count` elements of `data` from byte `offset`, shared; for read-only data through `spare`, which must be large enough."""
    source = memoryview(data).cast("B")
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if not source.readonly:
        return torch.frombuffer(source, dtype=dtype, count=count, offset=offset)
    size = count * dtype.itemsize
    memoryview(spare)[:size] = source[offset : offset + size]
    return torch.frombuffer(spare, dtype=dtype, count=count)
