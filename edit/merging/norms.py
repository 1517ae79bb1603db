"""Lengths of flat fp32 vectors, and of what several ranks hold of one: the same bits on every machine, with any threads.

All additions have a fixed order. Lane j, of PIECE lanes, adds up the squares (or products) of the elements j, j + PIECE,
j + 2 PIECE, ... in ascending order; then `edit.codecs.blockwise.row_sums` adds up the lanes. Each product and each sum is
rounded to fp32 by itself. (torch.sum, torch.dot and vector_norm add in an order that follows the width of the CPU's vectors,
and fuse multiplications with additions where the CPU can.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from edit.codecs import codec
from edit.codecs.base import PIECE, add_squares, parts
from edit.codecs.blockwise import row_sums
from edit.kernels import fast
from edit.records import EncodedTensor

__all__ = ["clip_to", "difference_norm", "dot", "norm", "norm_of_encoded", "norm_of_pieces", "whole_norm"]


def norm(flat: Tensor) -> float:
    """Return ||flat||_2 of a flat fp32 tensor; NaN or Inf when an element is not finite or a sum of squares overflows."""
    lanes = _lanes(flat.numel())
    if (kernels := fast(flat)) is not None:
        kernels.add_squares(flat.numpy(), lanes.numpy())
    else:
        scratch = torch.empty_like(lanes)
        for part in parts(flat.numel()):
            add_squares(flat[part], lanes, scratch[: part.stop - part.start])
    return math.sqrt(_sum(lanes))


def norm_of_pieces(numel: int, pieces: Iterable[Tensor]) -> float:
    """Return the `norm` of a vector of which the pieces of `edit.codecs.base.parts` come one after the other."""
    lanes = _lanes(numel)
    scratch = torch.empty_like(lanes)
    for piece in pieces:
        add_squares(piece, lanes, scratch[: piece.numel()])
    return math.sqrt(_sum(lanes))


def norm_of_encoded(encoded: EncodedTensor) -> float:
    """Return the `norm` of what is decoded, of which at most PIECE elements are held. Raises as `Codec.decode`."""
    lanes = _lanes(encoded.numel)
    codec(encoded.codec).add_squares(encoded, lanes)
    return math.sqrt(_sum(lanes))


def difference_norm(a: EncodedTensor, b: EncodedTensor) -> float:
    """Return the `norm` of decode(a) - decode(b), of which at most PIECE elements are held. Raises as `Codec.decode`."""
    lanes = _lanes(a.numel)
    scratch = torch.empty_like(lanes)
    both = zip(codec(a.codec).decode_pieces(a), codec(b.codec).decode_pieces(b), strict=True)
    for part, (one, other) in zip(parts(a.numel), both, strict=True):
        apart = torch.sub(one, other, out=scratch[: part.stop - part.start])
        add_squares(apart, lanes, apart)
    return math.sqrt(_sum(lanes))


def dot(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two flat fp32 tensors of one length; NaN or Inf when a sum overflows fp32."""
    lanes = _lanes(a.numel())
    scratch = torch.empty_like(lanes)
    for part in parts(a.numel()):
        numel = part.stop - part.start
        lanes[:numel].add_(torch.mul(a[part], b[part], out=scratch[:numel]))
    return _sum(lanes)


def _lanes(numel: int) -> Tensor:
    return torch.zeros(max(1, min(PIECE, numel)), dtype=torch.float32, device="cpu")


def _sum(lanes: Tensor) -> float:
    return row_sums(lanes.unsqueeze(0)).item()


def clip_to(norm: float, most: float) -> float:
    """Return min(1, most / norm), what shortens a vector of this norm to `most`; 0 for a norm that is NaN or infinite."""
    if norm <= most:
        return 1.0
    return most / norm if math.isfinite(norm) else 0.0


def whole_norm(norms: Iterable[float]) -> float:
    """Return ||Delta||_2 of a replica from its shards' norms, in any order; NaN or Inf when one is, or when it overflows."""
    squares = [norm * norm for norm in norms]
    if not all(map(math.isfinite, squares)):
        return math.nan if any(map(math.isnan, squares)) else math.inf
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf
