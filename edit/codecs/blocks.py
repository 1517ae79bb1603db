"""Map a shard of a fragment to the codec blocks that cover it, and back.

Written in tensor operations: a tensor-parallel shard has tens of thousands of contiguous runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edit.fragments.shards import Shard, StridedRun

__all__ = ["covering", "covering_numel", "gather"]


def covering(shard: Shard, granule: int) -> Tensor:
    """Return the positions of the blocks of `granule` elements that the shard touches: ascending, int64 [blocks]."""
    first, end = _ranges(shard, granule)
    lengths = end - first
    skipped = first - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum()), dtype=torch.int64, device="cpu") + skipped.repeat_interleave(lengths)


def covering_numel(shard: Shard, granule: int) -> int:
    """Count the elements in those blocks, once; the fragment's last block may be short."""
    if granule == 1 or shard.is_whole:
        return shard.numel
    if granule not in shard.covered:
        first, end = _ranges(shard, granule)
        shard.covered[granule] = int(((end * granule).clamp_(max=shard.fragment.numel) - first * granule).sum())
    return shard.covered[granule]


def gather(shard: Shard, flat: Tensor, granule: int) -> Tensor:
    """Collect the shard's own vector from `flat`, the elements of the blocks that `covering` names, one after the other."""
    first, end = _ranges(shard, granule)
    lengths = (end - first) * granule
    skipped = first * granule - (lengths.cumsum(0) - lengths)  # elements left out before each range
    if shard.span is not None:
        start = shard.span[0] - int(skipped[0])
        return flat[start : start + shard.numel]
    vector, position = flat.new_empty(shard.numel), 0
    for run in shard.runs:
        starts = _starts(run)
        starts = starts - skipped[torch.searchsorted(first, starts // granule, right=True) - 1]
        size = run.number * run.length
        rows = vector[position : position + size].view(-1, run.length)
        torch.index_select(flat.unfold(0, run.length, 1), 0, starts, out=rows)
        position += size
    return vector


def _starts(run: StridedRun) -> Tensor:
    """Return where each contiguous run begins in the fragment's flat vector: int64 [number]."""
    starts = torch.tensor([run.start], dtype=torch.int64, device="cpu")
    for count, stride in zip(run.counts, run.strides, strict=True):
        starts = (starts.unsqueeze(1) + torch.arange(count, dtype=torch.int64, device="cpu") * stride).flatten()
    return starts


def _ranges(shard: Shard, granule: int) -> tuple[Tensor, Tensor]:
    """Return (first, end) of the ranges of blocks that cover the shard: ascending, with a gap between; int64 [ranges] each."""
    if not shard.runs:
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.int64, device="cpu")
    starts = [_starts(run) for run in shard.runs]
    first, order = torch.cat([some // granule for some in starts]).sort()
    ends = [(some + run.length - 1) // granule + 1 for some, run in zip(starts, shard.runs, strict=True)]
    end = torch.cat(ends)[order].cummax(0).values
    apart = first[1:] > end[:-1]
    edge = torch.ones(1, dtype=torch.bool, device="cpu")
    return first[torch.cat([edge, apart])], end[torch.cat([apart, edge])]
