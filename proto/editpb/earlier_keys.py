"""The keys that a member had before its present one: what was signed with one of them is its own, too.

    earlier.pem    in the member's folder: the certificate of each earlier key, oldest first

Only the member itself writes it, when it joins with a new key, from its own peer.pem. So nobody else can make up a key of it.
"""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from edit.durable_files import write_atomic
from edit.errors import ConfigError, RefusedError
from edit.plain_text import reason_of
from editpb.identity import Identity, from_certificate

__all__ = ["earlier_keys", "keep_earlier", "public_key_of"]

_FILE = "earlier.pem"


def public_key_of(certificate: x509.Certificate) -> bytes:
    """Return the public key of a certificate (DER)."""
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    return certificate.public_key().public_bytes(serialization.Encoding.DER, spki)


def earlier_keys(home: Path, identity: Identity) -> tuple[bytes, ...]:
    """Return the earlier public keys (DER) of the member that has this folder, oldest first. Raises ConfigError for damage."""
    kept = _certificates(home)
    return tuple(public_key_of(each) for each in kept if from_certificate(each) == identity)


def keep_earlier(home: Path, identity: Identity, present: Path, new: x509.Certificate) -> None:
    """Keep the present certificate of a member, if the new one is for another key; call it before the new one is stored.

    present: the file; where it is missing or damaged, no earlier key is known. Raises ConfigError (see `earlier_keys`),
    StorageError.
    """
    try:
        before = x509.load_pem_x509_certificate(present.read_bytes())
        if from_certificate(before) != identity:
            return  # this folder was another member's
    except (OSError, ValueError, RefusedError):
        return
    kept = _certificates(home)
    if public_key_of(before) not in map(public_key_of, (*kept, new)):
        pem = (each.public_bytes(serialization.Encoding.PEM) for each in (*kept, before))
        write_atomic(home / _FILE, b"".join(pem))


def _certificates(home: Path) -> list[x509.Certificate]:
    path = home / _FILE
    try:
        data = path.read_bytes() if path.exists() else b""
        found = x509.load_pem_x509_certificates(data) if path.exists() else []
        for each in found:
            from_certificate(each)
        if len(found) != data.count(b"-----BEGIN"):  # of a torn one at the end nothing is said
            raise ValueError("a certificate is damaged")
        return found
    except (OSError, ValueError, RefusedError) as error:
        why = "without it, what this peer has signed with an earlier key is not known as its own"
        raise ConfigError(f"{path}: cannot be read ({reason_of(error)}); restore it from a copy; {why}") from error
