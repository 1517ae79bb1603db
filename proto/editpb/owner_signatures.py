"""The signature of an entry of a swarm's audit log by the member that owned the part, with the key of its certificate.

The statement ("edit-part-entry-v1") has the run's id and the canonical JSON of the whole entry but the signature. The entry has
its place in the log and the root of the tree of all entries before it: who signs one vouches for the log that it goes on from.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from edit.trust.canonical import canonical
from edit.trust.signatures import Signer, is_signed, statement

__all__ = ["check_owner", "signed_by_owner"]

_PURPOSE = "edit-part-entry-v1"


def signed_by_owner(run_id: str, entry: Mapping[str, Any], signer: Signer) -> bytes:
    """Return the line of an entry, without the line end, with the signer's public key and signature in it."""
    named = {**entry, "key": base64.b64encode(signer.public_key).decode()}
    signature = signer.sign(_statement(run_id, named))
    return canonical({**named, "signature": base64.b64encode(signature).decode()})


def check_owner(run_id: str, entry: Mapping[str, Any]) -> bytes:
    """Return the key (DER) in an entry, whose holder has signed it. Whose key it is, the caller must know otherwise.

    Raises ValueError where another has signed it; KeyError, TypeError for what is no entry.
    """
    key, signature = (base64.b64decode(entry[name], validate=True) for name in ("key", "signature"))
    rest = {name: each for name, each in entry.items() if name != "signature"}
    if not is_signed(key, signature, _statement(run_id, rest)):
        raise ValueError(f"it is not signed by {str(entry['owner'])[:64]}, who owned the part")
    return key


def _statement(run_id: str, entry: Mapping[str, Any]) -> bytes:
    return statement(_PURPOSE, (run_id, canonical(entry)))
