"""What is sealed for a key opens with that key, and the same context, alone."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from edit.trust.sealed import seal_for
from edit.trust.signatures import Signer


def signer() -> Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    return Signer(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@pytest.mark.parametrize("plain", [b"", b"a secret", bytes(5000)])
def test_the_holder_of_the_key_reads_it(plain: bytes) -> None:
    reader = signer()
    sealed = seal_for(reader.public_key, plain, b"for b")
    assert len(sealed) == len(plain) + 81 and sealed != seal_for(reader.public_key, plain, b"for b")
    assert reader.open_sealed(sealed, b"for b") == plain


def test_nobody_else_reads_it_and_nothing_else_opens() -> None:
    reader = signer()
    sealed = seal_for(reader.public_key, b"a secret", b"for b")
    wrong = [sealed[:n] for n in (0, 64, 65, len(sealed) - 1)] + [bytes(len(sealed)), sealed + b"x"]
    wrong += [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in (0, 1, 40, 64, 65, len(sealed) - 1)]
    for each in wrong:
        with pytest.raises(ValueError):
            reader.open_sealed(each, b"for b")
    with pytest.raises(ValueError):
        reader.open_sealed(sealed, b"for c")
    with pytest.raises(ValueError):
        signer().open_sealed(sealed, b"for b")


def test_only_keys_that_members_have_can_be_sealed_for() -> None:
    other_curve = ec.generate_private_key(ec.SECP384R1()).public_key()
    other_kind = ed25519.Ed25519PrivateKey.generate().public_key()
    encoded = [each.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for each in (other_curve, other_kind)]
    for wrong in (*encoded, b"", b"x" * 100):
        with pytest.raises(ValueError):
            seal_for(wrong, b"a secret", b"")
