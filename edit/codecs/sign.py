"""sign: 1 bit per element, times the mean magnitude of its block of 256 elements (option `block`).

Source: 1-bit SGD (Seide et al., Interspeech 2014); with the mean magnitude, EF-signSGD (Karimireddy et al., arXiv 1901.09847).
Layout: a plane of fp32 mean magnitudes, one per block; a plane of bits, 1 for what is below 0, eight per byte
(`edit.codecs.blockwise.pack`). 1.125 bits each.
|x - decoded| <= max(mean, absmax - mean), and ||x - decoded||^2 = ||x||^2 - numel mean^2 in each block (and fp32 roundings). 0
becomes plus the mean.
A block with a NaN or Inf, or whose magnitudes have a sum beyond fp32's range, has mean NaN and so decodes to NaN throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edit.codecs.blockwise import Blockwise, divide, magnitudes, pack, row_sums, unpack
from edit.config.codec import CodecSpec

__all__ = ["BlockSign"]


class BlockSign(Blockwise):
    """Block-wise signs times the mean magnitude."""

    def __init__(self, spec: CodecSpec) -> None:
        self.name, self.granule = str(spec), int(spec.values()["block"])

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """Mean magnitudes, signs."""
        return 4, (numel + 7) // 8

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Take signs and means; see the module's docstring."""
        means = planes[0].view(torch.float32).view(-1)
        divide(row_sums(magnitudes(blocks)), blocks.shape[1], out=means)
        means.masked_fill_(~means.isfinite(), torch.nan)
        pack((blocks < 0).to(torch.uint8), 1, planes[1])

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Give the mean its signs; exact."""
        codes = unpack(planes[1], 1, blocks.shape[1])
        blocks.copy_(codes).mul_(-2.0).add_(1.0).mul_(planes[0].view(torch.float32))
