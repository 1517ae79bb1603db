"""Masks that cancel in a sum: pair keys, the generator that stretches a key, boxes for shares, lanes.

From Bonawitz et al. 2017 (Practical Secure Aggregation). Peers are numbered by their place in the round's roster. Peer i sends

    y_i = q_i + G(b_i) + sum_{j > i} G(K_ij) - sum_{j < i} G(K_ij)   modulo 2^bits

where K_ij is a key that only i and j have, and b_i one that i has alone. In the sum the pair masks cancel. G(k) is AES-256-CTR
under k, read as little-endian words; the first block of a fragment is u64be(fragment_id) | u64be(0), so that G can start at any
element: each rank masks its own boxes, and a stream that is resumed repeats its bytes.

Lanes are 8 words after a fragment's last element: the sums of q over the positions k modulo 8. A sum whose lanes do not fit is
wrong.
"""

from __future__ import annotations

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from edit.trust.mask_roster import KEY_BYTES

__all__ = [
    "BITS",
    "LANES",
    "Words",
    "add_mask",
    "as_words",
    "derive",
    "lanes_of",
    "open_box",
    "pair_key",
    "public_key",
    "seal",
    "shared_secret",
    "signed",
    "word_type",
]

Words = NDArray[np.unsignedinteger]

BITS = (8, 16, 32)
LANES = 8
_BLOCK = 16  # bytes of an AES block
_PIECE = 1 << 20  # bytes of mask that are in memory at a time
_DTYPES = {bits: np.dtype(f"<u{bits // 8}") for bits in BITS}


def public_key(private: bytes) -> bytes:
    """Return the public X25519 key of a private one, 32 bytes each."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_secret(private: bytes, public: bytes) -> bytes:
    """Return X25519 of a private and a public key, 32 bytes each. Raises ValueError for a public key of small order."""
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Return 32 bytes of HKDF-SHA256 (RFC 5869)."""
    return HKDF(hashes.SHA256(), KEY_BYTES, salt, info).derive(secret)


def pair_key(secret: bytes, roster_hash: bytes, one: int, other: int) -> bytes:
    """Return K, the mask key of two peers, from their X25519 secret and their places in the roster (in either order)."""
    return derive(secret, roster_hash, b"edit mask seed" + bytes([min(one, other), max(one, other)]))


def seal(key: bytes, plain: bytes, context: bytes) -> bytes:
    """Return AES-256-GCM of `plain`, 16 bytes longer. The nonce is 0: a key seals one text only."""
    return AESGCM(key).encrypt(bytes(12), plain, context)


def open_box(key: bytes, box: bytes, context: bytes) -> bytes:
    """Return what `seal` was given. Raises ValueError when key, box or context is another."""
    try:
        return AESGCM(key).decrypt(bytes(12), box, context)
    except InvalidTag as error:
        raise ValueError("the box does not open") from error


def add_mask(words: Words, key: bytes, fragment_id: int, start: int, *, subtract: bool = False) -> None:
    """Add G(key) to a run of a fragment's elements, in place, modulo 2^bits. Takes 1 MiB of memory.

    Args:
        words: contiguous, little-endian, of 8, 16 or 32 bits.
        key: 32 bytes.
        fragment_id: of the fragment, at least 0.
        start: position of words[0] in the fragment; its lanes follow its last element.
        subtract: take the mask away instead.
    """
    size = words.dtype.itemsize
    if words.dtype not in _DTYPES.values() or words.ndim != 1 or not words.flags.c_contiguous:
        raise ValueError("masks are added to contiguous little-endian words of 8, 16 or 32 bits")
    if start < 0 or not 0 <= fragment_id < 1 << 64:
        raise ValueError(f"there is no element {start} of fragment {fragment_id}")
    block, inside = divmod(start * size, _BLOCK)
    nonce = fragment_id.to_bytes(8, "big") + block.to_bytes(8, "big")
    generator = Cipher(algorithms.AES(key), modes.CTR(nonce)).encryptor()
    generator.update(bytes(inside))
    zeros, apply = bytes(_PIECE), np.subtract if subtract else np.add
    for first in range(0, len(words), _PIECE // size):
        piece = words[first : first + _PIECE // size]
        mask = np.frombuffer(generator.update(zeros[: piece.nbytes]), words.dtype)
        apply(piece, mask, out=piece)


def word_type(bits: int) -> np.dtype[np.unsignedinteger]:
    """Return the type of little-endian words of 8, 16 or 32 bits. Raises ValueError for other sizes."""
    if bits not in _DTYPES:
        raise ValueError(f"there are no masks of {bits} bits")
    return _DTYPES[bits]


def as_words(values: NDArray[np.integer], bits: int) -> Words:
    """Return integers modulo 2^bits, as little-endian words."""
    return (values.astype(np.int64) & ((1 << bits) - 1)).astype(word_type(bits))


def signed(words: Words) -> NDArray[np.int64]:
    """Return the integers from -2^(bits-1) to 2^(bits-1) - 1 that `as_words` made these of."""
    return words.view(np.dtype(f"<i{words.dtype.itemsize}")).astype(np.int64)


def lanes_of(words: Words, start: int = 0) -> Words:
    """Return 8 words: the sums modulo 2^bits over the positions k modulo 8, of a run that starts at `start`.

    The lanes of a fragment are the sum of its runs' lanes, as those of a sum of vectors are the sum of theirs.
    """
    lanes = np.zeros(LANES, words.dtype)
    for lane in range(LANES):
        lanes[(start + lane) % LANES] = words[lane::LANES].sum(dtype=words.dtype)
    return lanes
