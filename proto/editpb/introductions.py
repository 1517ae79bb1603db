"""How a host that is dialled proves its key: gRPC shows a client no certificate, and a name may have been enrolled for several.

It signs whom it answers, and for which nonce. The key of who dials is that of the connection: so a machine that gets a proof
as a caller can show it to nobody else.
"""

from __future__ import annotations

from dataclasses import replace

from edit.errors import RefusedError
from edit.trust.signatures import Signer, is_signed, key_hash, statement
from editpb.council_messages import NONCE_BYTES, Introduction

__all__ = ["check_proof", "proven"]

_PURPOSE = "edit-introduction-v1"


def proven(own: Introduction, peer_id: str, asked: Introduction, caller: str, caller_key: str, signer: Signer) -> Introduction:
    """Return the introduction with which a dialled host answers.

    Args:
        own: its introduction; peer_id: and its name.
        asked: that of who dials; caller: its name; caller_key: SHA-256 (hex) of the public key that its connection showed.
    """
    answer = replace(own, key=signer.public_key)
    return replace(answer, proof=signer.sign(_signed(answer, peer_id, asked.nonce, caller, caller_key)))


def check_proof(answer: Introduction, peer_id: str, nonce: bytes, caller: str, caller_key: str) -> str:
    """Return SHA-256 (hex) of the public key that a dialled host has. Raises RefusedError for anything but a proof.

    Args:
        answer: its introduction; peer_id: who it should be.
        nonce: that it was sent; caller, caller_key: who dialled, as in `proven`.
    """
    if len(nonce) != NONCE_BYTES or not is_signed(
        answer.key, answer.proof, _signed(answer, peer_id, nonce, caller, caller_key)
    ):
        raise RefusedError(f"{peer_id} does not prove that it has its key")
    return key_hash(answer.key)


def _signed(answer: Introduction, peer_id: str, nonce: bytes, caller: str, caller_key: str) -> bytes:
    fields = (answer.run_id, peer_id, answer.incarnation, answer.key, caller, bytes.fromhex(caller_key), nonce)
    return statement(_PURPOSE, fields)
