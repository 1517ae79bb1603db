"""The Governance service of governance.proto: the configuration that waits for approvals, and the approvals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aggregator.control.run import Run
from aggregator.security.certificates import certified_key
from aggregator.services.authorization import Authorizer
from editpb import governance_pb2 as pb
from editpb.governance_messages import approval_from_pb, proposal_to_pb
from editpb.identity import INVITED
from editpb.limits import MAX_COUNT, one_line, within
from editpb.transport.abort_on_error import abort_on_error

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["GovernanceService"]


class GovernanceService:
    """Governance of governance.proto. Every call first authorizes its caller; an error is the status of the call."""

    def __init__(self, run: Run, authorizer: Authorizer) -> None:
        self._run, self._authorizer = run, authorizer

    async def Proposal(self, request: pb.ProposalRequest, context: Context) -> pb.ProposalReply:
        """Return the configuration that waits for approvals, beside the one in force."""
        async with abort_on_error(context):
            self._authorizer.authorize(context, *INVITED)
            known = within("configuration", request.configuration, 0, MAX_COUNT)
            return proposal_to_pb(self._run.proposal(known))
        raise AssertionError("unreachable: abort raises")

    async def Approve(self, request: pb.Approval, context: Context) -> pb.ApproveReply:
        """Take an approval; answer once it is in the audit log."""
        async with abort_on_error(context):
            identity = self._authorizer.authorize(context, *INVITED)
            approval = approval_from_pb(request)
            certified = certified_key(self._authorizer.certificate(context))
            return pb.ApproveReply(standing=one_line(await self._run.approve(identity.peer_id, certified, approval)))
        raise AssertionError("unreachable: abort raises")
