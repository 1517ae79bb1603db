"""The part of a fragment that one rank of a sharded replica holds: boxes of full tensors (as torch.distributed.checkpoint).

Owns: the geometry. A `Shard` is some boxes of one fragment as one flat vector (the boxes in order, each row-major), and how
that vector lies in the flat vector of the whole fragment. Must not know: ranks, meshes, codecs, peers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING

from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Box", "Shard", "StridedRun", "partition_fault"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of one full tensor. tensor: its position in the fragment; offsets, sizes: one per dimension, sizes >= 1."""

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlaps(self, other: Box) -> bool:
        """Whether they share an element."""
        return self.tensor == other.tensor and all(
            a < d + e and d < a + b for a, b, d, e in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )


@dataclass(frozen=True, slots=True)
class StridedRun:
    """A box in its fragment's flat vector: runs of `length` elements from `start`, counts[i] times strides[i] elements apart.

    Row-major, so in the box's own order. number: of runs; one is contiguous.
    """

    start: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    length: int

    @property
    def number(self) -> int:
        return math.prod(self.counts)


class Shard:
    """Boxes of `fragment`; None: the whole of it. Raises RemoteProtocolError for a box that does not lie inside its tensor.

    Two boxes of one shard may not overlap. A shard may be empty: this rank holds nothing of the fragment.
    """

    def __init__(self, fragment: FragmentSpec, boxes: Sequence[Box] | None = None) -> None:
        whole = tuple(Box(i, (0,) * len(t.shape), t.shape) for i, t in enumerate(fragment.tensors))
        self.fragment = fragment
        self.boxes = whole if boxes is None else tuple(boxes)
        self.is_whole = self.boxes == whole
        if not self.is_whole and (fault := _outside(self.boxes, fragment) or _overlap(self.boxes, fragment)):
            raise RemoteProtocolError(fault)
        self.numel = sum(box.numel for box in self.boxes)

    def take(self, flat: Tensor) -> Tensor:
        """This shard of the fragment's flat vector; `flat` itself when the shard is the whole, else a new tensor."""
        if self.is_whole:
            return flat
        part = flat.new_empty(self.numel)
        for inside, outside in self._views(part, flat):
            inside.copy_(outside)
        return part

    def put(self, part: Tensor, flat: Tensor) -> None:
        """Write this region's vector into the fragment's flat vector."""
        for inside, outside in self._views(part, flat):
            outside.copy_(inside)

    def add(self, part: Tensor, flat: Tensor) -> None:
        """Add this region's vector to the fragment's flat vector, in place."""
        for inside, outside in self._views(part, flat):
            outside.add_(inside)

    @cached_property
    def runs(self) -> tuple[StridedRun, ...]:
        """Where each box lies in the fragment's flat vector."""
        return tuple(
            _strided_run(box, self.fragment.tensors[box.tensor].shape, self._origins[box.tensor]) for box in self.boxes
        )

    @cached_property
    def span(self) -> tuple[int, int] | None:
        """(start, end) in the fragment's flat vector when the shard is one contiguous run of it, in order; else None."""
        ends = [(run.start, run.start + run.length) for run in self.runs]
        apart = any(before[1] != after[0] for before, after in pairwise(ends))
        if not ends or apart or any(run.number > 1 for run in self.runs):
            return None
        return ends[0][0], ends[-1][1]

    @cached_property
    def _origins(self) -> tuple[int, ...]:
        return tuple(accumulate((tensor.numel for tensor in self.fragment.tensors), initial=0))

    def _views(self, part: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        expected, given = (self.numel, self._origins[-1]), (part.numel(), flat.numel())
        if given != expected:
            raise LocalProtocolError(f"a shard of {expected} elements was given vectors of {given}")
        start = 0
        for box in self.boxes:
            outside = flat[self._origins[box.tensor] : self._origins[box.tensor + 1]].view(
                self.fragment.tensors[box.tensor].shape
            )
            for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                outside = outside.narrow(dimension, offset, size)
            yield part[start : start + box.numel].view(box.sizes), outside
            start += box.numel


def partition_fault(fragment: FragmentSpec, shares: Sequence[Sequence[Box]]) -> str | None:
    """What keeps `shares` (boxes, by rank) from covering every element of the fragment exactly once, or None."""
    boxes = [box for share in shares for box in share]
    if fault := _outside(boxes, fragment) or _overlap(boxes, fragment):
        return fault
    covered = [0] * len(fragment.tensors)
    for box in boxes:
        covered[box.tensor] += box.numel
    for tensor, count in zip(fragment.tensors, covered, strict=True):
        if count != tensor.numel:
            return f"tensor {tensor.name}: the shards cover {count} of {tensor.numel} elements"
    return None


def _strided_run(box: Box, shape: tuple[int, ...], origin: int) -> StridedRun:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    split = len(shape)  # from here on every dimension is taken whole
    while split > 0 and box.sizes[split - 1] == shape[split - 1]:
        split -= 1
    outer = max(split - 1, 0)
    start = origin + sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    return StridedRun(start, box.sizes[:outer], strides[:outer], math.prod(box.sizes[outer:]))


def _outside(boxes: Sequence[Box], fragment: FragmentSpec) -> str | None:
    for box in boxes:
        if not 0 <= box.tensor < len(fragment.tensors):
            return f"fragment {fragment.name} has no tensor {box.tensor}"
        tensor = fragment.tensors[box.tensor]
        fits = len(box.offsets) == len(box.sizes) == len(tensor.shape) and all(
            offset >= 0 and size >= 1 and offset + size <= whole
            for offset, size, whole in zip(box.offsets, box.sizes, tensor.shape, strict=True)
        )
        if not fits:
            return f"tensor {tensor.name} {list(tensor.shape)}: no box at {list(box.offsets)} of {list(box.sizes)} lies in it"
    return None


def _overlap(boxes: Sequence[Box], fragment: FragmentSpec) -> str | None:
    by_tensor: dict[int, list[Box]] = {}
    for box in boxes:
        by_tensor.setdefault(box.tensor, []).append(box)
    for i, group in by_tensor.items():
        if _any_overlap(group):
            return f"tensor {fragment.tensors[i].name}: two shards overlap"
    return None


def _any_overlap(boxes: list[Box]) -> bool:
    """Whether two boxes of one tensor overlap. Groups are split at gaps along any dimension: a grid costs n log n, not n^2."""
    groups = [boxes]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        for dimension in range(len(group[0].sizes)):
            parts = _split(group, dimension)
            if len(parts) > 1:
                groups += parts
                break
        else:
            if any(a.overlaps(b) for a, b in combinations(group, 2)):
                return True
    return False


def _split(boxes: list[Box], dimension: int) -> list[list[Box]]:
    """Groups whose extents along `dimension` do not meet."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[dimension]):
        if not groups or box.offsets[dimension] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[dimension] + box.sizes[dimension])
    return groups
