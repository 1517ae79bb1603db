"""Signatures that another one can check, and nothing else passes for."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given
from hypothesis import strategies as st

from edit.errors import ConfigError
from edit.trust.signatures import SIGNATURE_BYTES, Signer, is_signed, key_hash, statement


def pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())


SIGNER = Signer(pem(ec.derive_private_key(7, ec.SECP256R1())))
SIGNED = statement("edit-test-v1", ["run", 3, b"\x00\x01"])
PARTS = st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=5), st.integers(0, 2**63)), max_size=4)


def test_a_statement_is_laid_out_as_specified() -> None:
    assert SIGNED == b"\0\0\0\x0cedit-test-v1\0\0\0\x03run\0\0\0\x013\0\0\0\x02\x00\x01"


@given(PARTS, PARTS)
def test_fields_cannot_run_into_one_another(one: list[bytes | str | int], other: list[bytes | str | int]) -> None:
    plain = [[part if isinstance(part, bytes) else str(part).encode() for part in each] for each in (one, other)]
    assert (statement("p", one) == statement("p", other)) == (plain[0] == plain[1])


def test_who_has_the_public_key_can_check_a_signature() -> None:
    signature = SIGNER.sign(SIGNED)
    assert len(signature) == SIGNATURE_BYTES and is_signed(SIGNER.public_key, signature, SIGNED)
    assert key_hash(SIGNER.public_key) == hashlib.sha256(SIGNER.public_key).hexdigest()


@given(st.integers(0, 8 * SIGNATURE_BYTES - 1))
def test_one_flipped_bit_is_no_signature(bit: int) -> None:
    signature = bytearray(SIGNER.sign(SIGNED))
    signature[bit // 8] ^= 1 << bit % 8
    assert not is_signed(SIGNER.public_key, bytes(signature), SIGNED)


def test_what_else_is_no_signature() -> None:
    signature, other = SIGNER.sign(SIGNED), Signer(pem(ec.generate_private_key(ec.SECP256R1())))
    assert not is_signed(other.public_key, signature, SIGNED)
    assert not is_signed(SIGNER.public_key, signature, statement("edit-test-v2", ["run", 3, b"\x00\x01"]))
    for wrong in (b"", bytes(SIGNATURE_BYTES), signature[:-1], signature + b"\0"):
        assert not is_signed(SIGNER.public_key, wrong, SIGNED)


@pytest.mark.parametrize("curve", [ec.SECP384R1(), None])
def test_only_keys_of_p_256_count(curve: ec.EllipticCurve | None) -> None:
    key = ec.generate_private_key(curve) if curve is not None else ed25519.Ed25519PrivateKey.generate()
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(encoding, form)
    for wrong in (public, b"", b"\x30", bytes(91), SIGNER.public_key + bytes(200)):
        assert not is_signed(wrong, SIGNER.sign(SIGNED), SIGNED)
    with pytest.raises(ConfigError, match=r"not ECDSA P-256"):
        Signer(pem(key))
    with pytest.raises(ConfigError, match="cannot be read"):
        Signer(b"no key")


def test_a_signature_is_that_of_rfc_6979() -> None:
    """Appendix A.2.5, SHA-256, message "sample"."""
    number = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
    key = ec.derive_private_key(number, ec.SECP256R1())
    r = "EFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716"
    s = "F7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8"
    assert Signer(pem(key)).sign(b"sample").hex().upper() == r + s
