"""A dialled host proves its key to who dials, and to nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aggregator.security.certificates import key_pem, new_key
from edit.errors import RefusedError
from edit.trust.signatures import Signer, key_hash
from editpb.council_messages import NONCE_BYTES, Introduction
from editpb.introductions import check_proof, proven

SIGNER, OTHER = Signer(key_pem(new_key())), Signer(key_pem(new_key()))
CALLER, NONCE = key_hash(OTHER.public_key), b"n" * NONCE_BYTES
ASKED = Introduction("run", 7, nonce=NONCE)
ANSWER = proven(Introduction("run", 9), "b", ASKED, "a", CALLER, SIGNER)


def test_who_dials_learns_the_key() -> None:
    assert check_proof(ANSWER, "b", NONCE, "a", CALLER) == key_hash(SIGNER.public_key)


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        (replace(ANSWER, incarnation=8), ("b", NONCE, "a", CALLER)),
        (replace(ANSWER, run_id="another"), ("b", NONCE, "a", CALLER)),
        (replace(ANSWER, key=OTHER.public_key), ("b", NONCE, "a", CALLER)),
        (replace(ANSWER, key=b"", proof=b""), ("b", NONCE, "a", CALLER)),
        (ANSWER, ("c", NONCE, "a", CALLER)),
        (ANSWER, ("b", b"m" * NONCE_BYTES, "a", CALLER)),
        (ANSWER, ("b", NONCE, "c", CALLER)),
        (ANSWER, ("b", NONCE, "a", key_hash(SIGNER.public_key))),
        (proven(Introduction("run", 9), "b", Introduction("run", 7), "a", CALLER, SIGNER), ("b", b"", "a", CALLER)),
    ],
)
def test_anything_but_an_answer_to_this_caller_and_nonce_is_no_proof(
    answer: Introduction, asked: tuple[str, bytes, str, str]
) -> None:
    with pytest.raises(RefusedError, match="does not prove that it has its key"):
        check_proof(answer, *asked)
