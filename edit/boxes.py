"""The part of a fragment that one rank of a sharded replica holds: boxes of full tensors (as torch.distributed.checkpoint).

Owns: the geometry. A `Region` is some boxes of one fragment as one flat vector (the boxes in order, each row-major), and how
that vector lies in the flat vector of the whole fragment. Must not know: ranks, meshes, codecs, peers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from edit.errors import RemoteProtocolError
from edit.schema import FragmentSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Box", "Region", "partition_fault"]


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


class Region:
    """Boxes of `fragment`; None: the whole of it. Raises RemoteProtocolError for a box that does not lie inside its tensor.

    Two boxes of one region may not overlap. A region may be empty: this rank holds nothing of the fragment.
    """

    def __init__(self, fragment: FragmentSpec, boxes: Sequence[Box] | None = None) -> None:
        whole = tuple(Box(i, (0,) * len(t.shape), t.shape) for i, t in enumerate(fragment.tensors))
        self.fragment = fragment
        self.boxes = whole if boxes is None else tuple(boxes)
        for box in self.boxes:
            _check_inside(box, fragment)
        self.numel = sum(box.numel for box in self.boxes)
        self.is_whole = self.boxes == whole
        if not self.is_whole and (fault := _overlap(self.boxes, fragment)):
            raise RemoteProtocolError(fault)

    def take(self, flat: Tensor) -> Tensor:
        """This region of the fragment's flat vector; `flat` itself when the region is the whole, else a new tensor."""
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
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of each contiguous run in the fragment's flat vector, in the region's order; neighbours are joined."""
        runs: list[tuple[int, int]] = []
        for start, end in (run for box in self.boxes for run in self._runs(box)):
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((start, end))
        return tuple(runs)

    def _runs(self, box: Box) -> Iterator[tuple[int, int]]:
        shape = self.fragment.tensors[box.tensor].shape
        origin = sum(tensor.numel for tensor in self.fragment.tensors[: box.tensor])
        inner = len(shape)  # dimensions from `inner` on are taken whole
        while inner > 0 and box.sizes[inner - 1] == shape[inner - 1]:
            inner -= 1
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if inner == 0:
            yield origin, origin + math.prod(shape)
            return
        length = box.sizes[inner - 1] * strides[inner - 1]
        base = origin + sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
        starts = [base]
        for size, stride in zip(box.sizes[: inner - 1], strides[: inner - 1], strict=True):
            starts = [start + i * stride for start in starts for i in range(size)]
        for start in starts:
            yield start, start + length

    def _views(self, part: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        origins = [0]
        for tensor in self.fragment.tensors:
            origins.append(origins[-1] + tensor.numel)
        start = 0
        for box in self.boxes:
            shape = self.fragment.tensors[box.tensor].shape
            outside = flat[origins[box.tensor] : origins[box.tensor + 1]].view(shape)
            for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                outside = outside.narrow(dimension, offset, size)
            yield part[start : start + box.numel].view(box.sizes), outside
            start += box.numel


def partition_fault(fragment: FragmentSpec, shares: Sequence[Sequence[Box]]) -> str | None:
    """What keeps `shares` (boxes, by rank) from covering every element of the fragment exactly once, or None."""
    boxes = [box for share in shares for box in share]
    if fault := _overlap(boxes, fragment):
        return fault
    for i, tensor in enumerate(fragment.tensors):
        covered = sum(box.numel for box in boxes if box.tensor == i)
        if covered != tensor.numel:
            return f"tensor {tensor.name}: the shards cover {covered} of {tensor.numel} elements"
    return None


def _check_inside(box: Box, fragment: FragmentSpec) -> None:
    if not 0 <= box.tensor < len(fragment.tensors):
        raise RemoteProtocolError(f"fragment {fragment.name} has no tensor {box.tensor}")
    tensor = fragment.tensors[box.tensor]
    fits = len(box.offsets) == len(box.sizes) == len(tensor.shape) and all(
        offset >= 0 and size >= 1 and offset + size <= whole
        for offset, size, whole in zip(box.offsets, box.sizes, tensor.shape, strict=True)
    )
    if not fits:
        raise RemoteProtocolError(
            f"tensor {tensor.name} {list(tensor.shape)}: no box at {list(box.offsets)} of {list(box.sizes)} lies in it"
        )


def _overlap(boxes: Sequence[Box], fragment: FragmentSpec) -> str | None:
    by_tensor: dict[int, list[Box]] = {}
    for box in boxes:
        earlier = by_tensor.setdefault(box.tensor, [])
        if any(box.overlaps(other) for other in earlier):
            return f"tensor {fragment.tensors[box.tensor].name}: two shards overlap"
        earlier.append(box)
    return None
