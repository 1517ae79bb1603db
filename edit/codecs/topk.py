"""topk: of each chunk of 4096 elements the k of largest magnitude (option `k`, 64 by default); the others become 0.

Source: SparseLoCo (arXiv 2508.15706): chunked top-k, 12-bit indices, 2-bit values. It needs error feedback.
Layout: a plane of two fp32 levels per chunk, the mean magnitudes of those sent that are at most, and above, their mean; a
plane of the positions in the chunk, ascending, 12 bits each (three bytes for two: a, b are a & 255, a >> 8 | (b & 15) << 4,
b >> 4); a plane of codes (bit 0: below 0, bit 1: the higher level), four per byte (`edit.codecs.blockwise.pack`). Bits that are
left over are 0. A short chunk sends min(k, numel). 120 bytes a chunk for k = 64 (0.234 bits each), 232 for k = 128 (0.453).
Of equal magnitudes the first ones are sent. ||x - decoded||^2 <= ||x||^2 - k m^2 for the mean m of the k magnitudes; an element
that is not sent is at most the smallest one that is, and |x - decoded| of one that is sent is at most the largest less the
smallest of them (and fp32 roundings).
A chunk with a NaN or Inf, or with a sum of magnitudes beyond fp32's range, has NaN levels and so decodes to NaN throughout.
Positions that do not ascend or are outside the chunk, and bits left over that are not 0, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from edit.codecs.base import on_cpu
from edit.codecs.blockwise import Blockwise, divide, magnitudes, pack, row_sums, unpack
from edit.codecs.two_levels import join, split
from edit.config.codec import CodecSpec
from edit.errors import RemoteProtocolError

__all__ = ["CHUNK", "ChunkedTopK"]

CHUNK = 4096  # as many as 12 bits tell apart


class ChunkedTopK(Blockwise):
    """The largest elements of each chunk, with 12-bit positions and 2-bit values."""

    granule = CHUNK

    def __init__(self, spec: CodecSpec) -> None:
        self.name, self._k = str(spec), int(spec.values()["k"])

    def plane_bytes(self, numel: int) -> tuple[int, ...]:
        """Levels, positions, codes."""
        k = min(self._k, numel)
        return 8, (3 * k + 1) // 2, (k + 3) // 4

    def encode_blocks(self, blocks: Tensor, planes: Sequence[Tensor]) -> None:
        """Select and quantise; see the module's docstring."""
        k = min(self._k, blocks.shape[1])
        bits = magnitudes(blocks).view(torch.int32)  # floats >= 0 sort as their bits do, NaN last
        positions = _largest(bits, k) if on_cpu(bits) else _largest_unread(bits, k)
        values, chosen = blocks.gather(1, positions), bits.gather(1, positions).view(torch.float32)
        mean = divide(row_sums(chosen), k).unsqueeze(1)
        pack(split(values, chosen, mean, planes[0].view(torch.float32)), 2, planes[2])
        _pack_positions(positions, planes[1])

    def decode_blocks(self, planes: Sequence[Tensor], blocks: Tensor) -> None:
        """Put the values at their positions; exact."""
        numel = blocks.shape[1]
        k = min(self._k, numel)
        levels, positions = planes[0].view(torch.float32), _unpack_positions(planes[1], k)
        if bool((positions[:, 1:] <= positions[:, :-1]).any()) or bool((positions[:, -1] >= numel).any()):
            raise RemoteProtocolError(f"positions in a chunk of {numel} elements do not ascend, or are outside")
        blocks.copy_((levels * 0.0).sum(1, keepdim=True).abs_().expand_as(blocks))  # 0, or NaN
        blocks.scatter_(1, positions, join(unpack(planes[2], 2, k), levels))


def _largest(rows: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest of each row of int32 on the CPU, ascending, [rows, k]; of equal ones the first."""
    numel, values = rows.shape[1], rows.numpy()
    smallest = np.partition(values, numel - k, axis=1)[:, numel - k, None]
    where = np.flatnonzero(values >= smallest)
    if where.size > k * len(values):  # more than k: not all that equal the smallest one are sent
        above, equal = values > smallest, values == smallest
        needed = k - above.sum(axis=1, keepdims=True)
        where = np.flatnonzero(above | (equal & (equal.cumsum(axis=1) <= needed)))
    return torch.from_numpy(where).view(-1, k) % numel


def _largest_unread(rows: Tensor, k: int) -> Tensor:
    """Return the same on any device, without reading a value back."""
    smallest = rows.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = rows > smallest, rows == smallest
    needed = k - above.sum(1, keepdim=True)
    sent = above | (equal & (equal.cumsum(1) <= needed))
    slots = sent.cumsum(1).sub_(1).masked_fill_(~sent, k)  # the others all go into one that is cut off
    order = torch.arange(rows.shape[1], dtype=torch.int64, device=rows.device).expand_as(slots)
    return slots.new_empty(len(rows), k + 1).scatter_(1, slots, order)[:, :k]


def _pack_positions(positions: Tensor, out: Tensor) -> None:
    """Pack positions [rows, k] of 12 bits into uint8 `out` [rows, ceil(3 k / 2)]."""
    first, second = positions[:, ::2], positions[:, 1::2]
    pairs = second.shape[1]
    out[:, ::3] = first & 255
    out[:, 1::3] = first >> 8
    out[:, 1::3][:, :pairs] |= ((second & 15) << 4).to(torch.uint8)
    out[:, 2::3] = second >> 4


def _unpack_positions(packed: Tensor, k: int) -> Tensor:
    """Return what `_pack_positions` packed, int64 [rows, k]. Raises RemoteProtocolError when a bit left over is set."""
    wide = packed.to(torch.int64)
    positions = wide.new_empty(len(packed), k)
    middle = wide[:, 1::3]
    positions[:, ::2] = wide[:, ::3] | (middle & 15) << 8
    positions[:, 1::2] = middle[:, : k // 2] >> 4 | wide[:, 2::3] << 4
    if k % 2 and bool((middle[:, -1] >> 4).any()):
        raise RemoteProtocolError("padding bits are not zero")
    return positions
