"""What all formats of blocks share: where the bytes lie, pieces, cuts; packed bits; sums that are the same on every machine.

A block has `granule` elements, the last one of a vector perhaps fewer. Its bytes lie in one or more planes (a plane of scales,
a plane of values): plane after plane, and in each the bytes of all blocks in order. A size follows from the number of elements.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from edit.codecs.base import Adder, Buffer, Codec, add_weighted, new_buffer, on_cpu, parts, readonly, view
from edit.codecs.blocks import covering
from edit.errors import RemoteProtocolError
from edit.fragments.shards import Shard
from edit.kernels import fast
from edit.records import EncodedTensor

__all__ = ["Blockwise", "absmax", "divide", "divide_scales", "magnitudes", "pack", "row_sums", "unpack", "with_bits"]

_TINY = 2.0**-100  # a block below it becomes zero: its reciprocal would come near the end of fp32's range


class Blockwise(Codec):
    """A format of blocks. `granule` divides PIECE, on the CPU and elsewhere.

    A new one sets `name` and `granule` and implements `plane_bytes`, `encode_blocks` and `decode_blocks`.
    """

    lossless = False

    @abstractmethod
    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """Return the bytes in each plane of one block of `numel` elements, at most `granule`."""

    @abstractmethod
    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Write the bytes of fp32 `blocks` [rows, numel] into `planes`, each uint8 [rows, bytes]. Does not change `blocks`.

        What is written depends on nothing but the values: not on the machine or device, and not on how many rows come at a
        time. Off the CPU, no value is read back.
        """

    @abstractmethod
    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Decode `planes`, each uint8 [rows, bytes], into fp32 `blocks` [rows, numel]. Raises RemoteProtocolError."""

    # Where `edit.kernels` has them, kernels do the above and the below in one pass each.
    has_kernels = False

    def add_blocks(self, planes: Sequence[Tensor], weight: float, blocks: Tensor) -> None:
        """blocks += weight * what `decode_blocks` makes of `planes`, rounded after the product and after the sum."""
        decoded = torch.empty_like(blocks)
        self.decode_blocks(planes, decoded)
        add_weighted(decoded, weight, blocks, decoded)

    def encoded_size(self, numel: int) -> int:
        """Add up the planes of all blocks."""
        return sum(whole + short for whole, short in self._sizes(numel))

    def pieces(self, data: Buffer | Tensor, numel: int) -> Iterator[Tensor]:
        """Decode the blocks of each piece."""
        device = data.device if isinstance(data, Tensor) else None
        scratch = torch.empty(
            next((part.stop for part in parts(numel, device)), 0), dtype=torch.float32, device=device or "cpu"
        )
        for part in parts(numel, device):
            piece = scratch[: part.stop - part.start]
            self.decode_part(data, numel, part.start, piece)
            yield piece

    def encode_part(self, part: Tensor, data: Buffer | Tensor, numel: int, start: int) -> None:
        """Encode the blocks of the part."""
        for blocks, planes in self._blocks(part, data, numel, start):
            self.encode_blocks(blocks, planes)

    def decode_part(self, data: Buffer | Tensor, numel: int, start: int, out: Tensor) -> None:
        """Decode the elements from `start` on into fp32 `out`; see `encode_part`. Raises RemoteProtocolError as `pieces`."""
        for blocks, planes in self._blocks(out, data, numel, start):
            self.decode_blocks(planes, blocks)

    def add_part(self, data: Buffer | Tensor, numel: int, start: int, weight: float, out: Tensor) -> None:
        """out += weight * the elements from `start` on, rounded after the product and after the sum. See `decode_part`."""
        for blocks, planes in self._blocks(out, data, numel, start):
            self.add_blocks(planes, weight, blocks)

    def passes(self, flat: Tensor) -> Iterator[slice]:
        """All at once where kernels do it."""
        if self.has_kernels and flat.numel() and fast(flat) is not None:
            return iter([slice(0, flat.numel())])
        return parts(flat.numel(), flat.device)

    def decode(self, encoded: EncodedTensor, device: torch.device | None = None) -> Tensor:
        """See `Codec.decode`."""
        data, out = self.checked(encoded, device), torch.empty(encoded.numel, dtype=torch.float32, device=device or "cpu")
        for part in self.passes(out):
            self.decode_part(data, encoded.numel, part.start, out[part])
        return out

    def decode_add(self, encoded: EncodedTensor, out: Tensor, weight: float) -> None:
        """See `Codec.decode_add`."""
        data = self.checked(encoded, out.device)
        for part in self.passes(out):
            self.add_part(data, encoded.numel, part.start, weight, out[part])

    def adder(self, encoded: EncodedTensor, weight: float, device: torch.device | None = None) -> Adder:
        """See `Codec.adder`."""
        data = self.checked(encoded, device)
        return lambda part, out: self.add_part(data, encoded.numel, part.start, weight, out)

    def cut_bytes(self, data: Buffer, shard: Shard) -> memoryview:
        """Select the planes of the blocks that the shard touches."""
        numel, source = shard.fragment.numel, memoryview(data).cast("B")
        kept = covering(shard, self.granule)
        last, short = numel // self.granule, numel % self.granule
        whole = kept[kept < last]
        with_short = whole.numel() < kept.numel()
        cut = new_buffer(self.encoded_size(whole.numel() * self.granule + (short if with_short else 0)))
        start = position = 0
        for per_block, (all_whole, all_short) in zip(self.plane_bytes(self.granule), self._sizes(numel), strict=True):
            rows = view(source, torch.uint8, all_whole, start, bytearray(all_whole if source.readonly else 0))
            chosen = view(cut, torch.uint8, whole.numel() * per_block, position, bytearray())
            torch.index_select(rows.view(-1, per_block), 0, whole, out=chosen.view(-1, per_block))
            position += chosen.numel()
            if with_short:
                cut[position : position + all_short] = source[start + all_whole : start + all_whole + all_short]
                position += all_short
            start += all_whole + all_short
        return cut

    def _sizes(self, numel: int) -> Iterator[tuple[int, int]]:
        """Yield (bytes of the whole blocks, bytes of the short one) of each plane."""
        whole, short = divmod(numel, self.granule)
        of_short = self.plane_bytes(short) if short else (0,) * len(self.plane_bytes(self.granule))
        for per_block, rest in zip(self.plane_bytes(self.granule), of_short, strict=True):
            yield whole * per_block, rest

    def _blocks(self, part: Tensor, data: Buffer | Tensor, numel: int, start: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield (blocks, planes) of the elements of `part`, which begins at element `start`: the whole ones, the short one."""
        rows, short = divmod(part.numel(), self.granule)
        if rows:
            yield part[: rows * self.granule].view(rows, -1), self.planes(data, numel, start // self.granule, rows)
        if short:
            yield part[rows * self.granule :].view(1, -1), self.planes(data, numel, numel // self.granule, 0)

    def planes(self, data: Buffer | Tensor, numel: int, first: int, rows: int) -> list[Tensor]:
        """View the bytes of `rows` whole blocks from block `first` on, or (rows = 0) of the short one."""
        planes, begin, copied = [], 0, readonly(data)
        for per_block, (whole, short) in zip(self.plane_bytes(self.granule), self._sizes(numel), strict=True):
            size = rows * per_block if rows else short
            spare = bytearray(size if copied else 0)
            planes.append(view(data, torch.uint8, size, begin + first * per_block, spare).view(max(rows, 1), -1))
            begin += whole + short
        return planes


def absmax(blocks: Tensor, out: Tensor) -> Tensor:
    """Write the largest magnitude of each row of fp32 `blocks` [rows, numel] into `out` [rows]; NaN counts as the largest.

    Returns |blocks|, scratch.
    """
    work = magnitudes(blocks)
    # Floats >= 0 sort as their bits do, NaN last; torch finds the largest integer twice as fast as the largest float.
    torch.amax(work.view(torch.int32), 1, out=out.view(torch.int32))
    return work


def with_bits(floats: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return fp32 `floats` on the CPU as arrays for a kernel: as they are, and as int32. They share its memory."""
    array = floats.numpy()
    return array, array.view(np.int32)


def magnitudes(blocks: Tensor) -> Tensor:
    """Return |blocks|, new; of a NaN the same NaN without its sign, of which CUDA's abs says nothing."""
    return blocks.abs() if on_cpu(blocks) else (blocks.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)


def divide(dividends: Tensor, divisor: float, out: Tensor | None = None) -> Tensor:
    """Return dividends / divisor, each rounded once. On CUDA torch would multiply by the reciprocal of a Python number."""
    return torch.div(dividends, divisor if on_cpu(dividends) else dividends.new_full((), divisor), out=out)


def divide_scales(scales: Tensor, divisor: float = 1.0) -> Tensor | None:
    """Divide the scales; make those of tiny blocks 0, those not finite NaN, and return which blocks these are [rows, 1].

    None for no such block; where that cannot be told without waiting for a device, never None.
    """
    tiny, broken = scales < _TINY, ~scales.isfinite()
    lost = tiny | broken
    if divisor != 1:
        divide(scales, divisor, out=scales)
    if on_cpu(scales) and not bool(lost.any()):
        return None
    scales.masked_fill_(tiny, 0.0).masked_fill_(broken, torch.nan)
    return lost.unsqueeze(1)


def row_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row of fp32 `rows` [rows, numel], shape [rows].

    Sums halves until one column is left, in single additions of elements: so the bits depend neither on the threads nor on how
    wide the machine's vectors are, as those of torch.sum do.
    """
    while (numel := rows.shape[1]) > 1:
        half = (numel + 1) // 2
        if numel % 2:
            rows = torch.cat([rows[:, : half - 1] + rows[:, half:], rows[:, half - 1 : half]], 1)
        else:
            rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack uint8 `codes` [rows, numel] of `bits` bits (1, 2, 4) into uint8 `out` [rows, ceil(numel * bits / 8)].

    Byte j of a row with w bytes holds the codes j, j + w, j + 2 w, ..., from its lowest bits up: whole vectors are shifted, and
    nothing is interleaved. Bits without a code are 0.
    """
    width = out.shape[1]
    out.copy_(codes[:, :width])
    for i in range(1, 8 // bits):
        part = codes[:, i * width : (i + 1) * width]
        out[:, : part.shape[1]] |= part << (bits * i)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the codes that `pack` packed, uint8 [rows, numel]. Raises RemoteProtocolError when a bit without a code is set."""
    rows, width = packed.shape
    codes = packed.new_empty(rows, numel)
    for i in range(8 // bits):
        part = codes[:, i * width : (i + 1) * width]
        torch.bitwise_right_shift(packed[:, : part.shape[1]], bits * i, out=part)
        if part.shape[1] < width and bool(((packed[:, part.shape[1] :] >> (bits * i)) & ((1 << bits) - 1)).any()):
            raise RemoteProtocolError("padding bits are not zero")
    return codes.bitwise_and_((1 << bits) - 1)
