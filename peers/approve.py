"""`edit-peer approve`: show an approver a changed configuration of the run, and sign the approval."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from edit.config.run import RunConfig
from edit.errors import ConfigError, OutdatedError, RefusedError, RemoteProtocolError
from edit.trust.signatures import Signer
from editpb import governance_pb2, governance_pb2_grpc
from editpb.approvals import ApprovalRules, governance_of, signed_approval, still_needed
from editpb.governance_messages import approval_to_pb, proposal_from_pb
from editpb.limits import check_text
from editpb.messages import Configuration, Proposal
from editpb.transport.status import from_rpc
from peers.carriers.hub.channels import first_answer
from peers.carriers.hub.kept_configuration import KeptConfiguration
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.policy import changes, digest_of

__all__ = ["Change", "approve", "ask_change"]

_ANSWER_S = 60.0  # the approval is written between two merges
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Change:
    """What an approver approves."""

    enrolled: Enrolment
    folder: PeerFolder
    proposal: Proposal

    @property
    def name(self) -> str:
        return self.enrolled.identity.peer_id

    @property
    def digest(self) -> str:
        """The digest of the changed configuration, with sha256: before it; '': none waits."""
        return digest_of(self.proposal.text) if self.proposal.text else ""

    @property
    def is_approver(self) -> bool:
        return self.name in governance_of(self.proposal.in_force.text).names

    def lines(self) -> list[str]:
        """Return what is shown."""
        identity, in_force = self.enrolled.identity, self.proposal.in_force
        governance = governance_of(in_force.text)
        found = [
            f"run {identity.run_id}, in which you are {identity.peer_id} ({identity.role})",
            f"coordinator {', '.join(self.enrolled.endpoints)}",
            f"in force: configuration {in_force.number}, {digest_of(in_force.text)}",
            f"its approvers: {', '.join(governance.names) or 'none'}; a change needs {governance.needed} of them",
        ]
        if not self.proposal.text:
            return [*found, "no changed configuration waits for approvals"]
        names, faults = self._approved()
        missing = still_needed(in_force, self.proposal.text, names)
        return [
            *found,
            "",
            f"waits for {missing} more: configuration {in_force.number + 1}, {self.digest}",
            f"approved by {', '.join(sorted(names)) or 'nobody yet'}",
            *(f"does not count: {fault}" for fault in faults),
            "",
            "what changes:",
            *(f"  {change}" for change in changes(*map(_settings, (in_force.text, self.proposal.text)))),
        ]

    def _approved(self) -> tuple[tuple[str, ...], list[str]]:
        authorities = x509.load_pem_x509_certificates(self.enrolled.authority)
        rules = ApprovalRules(self.enrolled.run_id, authorities)
        after = Configuration(self.proposal.in_force.number + 1, self.proposal.text)
        return rules.approvers(self.proposal.approvals, self.proposal.in_force, after.digest)


def _settings(text: str) -> str:
    """Return every setting as JSON, also those that the text leaves out. Raises ConfigError for one of another version."""
    return json.dumps(dataclasses.asdict(RunConfig.from_json(text)), default=str)


def ask_change(home: Path, now: float) -> Change:
    """Ask the run's coordinator what waits for approvals. now: unix seconds.

    What is in force is held to what this folder knows of earlier calls, or as a peer's: a change since then must have had its
    approvals. Raises ConfigError, RefusedError, TransportError.
    """
    folder = PeerFolder(home)
    enrolled = folder.load(now)
    kept = KeptConfiguration.open(home, enrolled.run_id, enrolled.authority)
    request = governance_pb2.ProposalRequest(configuration=kept.number)
    proposal = proposal_from_pb(_ask(enrolled, lambda stub: stub.Proposal(request, timeout=_ANSWER_S)))
    kept.check(proposal.in_force, proposal.changes)
    if proposal.text:  # before there is an audit log nothing is in force
        kept.keep(proposal.in_force)
    return Change(enrolled, folder, proposal)


def approve(change: Change) -> str:
    """Sign the change and send the approval; return in words what is still waited for. It is in the audit log then.

    Raises ConfigError where nothing waits, or another change by now; RefusedError for who is no approver, TransportError.
    """
    if not change.proposal.text:
        raise ConfigError("no changed configuration waits for approvals")
    if not change.is_approver:
        names = ", ".join(governance_of(change.proposal.in_force.text).names)
        raise RefusedError(f"{change.name} is no approver of this run (governance.approvers: {names})")
    enrolled = change.enrolled
    certificate = x509.load_pem_x509_certificate(enrolled.certificate).public_bytes(Encoding.DER)
    signer, digest = Signer(change.folder.key()), change.digest.removeprefix("sha256:")
    approval = signed_approval(enrolled.identity, certificate, signer, change.proposal.in_force, digest)
    message = approval_to_pb(approval)
    try:
        reply = _ask(enrolled, lambda stub: stub.Approve(message, timeout=_ANSWER_S))
    except OutdatedError as error:
        raise ConfigError(f"{error}; call edit-peer approve again to look at it") from error
    return check_text("standing", reply.standing)


def _ask(enrolled: Enrolment, call: Callable[[Any], Awaitable[_T]]) -> _T:
    """Call the coordinator, at each of its addresses until one answers. Raises EditError."""

    async def over(channel: grpc.aio.Channel) -> _T:
        try:
            return await call(governance_pb2_grpc.GovernanceStub(channel))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise RemoteProtocolError("its software is too old for approvals") from error
            raise from_rpc(error) from error

    return first_answer(enrolled.endpoints, enrolled.credentials, over, lambda endpoint: f"the coordinator at {endpoint}")
