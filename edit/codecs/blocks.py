"""Which blocks of an encoded vector a shard touches, and the shard out of those blocks.

Owns: the map between a shard of a fragment and the codec blocks that cover it, in tensor operations (a tensor-parallel
shard is tens of thousands of runs). Must not know: one format, bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edit.fragments.shards import Shard, StridedRun

__all__ = ["covering", "covering_numel", "gather"]


def covering(shard: Shard, granule: int) -> Tensor:
    """The blocks of `granule` elements that the shard touches: ascending positions, int64 [blocks]."""
    first, end = _ranges(shard, granule)
    lengths = end - first
    skipped = first - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + skipped.repeat_interleave(lengths)


def covering_numel(shard: Shard, granule: int) -> int:
    """Elements in those blocks; the fragment's last block may be short."""
    if granule == 1:
        return shard.numel
    first, end = _ranges(shard, granule)
    return int(((end * granule).clamp_(max=shard.fragment.numel) - first * granule).sum())


def gather(shard: Shard, flat: Tensor, granule: int) -> Tensor:
    """The region's own vector out of `flat`, the elements of the blocks that `covering` names, one after the other."""
    first, end = _ranges(shard, granule)
    lengths = (end - first) * granule
    skipped = first * granule - (lengths.cumsum(0) - lengths)  # elements left out before each range
    if shard.span is not None:
        start = shard.span[0] - int(skipped[0])
        return flat[start : start + shard.numel]
    part, position = flat.new_empty(shard.numel), 0
    for run in shard.runs:
        starts = _starts(run)
        starts = starts - skipped[torch.searchsorted(first, starts // granule, right=True) - 1]
        size = run.number * run.length
        torch.index_select(flat.unfold(0, run.length, 1), 0, starts, out=part[position : position + size].view(-1, run.length))
        position += size
    return part


def _starts(run: StridedRun) -> Tensor:
    """Where each run of the run begins in the fragment's flat vector: int64 [number]."""
    starts = torch.tensor([run.start])
    for count, stride in zip(run.counts, run.strides, strict=True):
        starts = (starts.unsqueeze(1) + torch.arange(count) * stride).flatten()
    return starts


def _ranges(shard: Shard, granule: int) -> tuple[Tensor, Tensor]:
    """(first, end) of the runs of blocks that cover the shard: ascending, with a gap between any two; int64 [ranges] each."""
    if not shard.runs:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    starts = [_starts(run) for run in shard.runs]
    first, order = torch.cat([some // granule for some in starts]).sort()
    ends = [(some + run.length - 1) // granule + 1 for some, run in zip(starts, shard.runs, strict=True)]
    end = torch.cat(ends)[order].cummax(0).values
    apart = first[1:] > end[:-1]
    edge = torch.ones(1, dtype=torch.bool)
    return first[torch.cat([edge, apart])], end[torch.cat([apart, edge])]
