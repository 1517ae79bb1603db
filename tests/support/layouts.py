"""Fragments, boxes in them, and ways to deal a fragment out to the ranks of a replica; as hypothesis strategies too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.fragments.shards import Box


def fragment(*shapes: tuple[int, ...]) -> FragmentSpec:
    """A fragment `f` of tensors `t0`, `t1`, ... of these shapes."""
    return FragmentSpec(
        fragment_id=0, name="f", tensors=tuple(TensorSpec(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes))
    )


def numbered(spec: FragmentSpec) -> Tensor:
    """The fragment's flat vector with every element its own position."""
    return torch.arange(spec.numel, dtype=torch.float32)


def naive(spec: FragmentSpec, flat: Tensor, boxes: Sequence[Box]) -> Tensor:
    """The boxes' elements by plain indexing of the full tensors."""
    parts, start = [], 0
    tensors = []
    for tensor in spec.tensors:
        tensors.append(flat[start : start + tensor.numel].reshape(tensor.shape))
        start += tensor.numel
    for box in boxes:
        index = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        parts.append(tensors[box.tensor][index].reshape(-1))
    return torch.cat([flat[:0], *parts])


def split(box: Box, dimension: int, at: int) -> tuple[Box, Box]:
    """The two sides of a cut through the box, `at` elements into it."""
    low, high = list(box.sizes), list(box.sizes)
    low[dimension], high[dimension] = at, box.sizes[dimension] - at
    beyond = list(box.offsets)
    beyond[dimension] += at
    return Box(box.tensor, box.offsets, tuple(low)), Box(box.tensor, tuple(beyond), tuple(high))


def whole(spec: FragmentSpec) -> list[Box]:
    """One box for each tensor."""
    return [Box(i, (0,) * len(tensor.shape), tensor.shape) for i, tensor in enumerate(spec.tensors)]


def rows(spec: FragmentSpec, ranks: int, dimension: int = 0) -> list[list[Box]]:
    """As FSDP2 shards along the first dimension (or tensor parallelism along another); scalars and the like go to rank 0."""
    shares: list[list[Box]] = [[] for _ in range(ranks)]
    for box in whole(spec):
        at = min(dimension, len(box.sizes) - 1)
        if at < 0:
            shares[0].append(box)
            continue
        chunk, rest = -(-box.sizes[at] // ranks), box
        for share in shares:
            if rest.sizes[at] <= chunk:
                share.append(rest)
                break
            mine, rest = split(rest, at, chunk)
            share.append(mine)
    return shares


@st.composite
def partitions(draw: st.DrawFn) -> tuple[FragmentSpec, list[list[Box]]]:
    """A fragment of up to four tensors, and its boxes, cut again and again, dealt out to up to four ranks in any order."""
    shape = st.lists(st.integers(1, 40), max_size=3).map(tuple)
    spec = fragment(*draw(st.lists(shape, min_size=1, max_size=4)))
    boxes = whole(spec)
    for _ in range(draw(st.integers(0, 8))):
        position = draw(st.integers(0, len(boxes) - 1))
        long = [i for i, size in enumerate(boxes[position].sizes) if size > 1]
        if long:
            dimension = draw(st.sampled_from(long))
            at = draw(st.integers(1, boxes[position].sizes[dimension] - 1))
            boxes += split(boxes.pop(position), dimension, at)
    ranks = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=len(boxes), max_size=len(boxes)))
    order = draw(st.permutations(range(len(boxes))))
    return spec, [[boxes[i] for i in order if owners[i] == rank] for rank in range(ranks)]
