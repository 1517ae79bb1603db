"""What goes down before its commit is sealed: nobody can read it unless the commit comes and brings the key.

AES-256 in counter mode. Each round has a key, and each shard of a fragment one that is made from it, so no two byte strings
share a keystream. It hides the bytes and no more: TLS keeps them from being changed, and the digest of the commit says whether
they are the right ones.
"""

from __future__ import annotations

import secrets

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from edit.fragments.shards import Shard

__all__ = ["KEY_BYTES", "Seal", "new_key"]

KEY_BYTES = 32
_BLOCK = 16


def new_key() -> bytes:
    """Return a key for one round, 32 bytes."""
    return secrets.token_bytes(KEY_BYTES)


class Seal:
    """Seals the bytes of one shard of a fragment, in order; or opens them, which is the same.

    Args:
        key: of the round.
        shard: whose bytes they are.
        start: where in them the first byte stands that will be given.
    """

    def __init__(self, key: bytes, shard: Shard, start: int = 0) -> None:
        own = blake3(_name(shard).encode(), key=key).digest()
        self._cipher = Cipher(AES(own), CTR((start // _BLOCK).to_bytes(_BLOCK, "big"))).encryptor()
        self._cipher.update(bytes(start % _BLOCK))

    def __call__(self, data: bytes | memoryview) -> bytes:
        """Return the next bytes, sealed."""
        return self._cipher.update(data)

    def in_place(self, data: memoryview) -> None:
        """Seal or open the next bytes where they are."""
        self._cipher.update_into(data, data)


def _name(shard: Shard) -> str:
    boxes = () if shard.is_whole else shard.boxes
    return f"{shard.fragment.fragment_id}" + "".join(
        f"|{box.tensor}:{','.join(map(str, box.offsets))}:{','.join(map(str, box.sizes))}" for box in boxes
    )
