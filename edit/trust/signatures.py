"""ECDSA P-256 signatures over statements: a purpose, and fields that cannot run into one another.

A statement is `purpose` and each field, every one after its length as four bytes (big-endian). The purpose keeps a signature of
one kind from being taken for one of another, though the same key signs (that of a member's certificate, in TLS, too). A
signature is r and s, 32 bytes each, big-endian, deterministic as in RFC 6979 where OpenSSL can do that (3.2 and later).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from edit.errors import ConfigError
from edit.trust.sealed import open_sealed

__all__ = ["ECDSA_SHA256", "MOST_KEY_BYTES", "SIGNATURE_BYTES", "Signer", "is_signed", "key_hash", "statement"]

SIGNATURE_BYTES = 64
MOST_KEY_BYTES = 256  # of a public key, as SubjectPublicKeyInfo in DER
_HALF = SIGNATURE_BYTES // 2
_KEYS = 1024  # public keys that are kept parsed


def _ecdsa() -> ec.ECDSA:
    try:
        return ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
    except UnsupportedAlgorithm:
        return ec.ECDSA(hashes.SHA256())


ECDSA_SHA256 = _ecdsa()  # to sign, and to verify: that is the same for both kinds


def statement(purpose: str, fields: Iterable[bytes | str | int]) -> bytes:
    """Return the bytes that are signed. An int counts as its decimal digits."""
    parts = (purpose, *fields)
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)


def key_hash(public_key: bytes) -> str:
    """Return SHA-256 (hex) of a public key (SubjectPublicKeyInfo, DER): what a record of members pins."""
    return hashlib.sha256(public_key).hexdigest()


class Signer:
    """Signs with a private key. Raises ConfigError unless `pem` is an unencrypted ECDSA P-256 key."""

    def __init__(self, pem: bytes) -> None:
        try:
            key = serialization.load_pem_private_key(pem, None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError("the key that signs contributions cannot be read") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ConfigError("the key that signs contributions is not ECDSA P-256")
        self._key = key
        encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        self.public_key = key.public_key().public_bytes(encoding, form)

    def sign(self, signed: bytes) -> bytes:
        """Return the signature of a statement: the same each time, where OpenSSL signs deterministically."""
        r, s = decode_dss_signature(self._key.sign(signed, ECDSA_SHA256))
        return r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big")

    def open_sealed(self, sealed: bytes, context: bytes) -> bytes:
        """Return what was sealed for this key, see `edit.trust.sealed`. Raises ValueError for anything else."""
        return open_sealed(self._key, sealed, context)


def is_signed(public_key: bytes, signature: bytes, signed: bytes) -> bool:
    """Return whether the holder of this key (DER) signed a statement. Anything that is no key or no signature is no."""
    key = _parsed(public_key) if len(public_key) <= MOST_KEY_BYTES else None
    if key is None or len(signature) != SIGNATURE_BYTES:
        return False
    r, s = (int.from_bytes(half, "big") for half in (signature[:_HALF], signature[_HALF:]))
    try:
        key.verify(encode_dss_signature(r, s), signed, ECDSA_SHA256)
    except InvalidSignature:
        return False
    return True


@lru_cache(_KEYS)
def _parsed(public_key: bytes) -> ec.EllipticCurvePublicKey | None:
    try:
        key = serialization.load_der_public_key(public_key)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    right = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    return key if right else None  # type: ignore[return-value]
