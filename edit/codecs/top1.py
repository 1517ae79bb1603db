"""top1: of each group of `of` elements (32 by default) the one of largest magnitude; the others become 0.

As `topk` (SparseLoCo, arXiv 2508.15706), but a position in a small group takes few bits: with of=32 twice as many elements are
sent in the bytes of 64 of 4096. It needs error feedback.
Layout: a plane of two fp32 levels per chunk of 4096 elements, the mean magnitudes of those sent that are at most, and above,
their mean; the positions in the groups, one for each, log2(of) bits: their lowest 4 bits, then the next 2, then the next 1, as
far as there are, each a plane packed by `edit.codecs.blockwise.pack`, where log2(of) = 4 a + 2 b + c; a plane of codes (bit 0:
below 0, bit 1: the higher level), four per byte. Bits that are left over are 0. The last group may be short.
120 bytes a chunk for of=32 (0.234 bits each), 72 for 64 (0.141), 200 for 16 (0.391).
Of equal magnitudes the first one is sent. ||x - decoded||^2 <= ||x||^2 - n m^2 for the mean m of the n magnitudes that are
sent; an element that is not sent is at most the one of its group that is, and |x - decoded| of one that is sent is at most the
largest of these less the smallest (and fp32 roundings).
A chunk with a NaN or Inf, or with a sum of the magnitudes sent beyond fp32's range, has NaN levels and so decodes to NaN
throughout. A position outside a short group, and bits left over that are not 0, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edit.codecs.base import on_cpu
from edit.codecs.blockwise import Blockwise, divide, magnitudes, pack, row_sums, unpack
from edit.codecs.two_levels import join, split
from edit.config.codec import CodecSpec
from edit.errors import RemoteProtocolError

__all__ = ["CHUNK", "GroupTop1"]

CHUNK = 4096  # elements with two levels of their own


class GroupTop1(Blockwise):
    """The largest element of each group, with its position in the group and a 2-bit value."""

    granule = CHUNK

    def __init__(self, spec: CodecSpec) -> None:
        self.name, self._of = str(spec), int(spec.values()["of"])
        bits = self._of.bit_length() - 1
        self._sizes_of_position = [size for size in (4, 2, 1) if bits & size]

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """Levels, the parts of the positions, codes."""
        groups = self._groups(numel)
        return 8, *(-(-groups * size // 8) for size in self._sizes_of_position), -(-groups // 4)

    def _groups(self, numel: int) -> int:
        return -(-numel // self._of)

    def _starts(self, blocks: Tensor) -> Tensor:
        return torch.arange(0, blocks.shape[1], self._of, dtype=torch.int64, device=blocks.device)

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Select and quantise; see the module's docstring."""
        (rows, numel), levels = blocks.shape, planes[0].view(torch.float32)
        groups = self._groups(numel)
        bits = magnitudes(blocks).view(torch.int32)  # floats >= 0 sort as their bits do, NaN last
        if numel % self._of:
            bits = torch.nn.functional.pad(bits, (0, groups * self._of - numel), value=-1)
        within = _first_largest(bits.view(rows, groups, self._of))
        positions = within + self._starts(blocks)
        values, chosen = blocks.gather(1, positions), bits.gather(1, positions).view(torch.float32)
        mean = divide(row_sums(chosen), groups).unsqueeze(1)
        pack(split(values, chosen, mean, levels), 2, planes[-1])
        shift = 0
        for size, plane in zip(self._sizes_of_position, planes[1:-1], strict=True):
            pack((within >> shift & (1 << size) - 1).to(torch.uint8), size, plane)
            shift += size

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Put the values at their positions; exact."""
        numel = blocks.shape[1]
        groups, levels = self._groups(numel), planes[0].view(torch.float32)
        positions, shift = self._starts(blocks).expand(len(blocks), -1).clone(), 0
        for size, plane in zip(self._sizes_of_position, planes[1:-1], strict=True):
            positions += unpack(plane, size, groups).to(torch.int64) << shift
            shift += size
        if numel % self._of and bool((positions[:, -1] >= numel).any()):
            raise RemoteProtocolError(f"a position in a chunk of {numel} elements is outside")
        blocks.copy_((levels * 0.0).sum(1, keepdim=True).abs_().expand_as(blocks))  # 0, or NaN
        blocks.scatter_(1, positions, join(unpack(planes[-1], 2, groups), levels))


def _first_largest(groups: Tensor) -> Tensor:
    """Return the position of the largest int32 in each group [rows, groups, of], of equal ones the first: [rows, groups]."""
    return torch.from_numpy(groups.numpy().argmax(2)) if on_cpu(groups) else groups.argmax(2)
