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

from edit.codecs.blockwise import Blockwise, absmax, divide_scales, with_bits
from edit.config.codec import CodecSpec
from edit.kernels import fast
from edit.records import EncodedTensor

__all__ = ["BLOCK", "BlockInt8"]

BLOCK = 256
_LARGEST = 127.0


class BlockInt8(Blockwise):
    """Block-wise symmetric absmax quantisation to 8 bits. Has no options."""

    granule = BLOCK
    has_kernels = True

    def __init__(self, spec: CodecSpec) -> None:
        spec.values()
        self.name = str(spec)

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """Scales, values."""
        return 4, numel

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Quantise; see the module's docstring."""
        scales, values = _scales_and_values(planes)
        if (kernels := fast(blocks, scales, values)) is not None:
            kernels.int8_encode(*with_bits(blocks), *with_bits(scales), values.numpy())
            return
        work = absmax(blocks, scales)
        torch.mul(blocks, scales.reciprocal().mul_(_LARGEST).unsqueeze(1), out=work)
        values.copy_(work.round_())
        if (lost := divide_scales(scales, _LARGEST)) is not None:
            values.masked_fill_(lost, 0)  # what stands there came from 0 * Inf or NaN

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Multiply each value by its scale, rounded once."""
        scales, values = _scales_and_values(planes)
        if (kernels := fast(blocks, scales, values)) is not None:
            kernels.int8_decode(scales.numpy(), values.numpy(), blocks.numpy())
        else:
            blocks.copy_(values).mul_(scales.unsqueeze(1))

    def add_blocks(self, planes: Sequence[Tensor], weight: float, blocks: Tensor) -> None:
        """See `Blockwise.add_blocks`."""
        scales, values = _scales_and_values(planes)
        if (kernels := fast(blocks, scales, values)) is not None:
            kernels.int8_add(scales.numpy(), values.numpy(), weight, blocks.numpy())
        else:
            super().add_blocks(planes, weight, blocks)

    def add_squares(self, encoded: EncodedTensor, lanes: Tensor) -> None:
        """See `Codec.add_squares`."""
        if (kernels := fast(lanes)) is None:
            super().add_squares(encoded, lanes)
            return
        data, numel = self.checked(encoded), encoded.numel
        for start, rows, there in ((0, numel // BLOCK, numel >= BLOCK), (numel - numel % BLOCK, 0, numel % BLOCK > 0)):
            if there:
                scales, values = _scales_and_values(self.planes(data, numel, start // BLOCK, rows))
                kernels.int8_add_squares(scales.numpy(), values.numpy(), start, lanes.numpy())


def _scales_and_values(planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the planes as fp32 [rows] and int8 [rows, numel]."""
    return planes[0].view(torch.float32).view(-1), planes[1].view(torch.int8)
