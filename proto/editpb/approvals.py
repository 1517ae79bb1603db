"""Approvals of a changed configuration: what is signed, which ones count, and whether a change has enough of them.

The statement ("edit-approval-v1") has the run, the approver, the digests of the configuration in force and of the changed one,
and the number of the changed one. The number grows with each change, so an approval counts once, for one change of one run.
Who may approve, and how many must, the configuration in force says (`[governance]`): also for a change of that section.

Coordinator, peers, and whoever verifies an audit log look at a change by the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edit.config.governance import GovernanceConfig
from edit.config.run import RunConfig
from edit.config.validation import build
from edit.errors import ConfigError, RefusedError, RemoteProtocolError
from edit.plain_text import parse_json
from edit.trust.signatures import Signer, is_signed, key_hash, statement
from editpb.identity import INVITED, Identity, from_certificate, is_signed_by
from editpb.messages import Approval, ConfigChange, Configuration

__all__ = [
    "ApprovalRules",
    "approval_key",
    "approval_of",
    "check_changes",
    "governance_of",
    "same_settings",
    "signed_approval",
    "still_needed",
]

_PURPOSE = "edit-approval-v1"
_MOST_NAMED = 3  # approvals that do not count, in a message


def governance_of(text: str) -> GovernanceConfig:
    """Return the section [governance] of a configuration as it is sent, also of one with settings of other versions.

    Raises ConfigError where that section is none.
    """
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"a configuration is not JSON: {error}") from error
    section = values.get("governance", {}) if isinstance(values, dict) else None
    if not isinstance(section, Mapping):
        raise ConfigError("a configuration has a section governance that is no table")
    return build(GovernanceConfig, section, "governance.")


def approval_of(approval: Approval) -> tuple[Identity, bytes]:
    """Return whom the certificate of an approval names, and its public key (DER). Raises RemoteProtocolError."""
    try:
        certificate = x509.load_der_x509_certificate(approval.certificate)
        key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return from_certificate(certificate), key
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise RemoteProtocolError("an approval brings a certificate that cannot be read") from error
    except RefusedError as error:
        raise RemoteProtocolError(f"an approval: {error}") from error


def approval_key(approval: Approval) -> bytes:
    """Return the public key (DER) that an approval is signed with. Raises RemoteProtocolError."""
    return approval_of(approval)[1]


def signed_approval(
    identity: Identity, certificate: bytes, signer: Signer, before: Configuration, config_digest: str
) -> Approval:
    """Return an approver's approval, signed. certificate: of its key, DER. config_digest: of the changed configuration."""
    number = before.number + 1
    signed = _statement(identity.run_id, identity.peer_id, number, before.digest, config_digest)
    return Approval(config_digest, before.digest, number, certificate, signer.sign(signed))


def _statement(run_id: str, approver: str, number: int, before: str, after: str) -> bytes:
    return statement(_PURPOSE, (run_id, approver, number, before, after))


class ApprovalRules:
    """Which approvals count in a run.

    Args:
        authorities: those that sign the certificates of its members; empty: whoever signed a certificate, it counts, which is
            for those who do not know the authority.
        known: hashes of the public keys of members, by name, earlier ones, too, where they are known otherwise; None: of none.
    """

    def __init__(
        self, run_id: str, authorities: Collection[x509.Certificate] = (), known: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        self.run_id, self._authorities, self._known = run_id, tuple(authorities), known or {}

    def check(self, approval: Approval, before: Configuration, config_digest: str) -> str:
        """Return the name of the approver. Raises RemoteProtocolError, which names it and why the approval does not count.

        Args:
            before: the configuration in force.
            config_digest: of the changed one.
        """
        identity, key = approval_of(approval)
        name, governance = identity.peer_id, governance_of(before.text)
        if identity.run_id != self.run_id:
            raise RemoteProtocolError(f"the approval of {name} is for run {identity.run_id}, not {self.run_id}")
        if name not in governance.names or identity.role not in INVITED:
            raise RemoteProtocolError(f"{name} is no approver of configuration {before.number} (governance.approvers)")
        if self._authorities:
            certificate = x509.load_der_x509_certificate(approval.certificate)
            if not any(is_signed_by(certificate, each) for each in self._authorities):
                raise RemoteProtocolError(f"the certificate of {name} is not signed by the run's authority")
        pinned = {peer: (pin,) for peer, pin in governance.keys.items()}
        for keys, where in ((pinned, "governance.approvers names"), (self._known, "is known here")):
            if name in keys and key_hash(key) not in keys[name]:
                raise RemoteProtocolError(f"the approval of {name} is by another key than {where}")
        if approval.config_digest != config_digest:
            raise RemoteProtocolError(f"{name} approves another configuration, sha256:{approval.config_digest}")
        if (approval.number, approval.before_digest) != (before.number + 1, before.digest):
            raise RemoteProtocolError(
                f"{name} approves it as configuration {approval.number} after sha256:{approval.before_digest}, "
                "which is another change"
            )
        signed = _statement(self.run_id, name, approval.number, approval.before_digest, approval.config_digest)
        if not is_signed(key, approval.signature, signed):
            raise RemoteProtocolError(f"the approval of {name} is not signed with the key of its certificate")
        return name

    def approvers(
        self, approvals: Sequence[Approval], before: Configuration, config_digest: str
    ) -> tuple[tuple[str, ...], list[str]]:
        """Return who has approved a change, and why each other approval does not count."""
        names, faults = dict[str, None](), list[str]()
        for approval in approvals:
            try:
                name = self.check(approval, before, config_digest)
            except RemoteProtocolError as error:
                faults.append(str(error))
                continue
            if name in names:
                faults.append(f"{name} approves twice")
            names[name] = None
        return tuple(names), faults

    def check_change(self, before: Configuration, change: ConfigChange) -> tuple[str, ...]:
        """Return who has approved a change. Raises RefusedError where it needs more; it names those that do not count."""
        after = change.to
        if (least := still_needed(before, after.text, ())) == 0:
            return ()
        names, faults = self.approvers(change.approvals, before, after.digest)
        if len(names) < least:
            of = f" ({', '.join(sorted(names))})" if names else ""
            more = f"; and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
            why = "".join(f"; {fault}" for fault in faults[:_MOST_NAMED]) + more
            raise RefusedError(
                f"configuration {after.number}, sha256:{after.digest}, has {len(names)}{of} of the {least} approvals that "
                f"configuration {before.number} asks for (governance.needed){why}"
            )
        return names


def still_needed(before: Configuration, after: str, names: Collection[str]) -> int:
    """Return how many more approvals a change needs. after: the changed configuration. names: who has approved it."""
    governance = governance_of(before.text)
    if not governance.enabled or same_settings(before.text, after):
        return 0
    return max(0, governance.needed - len(names))


def same_settings(before: str, after: str) -> bool:
    """Return whether two configurations have the same settings, though versions of the software wrote them otherwise."""
    if before == after:
        return True
    try:
        return RunConfig.from_json(before) == RunConfig.from_json(after)
    except ConfigError:
        return False


def check_changes(
    rules: ApprovalRules, known: Configuration, told: Configuration, changes: Sequence[ConfigChange]
) -> tuple[str, ...]:
    """Check that the configuration that a coordinator tells follows from a known one; return who approved the last change.

    Args:
        known: under which this peer took part.
        changes: what the coordinator says of those since; earlier ones count for nothing. One that was taken back, too, so that
            nobody who verified that takes the configuration between for a later one.

    Raises RefusedError in one line.
    """
    if not governance_of(known.text).enabled or (told.number <= known.number and same_settings(known.text, told.text)):
        return ()
    ours = f"configuration {known.number}, sha256:{known.digest}"
    if told.number <= known.number:
        raise RefusedError(
            f"the coordinator tells configuration {told.number or 'without a number'}, sha256:{told.digest}, and this peer "
            f"took part under {ours}: nothing is said of a change, which needs approvals. If the operator has begun the audit "
            "log anew, and you accept that, move configuration.json in this peer's folder away"
        )
    before, names = known, tuple[str, ...]()
    for change in changes:
        if change.to.number <= known.number:
            continue
        if change.to.number != before.number + 1:
            break
        names, before = rules.check_change(before, change), change.to
    if before != told:
        missing = "; its approvals are missing" if before.number == told.number - 1 else ""
        raise RefusedError(
            f"the coordinator tells configuration {told.number}, sha256:{told.digest}, and does not say how it followed from "
            f"configuration {before.number}, sha256:{before.digest}{missing}"
        )
    return names
