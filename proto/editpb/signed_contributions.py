"""The signature of a contribution: who contributed which bytes to what, provable to somebody else than who received them.

The statement ("edit-contribution-v1") has the digest of the run's configuration and every field of the header but the
signature, of the boxes a hash; the header has the BLAKE3 of the payload. So a signature counts for one run, model, round, outer
step, fragment, shard and payload. Round ids never come twice in a run. Of a header with the head of the audit log that its
signer has seen, the statement ("edit-contribution-v2") ends with that: size, root, the log's signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from blake3 import blake3

from edit.config.run import RunConfig
from edit.errors import RemoteProtocolError
from edit.trust.signatures import Signer, is_signed, statement
from editpb.messages import ContributionHeader, SeenHead

__all__ = [
    "ContributionSigner",
    "boxes_digest",
    "check_payload",
    "check_signature",
    "config_digest",
    "contribution_statement",
    "signs",
    "verified_by_others",
]

_PURPOSE, _PURPOSE_SEEN = "edit-contribution-v1", "edit-contribution-v2"


def signs(config: RunConfig) -> bool:
    """Return whether the contributions of a run are signed."""
    return config.audit.enabled or verified_by_others(config)


def verified_by_others(config: RunConfig) -> bool:
    """Return whether other members of a swarm merge the same contributions once more."""
    return config.swarm is not None and config.swarm.verify > 0


def config_digest(config: RunConfig) -> str:
    """Return SHA-256 (hex) of the configuration, as peers receive it."""
    return hashlib.sha256(config.to_json().encode()).hexdigest()


def contribution_statement(header: ContributionHeader, config: str, boxes: str | None = None) -> bytes:
    """Return what is signed.

    Args:
        config: `config_digest`.
        boxes: `boxes_digest` of the header's; None: they are in the header.
    """
    signed = (config, *_fields_of(header, boxes if boxes is not None else boxes_digest(header)))
    if (seen := header.seen) is None:
        return statement(_PURPOSE, signed)
    return statement(_PURPOSE_SEEN, (*signed, seen.size, seen.root, seen.signature))


def boxes_digest(header: ContributionHeader) -> str:
    """Return what is signed of a header's boxes: "whole", or SHA-256 (hex) of the statement of them."""
    if header.boxes is None:
        return "whole"
    each = (f"{box.tensor}:{','.join(map(str, box.offsets))}:{','.join(map(str, box.sizes))}" for box in header.boxes)
    return hashlib.sha256(statement("boxes", each)).hexdigest()


_NAMES = tuple(field.name for field in fields(ContributionHeader) if field.name not in ("signature", "seen"))


def _fields_of(header: ContributionHeader, boxes: str) -> Iterator[bytes | str | int]:
    for name in _NAMES:
        if name != "norm":
            yield boxes if name == "boxes" else getattr(header, name)
        elif header.norm is not None:  # without masks a statement is as it was before there were any
            yield header.norm.hex()


class ContributionSigner:
    """Signs the headers of a peer. Raises ConfigError for a key that cannot be used.

    Args:
        pem: the private key of the peer's certificate.
        config: of the run.
        seen: returns the newest head of the audit log that the peer has seen; None: none.
    """

    def __init__(self, pem: bytes, config: RunConfig, seen: Callable[[], SeenHead | None] = lambda: None) -> None:
        self._signer, self._config, self._seen = Signer(pem), config_digest(config), seen

    def __call__(self, header: ContributionHeader, data: memoryview) -> ContributionHeader:
        """Return the header with the payload's hash, the public key, the head that was seen, and the signature."""
        digest, key = blake3(data).digest(), self._signer.public_key
        named = replace(header, payload_blake3=digest, public_key=key, seen=self._seen())
        return replace(named, signature=self._signer.sign(contribution_statement(named, self._config)))


def check_signature(header: ContributionHeader, config: str) -> None:
    """Raise RemoteProtocolError, which names the peer, unless the holder of the header's key has signed it.

    Whose key that is, the caller knows: see `edit.trust.signatures.key_hash`.
    """
    if not header.signature:
        raise RemoteProtocolError(f"{_who(header)} is not signed, which the run asks for")
    if not is_signed(header.public_key, header.signature, contribution_statement(header, config)):
        raise RemoteProtocolError(f"{_who(header)}: the signature is not of what the header says")


def check_payload(header: ContributionHeader, data: bytes | bytearray | memoryview) -> None:
    """Raise RemoteProtocolError, which names the peer, unless these are the bytes that a signed header is of."""
    if header.payload_blake3 and blake3(data).digest() != header.payload_blake3:
        raise RemoteProtocolError(f"{_who(header)}: the bytes are not those that it signed")


def _who(header: ContributionHeader) -> str:
    return f"contribution of {header.peer_id} to round {header.round_id}, fragment {header.fragment_id}, rank {header.rank}"
