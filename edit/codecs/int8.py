"""int8: blocks of 256 elements, each a symmetric integer in -127..127 times one fp32 scale per block.

Layout: ceil(numel / 256) little-endian fp32 scales, then numel int8 values; the last block may be short. 8.125 bits each.
scale = absmax / 127, value = round to even of x / scale, so |x - decoded| <= scale / 2 (and a few fp32 roundings).
A block with absmax below 2**-100 becomes zero. A block with a NaN or Inf has scale NaN and so decodes to NaN throughout.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from edit.codecs.base import PIECE, Buffer, Codec, flat_fp32, view

__all__ = ["BLOCK", "BlockInt8"]

BLOCK = 256
_LARGEST = 127.0
_TINY = 2.0**-100  # below it 127 / absmax would come near the end of fp32's range


class BlockInt8(Codec):
    """Block-wise symmetric absmax quantisation to 8 bits."""

    name = "int8"
    lossless = False

    def encoded_size(self, numel: int) -> int:
        """One byte per element and four per block."""
        return numel + 4 * _blocks(numel)

    def encode(self, flat: Tensor) -> bytearray:
        """Quantise; see the module's docstring."""
        flat = flat_fp32(flat)
        numel = flat.numel()
        data = bytearray(self.encoded_size(numel))
        scales = view(data, torch.float32, _blocks(numel), 0, bytearray())
        values = view(data, torch.int8, numel, 4 * _blocks(numel), bytearray())
        scratch = torch.empty(min(PIECE, _blocks(numel) * BLOCK), dtype=torch.float32)
        for start in range(0, numel, PIECE):
            part = flat[start : start + PIECE]
            rows, filled = _blocks(part.numel()), part.numel()
            work = scratch[: rows * BLOCK]
            torch.abs(part, out=work[:filled])
            work[filled:] = 0
            absmax = work.view(rows, BLOCK).amax(dim=1)
            scale, inverse = _scales(absmax)
            scales[start // BLOCK : start // BLOCK + rows] = scale
            work[:filled].copy_(part)
            work.view(rows, BLOCK).mul_(inverse.unsqueeze(1))
            if not bool(scale.isfinite().all()):
                work.nan_to_num_(0.0, 0.0, 0.0)  # a NaN has no integer; the block's scale says what it was
            values[start : start + filled] = work[:filled].round_()
        return data

    def pieces(self, data: Buffer, numel: int) -> Iterator[Tensor]:
        """value * scale, rounded once."""
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


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _scales(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) per block; (0, 0) for tiny blocks, (NaN, 0) for those that are not finite."""
    tiny, finite = absmax < _TINY, absmax.isfinite()
    scale = (absmax / _LARGEST).masked_fill_(tiny, 0.0).masked_fill_(~finite, torch.nan)
    inverse = (_LARGEST / absmax).masked_fill_(tiny | ~finite, 0.0)
    return scale, inverse
