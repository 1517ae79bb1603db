"""int4: blocks of 256 elements (option `block`), each a symmetric integer in -7..7 times one fp32 scale per block.

Layout: a plane of fp32 scales, one per block; a plane of the integers plus 8, two per byte (`edit.codecs.blockwise.pack`).
4.125 bits each. The scale is fp32, as int8's: with bf16 it would be 4.0625 bits, and a scale that is rounded down would cut off
the largest element.
scale = absmax / 7, value = round to even of x / scale, so |x - decoded| <= scale / 2 (and a few fp32 roundings); x / scale is
computed as x ((1 / absmax) 7), each step rounded to fp32.
A block with absmax below 2**-100 becomes zero. A block with a NaN or Inf has scale NaN and so decodes to NaN throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edit.codecs.blockwise import Blockwise, absmax, divide_scales, pack, unpack, with_bits
from edit.config.codec import CodecSpec
from edit.kernels import fast

__all__ = ["BlockInt4"]

_LARGEST = 7.0
_ZERO = 8  # the code of 0


class BlockInt4(Blockwise):
    """Block-wise symmetric absmax quantisation to 4 bits."""

    has_kernels = True

    def __init__(self, spec: CodecSpec) -> None:
        self.name, self.granule = str(spec), int(spec.values()["block"])

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """Scales, integers."""
        return 4, (numel + 1) // 2

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Quantise; see the module's docstring."""
        scales, packed = _scales_and_packed(planes)
        if blocks.shape[1] % 2 == 0 and (kernels := fast(blocks, scales, packed)) is not None:
            kernels.int4_encode(*with_bits(blocks), *with_bits(scales), packed.numpy())
            return
        work = absmax(blocks, scales)
        torch.mul(blocks, scales.reciprocal().mul_(_LARGEST).unsqueeze(1), out=work)
        codes = work.round_().add_(_ZERO).to(torch.uint8)
        if (lost := divide_scales(scales, _LARGEST)) is not None:
            codes.masked_fill_(lost, _ZERO)  # what stands there came from 0 * Inf or NaN
        pack(codes, 4, packed)

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Multiply each integer by its scale, rounded once."""
        scales, packed = _scales_and_packed(planes)
        if blocks.shape[1] % 2 == 0 and (kernels := fast(blocks, scales, packed)) is not None:
            kernels.int4_decode(scales.numpy(), packed.numpy(), blocks.numpy())
        else:
            blocks.copy_(unpack(packed, 4, blocks.shape[1])).sub_(_ZERO).mul_(scales.unsqueeze(1))

    def add_blocks(self, planes: Sequence[Tensor], weight: float, blocks: Tensor) -> None:
        """See `Blockwise.add_blocks`."""
        scales, packed = _scales_and_packed(planes)
        if blocks.shape[1] % 2 == 0 and (kernels := fast(blocks, scales, packed)) is not None:
            kernels.int4_add(scales.numpy(), packed.numpy(), weight, blocks.numpy())
        else:
            super().add_blocks(planes, weight, blocks)


def _scales_and_packed(planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the planes as fp32 [rows] and uint8 [rows, bytes]."""
    return planes[0].view(torch.float32).view(-1), planes[1]
