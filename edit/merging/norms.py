"""Lengths of flat fp32 vectors, and of what several ranks hold of one: the same with any number of threads.

The last bits follow the order in which torch adds, which is one on x86 CPUs with AVX2 and another elsewhere. A merge is
computed at one place, and its result is what is journalled and sent, so nothing depends on that yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["dot", "norm", "norm_of_pieces", "whole_norm"]

_PIECE = 1 << 17  # elements at a time: 512 KiB of fp32 stay in the cache
_ROW = 1024  # rows of so many are summed in fp32, each by one thread; the rows' results are summed in fp64


def norm(flat: Tensor) -> float:
    """Return ||flat||_2 of a flat fp32 tensor."""
    return norm_of_pieces(flat[start : start + _PIECE] for start in range(0, flat.numel(), _PIECE))


def norm_of_pieces(pieces: Iterable[Tensor]) -> float:
    """Return the norm of all pieces together; NaN or Inf when an element is not finite or the norm overflows."""
    total = 0.0
    for piece in pieces:
        whole = piece.numel() - piece.numel() % _ROW
        rows = torch.linalg.vector_norm(piece[:whole].view(-1, _ROW), dim=1).double()
        tail = torch.linalg.vector_norm(piece[whole:]).double()
        total += float(rows.mul_(rows).sum() + tail.mul_(tail))
    return math.sqrt(total)


def dot(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two flat fp32 tensors of one length."""
    total = 0.0
    for start in range(0, a.numel(), _PIECE):
        products = a[start : start + _PIECE] * b[start : start + _PIECE]
        whole = products.numel() - products.numel() % _ROW
        rows = products[:whole].view(-1, _ROW).sum(dim=1, dtype=torch.float64)
        total += float(rows.sum() + products[whole:].sum(dtype=torch.float64))
    return total


def whole_norm(norms: Iterable[float]) -> float:
    """Return ||Delta||_2 of a replica from its shards' norms, in any order; NaN or Inf when one is, or when it overflows."""
    squares = [norm * norm for norm in norms]
    if not all(map(math.isfinite, squares)):
        return math.nan if any(map(math.isnan, squares)) else math.inf
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf
