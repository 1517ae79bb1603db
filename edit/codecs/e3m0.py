"""e3m0: a 4-bit float (1 sign, 3 exponent, 0 mantissa bits) times one fp32 scale per block of 256 elements (option `block`).

Source: Streaming DiLoCo (arXiv 2501.18512), which sends outer gradients so. The scale per block is ours.
Layout: a plane of fp32 scales, one per block; a plane of codes, two per byte (`edit.codecs.blockwise.pack`). 4.125 bits each.
A code is 8 for the sign, plus 0 for zero or c = 1..7 for 2**(c - 7). scale = absmax of the block, and x / scale is rounded to
the nearest of these: |x - decoded| <= max(|x| / 3, absmax / 128) (and a few fp32 roundings).
A block with absmax below 2**-100 becomes zero. A block with a NaN or Inf has scale NaN and so decodes to NaN throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edit.codecs.blockwise import Blockwise, absmax, divide_scales, pack, unpack
from edit.config.codec import CodecSpec

__all__ = ["BlockE3M0"]

_MANTISSA = 23  # bits of fp32's
_HALF = 1 << (_MANTISSA - 1)  # added to the bits of a float, it rounds to the nearest power of two
_BIAS = 120  # of the exponent field of fp32: that of 2**(c - 7) is c + 120
_HALF_OF_SMALLEST = 120 << _MANTISSA  # the bits of 2**-7


class BlockE3M0(Blockwise):
    """Block-wise floats of 1 sign, 3 exponent and no mantissa bits."""

    def __init__(self, spec: CodecSpec) -> None:
        self.name, self.granule = str(spec), int(spec.values()["block"])

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """Scales, codes."""
        return 4, (numel + 1) // 2

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Round to the nearest code; see the module's docstring."""
        scales = planes[0].view(torch.float32).view(-1)
        work = absmax(blocks, scales)
        lost = divide_scales(scales)
        bits = work.div_(scales.unsqueeze(1)).view(torch.int32)
        nonzero = bits >= _HALF_OF_SMALLEST
        codes = bits.add_(_HALF).bitwise_right_shift_(_MANTISSA).sub_(_BIAS).clamp_(min=1).to(torch.uint8)
        codes.mul_(nonzero).add_(torch.signbit(blocks).to(torch.uint8), alpha=8)
        if lost is not None:
            codes.masked_fill_(lost, 0)  # what stands there came from 0 / 0 or NaN
        pack(codes, 4, planes[1])

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Multiply each power of two by its scale, rounded once."""
        codes, bits = unpack(planes[1], 4, blocks.shape[1]), blocks.view(torch.int32)
        bits.copy_(codes & 7).bitwise_left_shift_(_MANTISSA)  # c as the exponent field: 2**(c - 127), and 0 for 0
        bits.bitwise_or_((codes & 8).to(torch.int32).bitwise_left_shift_(28))
        blocks.mul_(2.0**_BIAS).mul_(planes[0].view(torch.float32))
