"""The Gram matrix of the contributions to a fragment, in one pass over them: the same bits on every machine.

Lane k, of LANES lanes for each pair, adds up the products of the elements k, k + LANES, k + 2 LANES, ... in ascending order, as
`edit.merging.norms` does of one vector; then `edit.codecs.blockwise.row_sums` adds up the lanes. In memory are one piece of
each vector, and the lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from edit.codecs.base import PIECE, parts
from edit.codecs.blockwise import row_sums
from edit.kernels import fast

__all__ = ["LANES", "gram", "windows"]

LANES = 1024


def windows(rows: Sequence[Iterator[Tensor]], numel: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield, of consecutive parts of the vectors, where the part stands and fp32 [rows, elements of the part].

    rows: of each vector its pieces, as `edit.codecs.base.parts` says. What is yielded is valid until the next one.
    """
    block = torch.empty(len(rows) * min(PIECE, numel), dtype=torch.float32, device="cpu")
    for part, pieces in zip(parts(numel), zip(*rows, strict=True), strict=True):
        width = part.stop - part.start
        window = block[: len(rows) * width].view(len(rows), width)
        for row, piece in zip(window, pieces, strict=True):
            row.copy_(piece)
        yield part, window


def gram(rows: Sequence[Iterator[Tensor]], numel: int) -> list[list[float]]:
    """Return K with K[i][j] = <x_i, x_j>, symmetric. rows: see `windows`."""
    first, second = torch.tril_indices(len(rows), len(rows), dtype=torch.int64, device="cpu").unbind()
    lanes = torch.zeros(first.numel(), min(LANES, max(1, numel)), dtype=torch.float32, device="cpu")
    for _, window in windows(rows, numel):
        if (kernels := fast(window, lanes)) is not None:
            kernels.gram(window.numpy(), lanes.numpy())
            continue
        for columns in torch.split(window, lanes.shape[1], 1):
            lanes[:, : columns.shape[1]].add_(columns[first] * columns[second])
    found = torch.zeros(len(rows), len(rows), dtype=torch.float32, device="cpu")
    found[first, second] = found[second, first] = row_sums(lanes)
    return [[float(value) for value in row] for row in found.tolist()]
