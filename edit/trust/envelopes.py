"""Signed envelopes of DSSE 1.0.2 (github.com/secure-systems-lab/dsse): a payload of any type, and signatures of both.

What is signed is not the payload alone but the pre-authentication encoding of its type and its bytes, so no signature of an
envelope is one of anything else that the same key signs, such as the head of a log.
"""

from __future__ import annotations

import base64
import json

from edit.plain_text import parse_json
from edit.trust.checkpoints import LogSigner, NoteKey

__all__ = ["open_envelope", "pre_authentication_encoding", "signed_envelope"]


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return PAE(type, payload): `DSSEv1`, and each of both after its length in decimal digits, with single spaces."""
    kind = payload_type.encode()
    return b" ".join((b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload))


def signed_envelope(payload_type: str, payload: bytes, signer: LogSigner) -> bytes:
    """Return the envelope, JSON with a line end, signed with Ed25519. Its keyid, a hint only, is the key's name and id."""
    signature = signer.sign_bytes(pre_authentication_encoding(payload_type, payload))
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": [{"keyid": _key_id(signer.key), "sig": base64.b64encode(signature).decode()}],
    }
    return json.dumps(envelope, indent=2).encode() + b"\n"


def open_envelope(envelope: bytes, payload_type: str, key: NoteKey) -> bytes:
    """Return the payload of an envelope of this type that is signed with this key. Raises ValueError for any other."""
    try:
        values = parse_json(envelope)
        payload = base64.b64decode(values["payload"], validate=True)
        signatures = [base64.b64decode(each["sig"], validate=True) for each in values["signatures"]]
        kind = values["payloadType"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not an envelope of DSSE ({error!r})") from error
    if kind != payload_type:
        raise ValueError(f"the payload is of type {str(kind)[:80]!r}, not {payload_type}")
    signed = pre_authentication_encoding(payload_type, payload)
    if not any(key.verifies_bytes(signature, signed) for signature in signatures):
        raise ValueError(f"it is not signed with the key {_key_id(key)}")
    return payload


def _key_id(key: NoteKey) -> str:
    return f"{key.name}+{key.key_id.hex()}"
