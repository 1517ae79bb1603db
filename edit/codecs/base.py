"""The Codec protocol: the methods that a format implements, and what follows from them for every format.

All formats are little-endian, as every machine that torch is built for here; `edit.codecs.codec` refuses another byte order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from edit.codecs.blocks import covering_numel, gather
from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Shard
from edit.records import EncodedTensor

__all__ = ["PIECE", "Buffer", "Codec", "new_buffer", "parts", "view"]

Buffer = bytes | bytearray | memoryview

PIECE = 1 << 17  # elements handled at a time: 512 KiB of fp32 stay in the cache from one operation on them to the next


class Codec(Protocol):
    """One format for flat fp32 vectors. It has no state.

    A new format is a class that derives from this one, sets the three attributes and implements `encoded_size`, `to_bytes`,
    `encode_part`, `pieces` and `cut_bytes`; it is made from a `CodecSpec` by a line in `edit.codecs`.
    """

    # The text of its CodecSpec, by which an EncodedTensor names it.
    name: str
    # decode(encode(x)) is x to the bit, so error feedback keeps no residual.
    lossless: bool
    # Elements in a block, which has bytes of its own; 1 where each element stands alone.
    granule: int

    # ---- what a format implements ----

    def encoded_size(self, numel: int) -> int:
        """Return the exact number of bytes that encode `numel` elements."""
        ...

    def to_bytes(self, flat: Tensor, fragment: FragmentSpec) -> memoryview:
        """Encode a contiguous flat fp32 CPU tensor into new memory. Same input, same bytes.

        An element that is not finite decodes to one that is not finite. fragment: see `encode`.
        """
        ...

    def encode_part(self, part: Tensor, data: Buffer, numel: int, start: int) -> None:
        """Write fp32 `part`, the elements from `start` on, into `data`, `encoded_size(numel)` writable bytes of all of them.

        start: a multiple of `granule`; `part` ends at one too, or at the end of the vector. All parts make what `to_bytes`
        makes, and `pieces` decodes a piece when it comes to it, so it may follow piece by piece.
        """
        ...

    def pieces(self, data: Buffer, numel: int) -> Iterator[Tensor]:
        """Decode PIECE elements at a time, in order (the last piece may be shorter).

        Raises RemoteProtocolError for bytes of the right length that `to_bytes` never makes, as far as the format tells them.
        A piece is fp32 and valid until the next one. A piece of a lossless codec may be `data` itself and is only to be read;
        any other is scratch that the caller may overwrite. The length of `data` has been checked.
        """
        ...

    def cut_bytes(self, data: Buffer, shard: Shard) -> memoryview:
        """Select the bytes of a shard from `data`, which encodes its whole fragment; may share `data`'s memory.

        granule 1: exactly the shard, in its own order. Else: all blocks that it touches, ascending (see
        `edit.codecs.blocks`), which is again a vector in this format. The length of `data` has been checked.
        """
        ...

    # ---- what follows ----

    def encode(self, flat: Tensor, fragment: FragmentSpec) -> EncodedTensor:
        """Encode a flat fp32 CPU tensor of at least 0 elements. Same input, same bytes.

        fragment: of which `flat` is the vector, or a rank's shard of it. The size depends on the number of elements alone.
        Raises LocalProtocolError for another shape, dtype or device.
        """
        if flat.ndim != 1 or flat.dtype != torch.float32 or flat.device.type != "cpu":
            raise LocalProtocolError(
                f"a codec takes a flat fp32 CPU tensor, not {list(flat.shape)} {flat.dtype} on {flat.device}"
            )
        return EncodedTensor(self.name, flat.numel(), self.to_bytes(flat.detach().contiguous(), fragment))

    def decode(self, encoded: EncodedTensor) -> Tensor:
        """Decode into a new fp32 tensor, shape [numel]. Raises RemoteProtocolError for another length, and as `pieces`."""
        pieces = self.decode_pieces(encoded)
        out = torch.empty(encoded.numel, dtype=torch.float32)
        for i, piece in enumerate(pieces):
            out[i * PIECE : (i + 1) * PIECE] = piece
        return out

    def decode_add(self, encoded: EncodedTensor, out: Tensor, weight: float) -> None:
        """out += weight * decode(encoded), in place, rounded after the product and after the sum.

        Raises as `decode`; `out` may then have changed.
        """
        pieces = self.decode_pieces(encoded)
        scratch = torch.empty(min(PIECE, out.numel()) if self.lossless else 0, dtype=torch.float32)
        for i, piece in enumerate(pieces):
            weighted = torch.mul(piece, weight, out=scratch[: piece.numel()]) if self.lossless else piece.mul_(weight)
            out[i * PIECE : (i + 1) * PIECE].add_(weighted)

    def decode_pieces(self, encoded: EncodedTensor) -> Iterator[Tensor]:
        """Decode PIECE elements at a time, see `pieces`. Raises RemoteProtocolError for another length, and as `pieces`."""
        size, numel = memoryview(encoded.data).nbytes, encoded.numel
        if numel < 0 or size != self.encoded_size(numel):
            raise RemoteProtocolError(f"{size} bytes cannot be {numel} elements in {self.name}")
        return self.pieces(encoded.data, numel)

    def cut(self, encoded: EncodedTensor, shard: Shard) -> EncodedTensor:
        """Return the shortest run of blocks of an encoded fragment that covers the shard; `encoded` itself for the whole of it.

        Element-wise codecs: exactly the shard, in its order. Same shard, same bytes; they may share memory with `encoded`.
        Raises LocalProtocolError when `encoded` is not the shard's fragment.
        """
        if (shard.fragment.numel, self.encoded_size(encoded.numel)) != (encoded.numel, memoryview(encoded.data).nbytes):
            raise LocalProtocolError(
                f"{encoded.numel} elements are not fragment {shard.fragment.name} ({shard.fragment.numel})"
            )
        if shard.is_whole:
            return encoded
        return EncodedTensor(self.name, self.cut_numel(shard), self.cut_bytes(encoded.data, shard))

    def cut_numel(self, shard: Shard) -> int:
        """Return how many elements `cut` leaves of the shard's fragment."""
        return covering_numel(shard, self.granule)

    def decode_shard(self, encoded: EncodedTensor, shard: Shard) -> Tensor:
        """Decode what `cut` returned for a shard: fp32, shape [shard.numel].

        Raises RemoteProtocolError when it has another number of elements than was cut, or another length.
        """
        if encoded.numel != (expected := self.cut_numel(shard)):
            raise RemoteProtocolError(f"fragment {shard.fragment.name}: {encoded.numel} elements instead of {expected}")
        flat = self.decode(encoded)
        return flat if self.granule == 1 or shard.is_whole else gather(shard, flat, self.granule)


def parts(numel: int) -> Iterator[slice]:
    """Yield where the pieces of `Codec.pieces` stand in a vector of `numel` elements."""
    return (slice(start, min(numel, start + PIECE)) for start in range(0, numel, PIECE))


def new_buffer(size: int) -> memoryview:
    """Return `size` writable bytes of arbitrary contents, from torch's allocator: a bytearray would clear its memory first."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


def view(data: Buffer, dtype: torch.dtype, count: int, offset: int, spare: bytearray) -> Tensor:
    """View `count` elements of `data` from byte `offset` as a tensor that shares its memory.

    Read-only data is first copied into `spare`, which must be large enough.
    """
    source = memoryview(data).cast("B")
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if not source.readonly:
        return torch.frombuffer(source, dtype=dtype, count=count, offset=offset)
    size = count * dtype.itemsize
    memoryview(spare)[:size] = source[offset : offset + size]
    return torch.frombuffer(spare, dtype=dtype, count=count)
