"""int8: blocks of 256 elements, each a symmetric integer in -127..127 times one fp32 scale per block.

Layout: a plane of little-endian fp32 scales, one per block; a plane of int8 values. 8.125 bits each.
scale = absmax / 127, value = round to even of x / scale, so |x - decoded| <= scale / 2 (and a few fp32 roundings); x / scale is
computed as x ((1 / absmax) 127), each step rounded to fp32.
A block with absmax below 2**-100 becomes zero. A block with a NaN or Inf has scale NaN and so decodes to NaN throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edit.codecs.blockwise import Blockwise, absmax, divide_scales
from edit.config.codec import CodecSpec

__all__ = ["BLOCK", "BlockInt8"]

BLOCK = 256
_LARGEST = 127.0


class BlockInt8(Blockwise):
    """Block-wise symmetric absmax quantisation to 8 bits. Has no options."""

    granule = BLOCK

    def __init__(self, spec: CodecSpec) -> None:
        spec.values()
        self.name = str(spec)

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """Scales, values."""
        return 4, numel

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Quantise; see the module's docstring."""
        scales, values = planes[0].view(torch.float32).view(-1), planes[1].view(torch.int8)
        work = absmax(blocks, scales)
        torch.mul(blocks, scales.reciprocal().mul_(_LARGEST).unsqueeze(1), out=work)
        values.copy_(work.round_())
        if (lost := divide_scales(scales, _LARGEST)) is not None:
            values.masked_fill_(lost, 0)  # what stands there came from 0 * Inf or NaN

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Multiply each value by its scale, rounded once."""
        blocks.copy_(planes[1].view(torch.int8)).mul_(planes[0].view(torch.float32))
