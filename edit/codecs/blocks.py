"""Which blocks of an encoded vector a region touches, and the region out of those blocks.

Owns: the map between a region of a fragment and the codec blocks that cover it, in tensor operations (a tensor-parallel
shard is tens of thousands of runs). Must not know: one format, bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edit.boxes import Band, Region

__all__ = ["covering", "covering_numel", "gather"]


def covering(region: Region, granule: int) -> Tensor:
    """The blocks of `granule` elements that the region touches: ascending positions, int64 [blocks]."""
    first, end = _ranges(region, granule)
    lengths = end - first
    skipped = first - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + skipped.repeat_interleave(lengths)


def covering_numel(region: Region, granule: int) -> int:
    """Elements in those blocks; the fragment's last block may be short."""
    if granule == 1:
        return region.numel
    first, end = _ranges(region, granule)
    return int(((end * granule).clamp_(max=region.fragment.numel) - first * granule).sum())


def gather(region: Region, flat: Tensor, granule: int) -> Tensor:
    """The region's own vector out of `flat`, the elements of the blocks that `covering` names, one after the other."""
    first, end = _ranges(region, granule)
    lengths = (end - first) * granule
    skipped = first * granule - (lengths.cumsum(0) - lengths)  # elements left out before each range
    if region.span is not None:
        start = region.span[0] - int(skipped[0])
        return flat[start : start + region.numel]
    part, position = flat.new_empty(region.numel), 0
    for band in region.bands:
        starts = _starts(band)
        starts = starts - skipped[torch.searchsorted(first, starts // granule, right=True) - 1]
        size = band.number * band.length
        torch.index_select(
            flat.unfold(0, band.length, 1), 0, starts, out=part[position : position + size].view(-1, band.length)
        )
        position += size
    return part


def _starts(band: Band) -> Tensor:
    """Where each run of the band begins in the fragment's flat vector: int64 [number]."""
    starts = torch.tensor([band.start])
    for count, stride in zip(band.counts, band.strides, strict=True):
        starts = (starts.unsqueeze(1) + torch.arange(count) * stride).flatten()
    return starts


def _ranges(region: Region, granule: int) -> tuple[Tensor, Tensor]:
    """(first, end) of the runs of blocks that cover the region: ascending, with a gap between any two; int64 [ranges] each."""
    if not region.bands:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    starts = [_starts(band) for band in region.bands]
    first, order = torch.cat([some // granule for some in starts]).sort()
    ends = [(some + band.length - 1) // granule + 1 for some, band in zip(starts, region.bands, strict=True)]
    end = torch.cat(ends)[order].cummax(0).values
    apart = first[1:] > end[:-1]
    edge = torch.ones(1, dtype=torch.bool)
    return first[torch.cat([edge, apart])], end[torch.cat([apart, edge])]
