"""Envelopes of DSSE: the encoding of the specification, and nothing that is signed otherwise opens."""

from __future__ import annotations

import base64
import json

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from edit.trust.checkpoints import LogSigner
from edit.trust.envelopes import open_envelope, pre_authentication_encoding, signed_envelope

SIGNER, OTHER = (LogSigner("edit/run", LogSigner.new_key()) for _ in range(2))
TYPE = "http://example.com/HelloWorld"


@pytest.mark.parametrize(
    ("kind", "payload", "encoded"),
    [
        (TYPE, b"hello world", b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"),  # of the specification
        ("", b"", b"DSSEv1 0  0 "),
        ("\u00e9", b"\xff\n", b"DSSEv1 2 \xc3\xa9 2 \xff\n"),
    ],
)
def test_the_encoding_is_that_of_the_specification(kind: str, payload: bytes, encoded: bytes) -> None:
    assert pre_authentication_encoding(kind, payload) == encoded


def test_an_envelope_opens_for_whoever_has_the_key_alone() -> None:
    envelope = signed_envelope(TYPE, b"hello", SIGNER)
    assert open_envelope(envelope, TYPE, SIGNER.key) == b"hello"
    public = load_pem_public_key(SIGNER.key.pem())
    assert isinstance(public, Ed25519PublicKey)
    signature = base64.b64decode(json.loads(envelope)["signatures"][0]["sig"])
    public.verify(signature, b"DSSEv1 29 http://example.com/HelloWorld 5 hello")
    with pytest.raises(InvalidSignature):
        public.verify(signature, b"hello")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"payload": base64.b64encode(b"hellO").decode()}, "is not signed with the key edit/run"),
        ({"payloadType": "text/plain"}, "the payload is of type 'text/plain'"),
        ({"signatures": []}, "is not signed with the key edit/run"),
        ({"signatures": [{"sig": "AA=="}]}, "is not signed with the key edit/run"),
        ({"signatures": 5}, "not an envelope of DSSE"),
        ({"payload": "%"}, "not an envelope of DSSE"),
    ],
)
def test_an_envelope_that_was_changed_does_not_open(changes: dict[str, object], why: str) -> None:
    envelope = json.dumps(json.loads(signed_envelope(TYPE, b"hello", SIGNER)) | changes).encode()
    with pytest.raises(ValueError, match=why):
        open_envelope(envelope, TYPE, SIGNER.key)
    with pytest.raises(ValueError, match="is not signed with the key edit/run"):
        open_envelope(signed_envelope(TYPE, b"hello", OTHER), TYPE, SIGNER.key)
