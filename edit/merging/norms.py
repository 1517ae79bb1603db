"""Lengths of flat fp32 vectors, and of what several ranks hold of one: the same bits on every machine, with any threads.

All additions have a fixed order. Lane j, of PIECE lanes, adds up the squares (or products) of the elements j, j + PIECE,
j + 2 PIECE, ... in ascending order; then `edit.codecs.blockwise.row_sums` adds up the lanes. Each product and each sum is
rounded to fp32 by itself. (torch.sum, torch.dot and vector_norm add in an order that follows the width of the CPU's vectors, and fuse
multiplications with additions where the CPU can.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from edit.codecs.base import PIECE, parts
from edit.codecs.blockwise import row_sums

__all__ = ["dot", "norm", "norm_of_pieces", "whole_norm"]


def norm(flat: Tensor) -> float:
    """Return ||flat||_2 of a flat fp32 tensor; NaN or Inf when an element is not finite or a sum of squares overflows."""
    return math.sqrt(dot(flat, flat))


def norm_of_pieces(pieces: Iterable[Tensor], numel: int, *, overwrite: bool) -> float:
    """Return the `norm` of a vector of `numel` elements that comes in pieces of PIECE elements, the last one perhaps shorter.

    overwrite: the pieces may be written into.
    """
    scratch = torch.empty(0 if overwrite else min(PIECE, numel))
    squares = (torch.mul(piece, piece, out=piece if overwrite else scratch[: piece.numel()]) for piece in pieces)
    return math.sqrt(_sum(squares, numel))


def dot(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two flat fp32 tensors of one length; NaN or Inf when a sum overflows fp32."""
    scratch = torch.empty(min(PIECE, a.numel()))
    products = (torch.mul(a[part], b[part], out=scratch[: part.stop - part.start]) for part in parts(a.numel()))
    return _sum(products, a.numel())


def _sum(pieces: Iterable[Tensor], numel: int) -> float:
    """Return the sum of the `numel` elements of all pieces, in the order of the module's docstring."""
    lanes = torch.zeros(max(1, min(PIECE, numel)))
    for piece in pieces:
        lanes[: piece.numel()].add_(piece)
    return row_sums(lanes.unsqueeze(0)).item()


def whole_norm(norms: Iterable[float]) -> float:
    """Return ||Delta||_2 of a replica from its shards' norms, in any order; NaN or Inf when one is, or when it overflows."""
    squares = [norm * norm for norm in norms]
    if not all(map(math.isfinite, squares)):
        return math.nan if any(map(math.isnan, squares)) else math.inf
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf
