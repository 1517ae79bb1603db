"""stat2: 2 bits per element by the statistics of its row of 1024 elements (option `block`).

Source: the row-wise statistical quantisation of MuLoCo (arXiv 2505.23725), whose bins of equal width span `range` standard
deviations sigma of the row and decode to the mean of what fell into them. Here the four bins are symmetric: the mean of a row
of a pseudo-gradient is near 0, so sigma is taken about 0. The edges are 0 and +-range / 4 sigma, and a bin and its mirror image
share their mean magnitude. The paper's range is 6; 4 is the default: of the square of a normal vector it leaves 0.118 (6:
0.163), of a Laplacian one 0.179 (6: 0.193).
Layout: a plane of two fp32 levels per row, the mean magnitudes up to and above the inner edge; a plane of codes (bit 0: below
0, bit 1: the higher level), four per byte (`edit.codecs.blockwise.pack`). 2.0625 bits each.
With t = range / 4 sigma and m the mean magnitude of a row: |x - decoded| <= max(t, absmax - t), and ||x - decoded||^2 <=
||x||^2 - numel m^2 (and fp32 roundings). 0 becomes plus the lower level.
A row with a NaN or Inf, or with a sum of magnitudes beyond fp32's range, has NaN levels and so decodes to NaN throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edit.codecs.blockwise import Blockwise, divide, magnitudes, pack, row_sums, unpack
from edit.codecs.two_levels import join, split
from edit.config.codec import CodecSpec

__all__ = ["RowStat2"]


class RowStat2(Blockwise):
    """Row-wise statistical quantisation to 2 bits."""

    def __init__(self, spec: CodecSpec) -> None:
        values = spec.values()
        self.name, self.granule = str(spec), int(values["block"])
        self._edge = values["range"] / 4

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """Levels, codes."""
        return 8, (numel + 3) // 4

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Put each element into its bin; see the module's docstring."""
        sigma = divide(row_sums(blocks * blocks), blocks.shape[1]).sqrt_()
        codes = split(blocks, magnitudes(blocks), sigma.mul_(self._edge).unsqueeze(1), planes[0].view(torch.float32))
        pack(codes, 2, planes[1])

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Give each level its sign; exact."""
        blocks.copy_(join(unpack(planes[1], 2, blocks.shape[1]), planes[0].view(torch.float32)))
