"""The digest of the outer parameters: equal at two peers exactly when every bit is equal.

A digest is the BLAKE3 of the fragments' BLAKE3 hashes, in fragment order, so that one changed fragment costs one hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FragmentHash", "combine", "digest", "fragment_hash"]


def fragment_hash(fragment: Tensor) -> bytes:
    """Return the BLAKE3 (32 bytes) of a flat fp32 CPU tensor's little-endian bytes."""
    return blake3(fragment.detach().contiguous().numpy().data.cast("B")).digest()


class FragmentHash:
    """`fragment_hash` of a vector that comes in pieces, in order: contiguous flat fp32 CPU tensors.

    parallel: hash each piece on all cores, which pays for pieces of megabytes.
    """

    def __init__(self, *, parallel: bool = False) -> None:
        self._hash = blake3(max_threads=blake3.AUTO if parallel else 1)

    def update(self, piece: Tensor) -> None:
        """Take the next piece."""
        self._hash.update(piece.numpy().data.cast("B"))

    def digest(self) -> bytes:
        """Return the hash (32 bytes) of all pieces so far."""
        return self._hash.digest()


def combine(hashes: Iterable[bytes]) -> str:
    """Return the digest (hex) of theta from its fragments' hashes, in fragment order."""
    return blake3(b"".join(hashes)).hexdigest()


def digest(fragments: Sequence[Tensor]) -> str:
    """Return the digest (hex) of theta, one flat fp32 CPU tensor per fragment: equal exactly when theta is equal to the bit."""
    return combine(fragment_hash(fragment) for fragment in fragments)
