"""Approvers of a run's configuration, with certificates of its authority, and what they sign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from aggregator.security.certificates import Issuer, key_pem, make_ca, new_key
from edit.config.run import RunConfig
from edit.trust.signatures import Signer
from editpb.approvals import signed_approval
from editpb.identity import Identity
from editpb.messages import Approval, Configuration

RUN = "run1"
GOVERNED: Mapping[str, Any] = {
    "audit": {"enabled": True},
    "governance": {"approvers": ["ann", "bob", "cyd"], "needed": 2},
}


def authority(run_id: str = RUN) -> Issuer:
    return Issuer(*make_ca(run_id, 1e9))


@dataclass(frozen=True)
class Approver:
    """One approver, with a key and a certificate."""

    identity: Identity
    signer: Signer
    certificate: bytes  # DER

    @classmethod
    def of(cls, issuer: Issuer, name: str, *, role: str = "observer", run_id: str = RUN) -> Approver:
        key, identity = new_key(), Identity(run_id, role, name)
        certificate = issuer.issue(identity, key.public_key(), lifetime_s=1e6, now=1e9)
        return cls(identity, Signer(key_pem(key)), certificate.public_bytes(Encoding.DER))

    def approves(self, before: Configuration, after: Configuration) -> Approval:
        return signed_approval(self.identity, self.certificate, self.signer, before, after.digest)


def configuration(number: int, /, **sections: Mapping[str, Any]) -> Configuration:
    return Configuration(number, RunConfig.from_mapping({**GOVERNED, **sections}).to_json())
