"""The public grid on which masked vectors are integers: s = 2^exponent per 256 elements, known to all before they quantise.

q = clamp(round(w u / s), -L, L) with L = floor((2^(bits - 1) - 1) / n), so a sum of n never wraps. The exponents come from the
fragment's last merged vector D':  s = 2^ceil(log2(kappa max(rms(D' of the block), 2^-6 rms(D')) / L)).  Before any D' there is
one s for all elements: 2^ceil(log2(phi / L)). A peer keeps e = u - s q / w and adds it to its next vector, so what the clamp
cuts off is sent later.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "dequantise", "first_exponent", "grid_exponents", "largest", "quantise", "weighted_mean"]

BLOCK = 256
_KAPPA = {8: 6.0, 16: 32.0, 32: 32.0}
_FLOOR = 2.0**-6
_LEAST, _MOST = -126, 127  # exponents of normal fp32 numbers


def largest(bits: int, peers: int) -> int:
    """Return L, the largest integer that each of n peers may send. Raises ValueError when there is none."""
    limit = ((1 << (bits - 1)) - 1) // peers
    if limit < 1:
        raise ValueError(f"{peers} peers have no room in sums of {bits} bits")
    return limit


def first_exponent(bound: float, limit: int) -> int:
    """Return the exponent before any merged vector. bound: phi, the largest element that is expected."""
    return _exponent(bound / limit)


def grid_exponents(merged: NDArray[np.float32], bits: int, limit: int) -> NDArray[np.int8]:
    """Return an exponent per 256 elements, the last block being shorter.

    Args:
        merged: the fragment's last merged vector D', fp32, 1-D, finite, not empty.
        bits: 8, 16 or 32.
        limit: L of `largest`.
    """
    squares = np.square(merged, dtype=np.float64)
    starts = np.arange(0, len(squares), BLOCK)
    sizes = np.diff(np.append(starts, len(squares)))
    blocks = np.sqrt(np.add.reduceat(squares, starts) / sizes)
    floor = _FLOOR * float(np.sqrt(squares.mean()))
    scales = _KAPPA[bits] * np.maximum(blocks, floor) / limit
    return np.array([_exponent(float(scale)) for scale in scales], np.int8)


def quantise(
    vector: NDArray[np.float32], weight: float, exponents: NDArray[np.int8], limit: int, block: int = BLOCK
) -> NDArray[np.int64]:
    """Return q, one integer per element of `vector` (u, whole blocks but the last). Raises ValueError when u is not finite.

    block: elements that share an exponent.
    """
    if not np.isfinite(vector).all():
        raise ValueError("a vector that is not finite cannot be masked")
    scaled = np.rint(vector.astype(np.float64) * weight / _scales(exponents, len(vector), block))
    return np.clip(scaled, -limit, limit).astype(np.int64)


def dequantise(
    integers: NDArray[np.int64], weight: float, exponents: NDArray[np.int8], block: int = BLOCK
) -> NDArray[np.float32]:
    """Return s q / w, fp32: what a peer of this weight contributed. Zeros with weight 0.

    A peer keeps e = u - s q / w, and adopts it when the round commits with this peer in the sum.
    """
    if weight == 0:
        return np.zeros(len(integers), np.float32)
    return (_scales(exponents, len(integers), block) * integers / weight).astype(np.float32)


def weighted_mean(total: NDArray[np.int64], exponents: NDArray[np.int8], weights: float) -> NDArray[np.float32]:
    """Return D = s S / sum(w), fp32. total: S, the sum of all q; weights: the sum of the survivors' weights."""
    return (_scales(exponents, len(total)) * total / weights).astype(np.float32)


def _exponent(scale: float) -> int:
    """Return ceil(log2(scale)) within the exponents of normal fp32 numbers; exact, also at powers of two."""
    if not scale > 0:
        return _LEAST
    mantissa, exponent = np.frexp(scale)
    return int(np.clip(int(exponent) - (mantissa == 0.5), _LEAST, _MOST))


def _scales(exponents: NDArray[np.int8], numel: int, block: int = BLOCK) -> NDArray[np.float64]:
    scales: NDArray[np.float64] = np.repeat(np.ldexp(1.0, exponents.astype(np.int32)), block)[:numel]
    if len(scales) != numel:
        raise ValueError(f"{len(exponents)} exponents for {numel} elements, one per {block} is needed")
    return scales
