"""Gaussian noise that nobody can compute again: a stream of AES-256-CTR under a key from the operating system.

torch's generators are no secret: that of the CPU takes 32 bits of a seed. Each value is half the sum of four normals, so that
the spacing of floating-point numbers tells nothing of the value without it (Holohan and Braghin 2021, arXiv 2107.10138, n = 2).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

__all__ = ["SecretNoise"]

_PIECE = 1 << 14  # values at a time: the arrays between stay in the cache


class SecretNoise:
    """Standard normal values, each drawn once.

    entropy: gives so many random bytes; for tests, another than the operating system's.
    """

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._stream = Cipher(algorithms.AES256(entropy(32)), modes.CTR(entropy(16))).encryptor()

    def normal(self, count: int) -> npt.NDArray[np.float64]:
        """Return `count` independent values of N(0, 1), (count,) fp64."""
        out = np.empty(count)
        for start in range(0, count, _PIECE):
            size = min(_PIECE, count - start)
            out[start : start + size] = self._piece(size)
        return out

    def _piece(self, size: int) -> npt.NDArray[np.float64]:
        """Two pairs of Box and Muller to a value; a pair of normals sums to R (cos a + sin a) = sqrt(2) R sin(a + pi / 4)."""
        bits = np.frombuffer(self._stream.update(bytes(8 * 4 * size)), dtype="<u8").reshape(4, size)
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), both ends left out
        radius = np.sqrt(-np.log(uniform[:2]))
        pairs = radius * np.sin(2 * np.pi * uniform[2:])
        total: npt.NDArray[np.float64] = pairs[0] + pairs[1]
        return total
