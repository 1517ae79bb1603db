"""int8: blocks of 256 elements, each a symmetric integer in -127..127 times one fp32 scale per block.

Layout: ceil(numel / 256) little-endian fp32 scales, then numel int8 values; the last block may be short. 8.125 bits each.
scale = absmax / 127, value = round to even of x / scale, so |x - decoded| <= scale / 2 (and a few fp32 roundings).
A block with absmax below 2**-100 becomes zero. A block with a NaN or Inf has scale NaN and so decodes to NaN throughout.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from edit.codecs.base import PIECE, Buffer, Codec, new_buffer, view
from edit.codecs.blocks import covering
from edit.config.codec import CodecSpec
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Shard

__all__ = ["BLOCK", "BlockInt8"]

BLOCK = 256
_LARGEST = 127.0
_TINY = 2.0**-100  # below it 127 / absmax would come near the end of fp32's range


class BlockInt8(Codec):
    """Block-wise symmetric absmax quantisation to 8 bits. Has no options."""

    lossless = False
    granule = BLOCK

    def __init__(self, spec: CodecSpec) -> None:
        spec.values()
        self.name = str(spec)

    def encoded_size(self, numel: int) -> int:
        """Return one byte per element and four per block."""
        return numel + 4 * _blocks(numel)

    def to_bytes(self, flat: Tensor, fragment: FragmentSpec) -> memoryview:
        """Quantise; see the module's docstring."""
        numel, whole = flat.numel(), flat.numel() // BLOCK * BLOCK
        data = new_buffer(self.encoded_size(numel))
        scales = view(data, torch.float32, _blocks(numel), 0, bytearray())
        values = view(data, torch.int8, numel, 4 * _blocks(numel), bytearray())
        _quantise(flat[:whole].view(-1, BLOCK), scales[: whole // BLOCK], values[:whole].view(-1, BLOCK))
        if whole < numel:
            last, quantised = torch.zeros(1, BLOCK), torch.empty(1, BLOCK, dtype=torch.int8)
            last[0, : numel - whole] = flat[whole:]
            _quantise(last, scales[-1:], quantised)
            values[whole:] = quantised[0, : numel - whole]
        return data

    def pieces(self, data: Buffer, numel: int) -> Iterator[Tensor]:
        """Multiply each value by its scale, rounded once."""
        readonly = memoryview(data).readonly
        spare = bytearray(min(PIECE, numel) if readonly else 0)
        spare_scales = bytearray(4 * _blocks(min(PIECE, numel)) if readonly else 0)
        scratch = torch.zeros(_blocks(min(PIECE, numel)) * BLOCK, dtype=torch.float32)
        for start in range(0, numel, PIECE):
            count = min(PIECE, numel - start)
            rows = _blocks(count)
            scales = view(data, torch.float32, rows, 4 * (start // BLOCK), spare_scales)
            scratch[:count].copy_(view(data, torch.int8, count, 4 * _blocks(numel) + start, spare))
            scratch[: rows * BLOCK].view(rows, BLOCK).mul_(scales.unsqueeze(1))
            yield scratch[:count]

    def cut_bytes(self, data: Buffer, shard: Shard) -> memoryview:
        """Select the scales and values of the blocks that the shard touches."""
        numel, source = shard.fragment.numel, memoryview(data).cast("B")
        spare = bytearray(source.nbytes if source.readonly else 0)
        scales = view(source, torch.float32, _blocks(numel), 0, spare)
        kept = covering(shard, BLOCK)
        whole, short = kept[kept < numel // BLOCK], numel % BLOCK if bool((kept == numel // BLOCK).any()) else 0
        count = whole.numel() * BLOCK + short
        cut = new_buffer(self.encoded_size(count))
        torch.index_select(scales, 0, kept, out=view(cut, torch.float32, kept.numel(), 0, bytearray()))
        values = view(source, torch.int8, numel, 4 * _blocks(numel), spare)
        rows = values[: numel // BLOCK * BLOCK].view(-1, BLOCK)
        out = view(cut, torch.int8, count, 4 * kept.numel(), bytearray())
        torch.index_select(rows, 0, whole, out=out[: count - short].view(-1, BLOCK))
        out[count - short :] = values[numel - short :]
        return cut


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _quantise(blocks: Tensor, scales: Tensor, values: Tensor) -> None:
    """Fill `scales` [rows] and int8 `values` [rows, BLOCK] from fp32 `blocks` [rows, BLOCK]."""
    rows, step = blocks.shape[0], PIECE // BLOCK
    scratch = torch.empty(min(step, rows), BLOCK)
    bits = scratch.view(torch.int32)
    for start in range(0, rows, step):
        part = blocks[start : start + step]
        work, absmax = scratch[: part.shape[0]], scales[start : start + step]
        torch.abs(part, out=work)
        # Floats >= 0 sort as their bits do, NaN last; torch finds the largest integer twice as fast as the largest float.
        torch.amax(bits[: part.shape[0]], 1, out=absmax.view(torch.int32))
        torch.mul(part, (_LARGEST / absmax).unsqueeze(1), out=work)
        values[start : start + step].copy_(work.round_())
    tiny, broken = scales < _TINY, ~scales.isfinite()
    scales.div_(_LARGEST)
    if bool((tiny | broken).any()):
        values[tiny | broken] = 0  # what stands there came from 0 * Inf or NaN
        scales.masked_fill_(tiny, 0.0).masked_fill_(broken, torch.nan)
