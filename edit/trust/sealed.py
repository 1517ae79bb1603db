"""Secrets that only the holder of one ECDSA P-256 key can read, whoever carries them.

ECIES (SEC 1, 5.1): a key of its own for each text, ECDH with the reader's, HKDF-SHA256 over both public keys, AES-256-GCM. A
sealed text is the text's public key (uncompressed point, 65 bytes) and the box.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

__all__ = ["open_sealed", "seal_for"]

_POINT_BYTES = 65
_PURPOSE = b"edit sealed v1"
_NONCE = bytes(12)  # a key seals one text only


def seal_for(public_key: bytes, plain: bytes, context: bytes) -> bytes:
    """Return `plain` for the holder of a key, 81 bytes longer.

    Args:
        public_key: SubjectPublicKeyInfo, DER.
        context: what is sealed, and for whom: it opens with the same alone.

    Raises ValueError unless it is an ECDSA P-256 key.
    """
    try:
        reader = serialization.load_der_public_key(public_key)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError("not a public key") from error
    if not isinstance(reader, ec.EllipticCurvePublicKey) or not isinstance(reader.curve, ec.SECP256R1):
        raise ValueError("not an ECDSA P-256 key")
    own = ec.generate_private_key(ec.SECP256R1())
    point = _point(own.public_key())
    return point + _box(own, reader, point + _point(reader)).encrypt(_NONCE, plain, context)


def open_sealed(key: ec.EllipticCurvePrivateKey, sealed: bytes, context: bytes) -> bytes:
    """Return what `seal_for` was given. Raises ValueError when key, text or context is another."""
    point = sealed[:_POINT_BYTES]
    writer = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
    try:
        return _box(key, writer, point + _point(key.public_key())).decrypt(_NONCE, sealed[_POINT_BYTES:], context)
    except InvalidTag as error:
        raise ValueError("what was sealed does not open") from error


def _point(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)


def _box(own: ec.EllipticCurvePrivateKey, other: ec.EllipticCurvePublicKey, points: bytes) -> AESGCM:
    return AESGCM(HKDF(hashes.SHA256(), 32, points, _PURPOSE).derive(own.exchange(ec.ECDH(), other)))
