"""What one rank of a sharded replica holds of a fragment: boxes of full tensors, as torch.distributed.checkpoint has them.

A `Shard` is some boxes of one fragment as one flat vector (the boxes in order, each row-major). This module maps that vector
to and from the flat vector of the whole fragment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product
from typing import TYPE_CHECKING

from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Box", "Cover", "Shard", "StridedRun", "partition_fault"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of one full tensor."""

    # The tensor's position in its fragment.
    tensor: int
    # One per dimension.
    offsets: tuple[int, ...]
    # One per dimension, each at least 1.
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def overlaps(self, other: Box) -> bool:
        """Return whether the two boxes share an element."""
        return self.tensor == other.tensor and all(
            a < d + e and d < a + b for a, b, d, e in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )


@dataclass(frozen=True, slots=True)
class StridedRun:
    """A box in its fragment's flat vector: contiguous runs of equal length at regular distances, in the box's own order."""

    # Where the first run begins, in elements.
    start: int
    # How many runs there are along each outer dimension, and how many elements lie between their beginnings.
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    # Elements in each run.
    length: int

    @property
    def number(self) -> int:
        """The number of runs; 1 when the box is contiguous."""
        return math.prod(self.counts)


class Shard:
    """Some boxes of a fragment, as one flat vector.

    boxes: in the vector's order; None: the whole fragment; empty: this rank holds nothing of it.
    Raises RemoteProtocolError for a box that does not lie inside its tensor, and for two that overlap.
    """

    def __init__(self, fragment: FragmentSpec, boxes: Sequence[Box] | None = None) -> None:
        whole = tuple(Box(i, (0,) * len(t.shape), t.shape) for i, t in enumerate(fragment.tensors))
        self.fragment = fragment
        self.boxes = whole if boxes is None else tuple(boxes)
        self.is_whole = self.boxes == whole
        if not self.is_whole and (fault := _outside(self.boxes, fragment) or _overlap(self.boxes, fragment)):
            raise RemoteProtocolError(fault)
        self.numel = sum(box.numel for box in self.boxes)
        # Elements in the blocks that cover it, by the size of a block: `edit.codecs.blocks` counts them once.
        self.covered: dict[int, int] = {}

    def take(self, flat: Tensor) -> Tensor:
        """Return this shard's vector out of the fragment's; `flat` itself for the whole fragment, else a new tensor."""
        if self.is_whole:
            return flat
        vector = flat.new_empty(self.numel)
        for inside, outside in self._views(vector, flat):
            inside.copy_(outside)
        return vector

    def take_part(self, flat: Tensor, start: int, end: int) -> Tensor:
        """Return elements [start, end) of this shard's vector, and copy no more than those."""
        if self.is_whole:
            return flat[start:end]
        part, begin = flat.new_empty(end - start), 0
        for outside in self._boxes_of(flat):
            low, high = max(start, begin), min(end, begin + outside.numel())
            if low < high:
                _copy_part(outside, low - begin, part[low - start : high - start])
            begin += outside.numel()
        return part

    def put(self, vector: Tensor, flat: Tensor) -> None:
        """Write this shard's vector into the fragment's flat vector."""
        for inside, outside in self._views(vector, flat):
            outside.copy_(inside)

    def add(self, vector: Tensor, flat: Tensor) -> None:
        """Add this shard's vector to the fragment's flat vector, in place."""
        for inside, outside in self._views(vector, flat):
            outside.add_(inside)

    @cached_property
    def runs(self) -> tuple[StridedRun, ...]:
        """Where each box lies in the fragment's flat vector."""
        return tuple(
            _strided_run(box, self.fragment.tensors[box.tensor].shape, self._origins[box.tensor]) for box in self.boxes
        )

    @property
    def run_count(self) -> int:
        """How many contiguous runs of the fragment's flat vector there are."""
        return sum(run.number for run in self.runs)

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

    def _views(self, vector: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        expected, given = (self.numel, self._origins[-1]), (vector.numel(), flat.numel())
        if given != expected:
            raise LocalProtocolError(f"a shard of {expected} elements was given vectors of {given}")
        start = 0
        for box, outside in zip(self.boxes, self._boxes_of(flat), strict=True):
            yield vector[start : start + box.numel].view(box.sizes), outside
            start += box.numel

    def _boxes_of(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield each box as a view of the fragment's flat vector."""
        for box in self.boxes:
            outside = flat[self._origins[box.tensor] : self._origins[box.tensor + 1]].view(
                self.fragment.tensors[box.tensor].shape
            )
            for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                outside = outside.narrow(dimension, offset, size)
            yield outside


def _copy_part(box: Tensor, start: int, part: Tensor) -> None:
    """Copy as many elements of a box as `part` has, from `start` on, row-major: whole rows at once, the ends by parts."""
    if box.dim() == 0:
        part.copy_(box)
        return
    row, done = box[0].numel(), 0
    if start % row:
        done = min(row - start % row, part.numel())
        _copy_part(box[start // row], start % row, part[:done])
    first = (start + done) // row
    if rows := (part.numel() - done) // row:
        part[done : done + rows * row].view(rows, *box.shape[1:]).copy_(box[first : first + rows])
        done += rows * row
    if done < part.numel():
        _copy_part(box[first + rows], 0, part[done:])


def partition_fault(fragment: FragmentSpec, by_rank: Sequence[Sequence[Box]]) -> str | None:
    """Say in one line why the boxes of all ranks do not cover every element of the fragment exactly once, or return None."""
    cover = Cover(fragment)
    for boxes in by_rank:
        if fault := _outside(boxes, fragment):
            return fault
        cover.add(boxes)
    if fault := cover.fault():  # an overlap explains more than the gap that it leaves
        return _overlap([box for boxes in by_rank for box in boxes], fragment) or fault
    return None


class Cover:
    """How often boxes, given a few at a time, cover each element of a fragment; linear in their number.

    The boxes of a tensor cover each element once exactly when the sum of their indicator functions is the tensor's. Two such
    sums are equal exactly when their mixed differences are: each box leaves +1 or -1 at each of its corners (a minus for each
    dimension in which the corner is the end), and the corners where the signs do not cancel are kept.
    """

    def __init__(self, fragment: FragmentSpec) -> None:
        self._fragment = fragment
        self._covered = [0] * len(fragment.tensors)
        self._corners: list[dict[tuple[int, ...], int]] = [{} for _ in fragment.tensors]  # less those of the whole tensor
        for i, tensor in enumerate(fragment.tensors):
            self._count(Box(i, (0,) * len(tensor.shape), tensor.shape), -1)

    @property
    def numel(self) -> int:
        """The elements of all boxes."""
        return sum(self._covered)

    def add(self, boxes: Sequence[Box]) -> None:
        """Count these boxes; each lies inside its tensor."""
        for box in boxes:
            self._covered[box.tensor] += box.numel
            self._count(box, 1)

    def remove(self, boxes: Sequence[Box]) -> None:
        """Take back an `add`."""
        for box in boxes:
            self._covered[box.tensor] -= box.numel
            self._count(box, -1)

    def fault(self) -> str | None:
        """Say in one line why the boxes do not cover every element exactly once, or return None."""
        for tensor, covered, corners in zip(self._fragment.tensors, self._covered, self._corners, strict=True):
            if covered < tensor.numel:
                return f"tensor {tensor.name}: the shards cover {covered} of {tensor.numel} elements"
            if corners:
                return f"tensor {tensor.name}: two shards overlap"
        return None

    def _count(self, box: Box, sign: int) -> None:
        corners = self._corners[box.tensor]
        sides = [((start, 1), (start + size, -1)) for start, size in zip(box.offsets, box.sizes, strict=True)]
        for corner in product(*sides):
            at = tuple(position for position, _ in corner)
            if total := corners.get(at, 0) + sign * math.prod(each for _, each in corner):
                corners[at] = total
            else:
                del corners[at]


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
    """Return whether two boxes of one tensor overlap.

    Groups are split at gaps along any dimension, so that a grid of boxes costs n log n. Only for the boxes of one rank, which
    are few (from the wire: `editpb.limits.MAX_BOXES_PER_TENSOR`); those of all ranks are a `Cover`,
    and come here only for the words of a fault of our own.
    """
    groups = [boxes]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        for dimension in range(len(group[0].sizes)):
            apart = _split(group, dimension)
            if len(apart) > 1:
                groups += apart
                break
        else:
            if any(a.overlaps(b) for a, b in combinations(group, 2)):
                return True
    return False


def _split(boxes: list[Box], dimension: int) -> list[list[Box]]:
    """Split boxes into groups whose extents along `dimension` do not meet."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[dimension]):
        if not groups or box.offsets[dimension] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[dimension] + box.sizes[dimension])
    return groups
