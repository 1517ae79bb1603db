"""Converts the messages of governance.proto to and from records. Bounds and validates everything that arrives.

Whether an approval is signed is not looked at here: `editpb.approvals` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from edit.trust.signatures import SIGNATURE_BYTES
from editpb import governance_pb2 as gpb
from editpb import limits as lim
from editpb.identity import MAX_CERTIFICATE_BYTES
from editpb.limits import at_most, check_digest, check_text, fail, within
from editpb.messages import Approval, ConfigChange, Configuration, Proposal

__all__ = [
    "approval_from_pb",
    "approval_to_pb",
    "change_to_pb",
    "changes_from_pb",
    "proposal_from_pb",
    "proposal_to_pb",
]


def approval_to_pb(approval: Approval) -> gpb.Approval:
    """Encode an approval."""
    return gpb.Approval(
        config_digest=approval.config_digest,
        before_digest=approval.before_digest,
        number=approval.number,
        certificate=approval.certificate,
        signature=approval.signature,
    )


def approval_from_pb(message: gpb.Approval) -> Approval:
    """Decode an approval."""
    lengths = len(message.certificate), len(message.signature)
    if not 0 < lengths[0] <= MAX_CERTIFICATE_BYTES or lengths[1] != SIGNATURE_BYTES:
        fail(f"an approval has a certificate of {lengths[0]} and a signature of {lengths[1]} bytes")
    return Approval(
        config_digest=check_digest("config_digest", message.config_digest),
        before_digest=check_digest("before_digest", message.before_digest),
        number=within("number", message.number, 2, lim.MAX_COUNT),
        certificate=message.certificate,
        signature=message.signature,
    )


def _approvals_from_pb(messages: Sequence[gpb.Approval]) -> tuple[Approval, ...]:
    at_most("approvals", messages, lim.MAX_APPROVALS)
    return tuple(map(approval_from_pb, messages))


def change_to_pb(change: ConfigChange) -> gpb.ConfigChange:
    """Encode a change of the configuration."""
    approvals = map(approval_to_pb, change.approvals)
    return gpb.ConfigChange(number=change.to.number, config_json=change.to.text, approvals=approvals)


def changes_from_pb(messages: Sequence[gpb.ConfigChange]) -> tuple[ConfigChange, ...]:
    """Decode changes of the configuration, which are bounded; `RunConfig.from_json` validates each."""
    at_most("changes of the configuration", messages, lim.MAX_CHANGES)
    return tuple(_change_from_pb(message) for message in messages)


def _change_from_pb(message: gpb.ConfigChange) -> ConfigChange:
    number = within("number", message.number, 2, lim.MAX_COUNT)
    text = check_text("config_json", message.config_json, lim.MAX_CONFIG_CHARS)
    return ConfigChange(Configuration(number, text), _approvals_from_pb(message.approvals))


def proposal_to_pb(proposal: Proposal) -> gpb.ProposalReply:
    """Encode what waits for approvals."""
    return gpb.ProposalReply(
        configuration=proposal.in_force.number,
        config_json=proposal.in_force.text,
        changes=map(change_to_pb, proposal.changes),
        proposed_json=proposal.text,
        approvals=map(approval_to_pb, proposal.approvals),
    )


def proposal_from_pb(message: gpb.ProposalReply) -> Proposal:
    """Decode what waits for approvals."""
    number = within("configuration", message.configuration, 1, lim.MAX_COUNT)
    return Proposal(
        in_force=Configuration(number, check_text("config_json", message.config_json, lim.MAX_CONFIG_CHARS)),
        changes=changes_from_pb(message.changes),
        text=check_text("proposed_json", message.proposed_json, lim.MAX_CONFIG_CHARS),
        approvals=_approvals_from_pb(message.approvals),
    )
