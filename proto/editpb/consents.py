"""A site's consent to the configuration of a run: what is signed, and whether it is.

The statement ("edit-consent-v1") has the run, the peer, the digest of the configuration as aggregators send it, and that of the
site's policy.toml; where the site says something of its data, that too. The peer's key signs it, as it does contributions.
"""

from __future__ import annotations

from edit.errors import RemoteProtocolError
from edit.trust.signatures import Signer, is_signed, statement
from editpb.messages import Consent, DataStatement

__all__ = ["check_consent", "consent_statement", "signed_consent"]

_PURPOSE = "edit-consent-v1"
_NOTHING = DataStatement()


def consent_statement(
    run_id: str, peer_id: str, config_digest: str, policy_digest: str, data: DataStatement = _NOTHING
) -> bytes:
    """Return what is signed. The digests are SHA-256, hex; policy_digest: empty where the site has no policy.toml."""
    said = (data.statement, data.manifest, data.licence) if data else ()
    return statement(_PURPOSE, (run_id, peer_id, config_digest, policy_digest, *said))


def signed_consent(
    run_id: str, peer_id: str, config_digest: str, policy_digest: str, signer: Signer, data: DataStatement = _NOTHING
) -> Consent:
    """Return the consent, signed."""
    signature = signer.sign(consent_statement(run_id, peer_id, config_digest, policy_digest, data))
    return Consent(config_digest, policy_digest, signer.public_key, signature, data)


def check_consent(consent: Consent, run_id: str, peer_id: str, config_digest: str) -> None:
    """Raise RemoteProtocolError unless it is to this configuration, and signed with the key that it names."""
    if consent.config_digest != config_digest:
        raise RemoteProtocolError(f"{peer_id} consents to another configuration than it was told")
    signed = consent_statement(run_id, peer_id, consent.config_digest, consent.policy_digest, consent.data)
    if not is_signed(consent.public_key, consent.signature, signed):
        raise RemoteProtocolError(f"the consent of {peer_id} is not signed with the key that it names")
