"""The Masking service of masking.proto: the keys of a masked round, its survivors, and what opens their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aggregator.control.run import Run
from aggregator.data.masked_rounds import MaskedRounds
from aggregator.security.certificates import public_hash
from aggregator.services.authorization import Authorizer
from edit.errors import RefusedError, StaleError
from edit.trust.mask_roster import Advert
from edit.trust.signatures import key_hash
from editpb import masking_pb2 as pb
from editpb.limits import MAX_COUNT, MAX_FRAGMENTS, check_id, within
from editpb.mask_messages import plan_to_pb, reply_to_pb, request_from_pb
from editpb.transport.abort_on_error import abort_on_error

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["MaskingService"]


class MaskingService:
    """Masking of masking.proto. Every call first authorizes its caller; an error that it raises is the status of the call."""

    def __init__(self, run: Run, authorizer: Authorizer) -> None:
        self._run, self._authorizer = run, authorizer

    async def Plan(self, request: pb.MaskPlanRequest, context: Context) -> pb.MaskPlan:
        """Return the plan of one fragment in the open round."""
        async with abort_on_error(context):
            with self._authorizer.admit(context, "peer"):
                self._run.check_run_id(check_id("run_id", request.run_id))
                round_id = within("round_id", request.round_id, 1, MAX_COUNT)
                fragment_id = within("fragment_id", request.fragment_id, 0, MAX_FRAGMENTS - 1)
                return plan_to_pb(await self._masked().plan_of(round_id, fragment_id))
        raise AssertionError("unreachable: abort raises")

    async def Tell(self, request: pb.MaskRequest, context: Context) -> pb.MaskReply:
        """Take what a peer says in a round; answer with what follows, or with nothing: not yet."""
        async with abort_on_error(context):
            with self._authorizer.admit(context, "peer") as identity:
                run_id, round_id, said = request_from_pb(request, identity.peer_id)
                self._run.check_run_id(run_id)
                self._run.check_consented(identity.peer_id)
                if isinstance(said, Advert):
                    certified = public_hash(self._authorizer.certificate(context))
                    if key_hash(said.public_key) != certified:
                        raise RefusedError(f"the advert of {identity.peer_id} has another key than its certificate")
                    if self._run.rounds.machine.quarantined_until(identity.peer_id) is not None:
                        raise StaleError(f"{identity.peer_id} is quarantined, and shares no keys")
                return reply_to_pb(await self._masked().tell(identity.peer_id, round_id, said))
        raise AssertionError("unreachable: abort raises")

    def _masked(self) -> MaskedRounds:
        masked = self._run.rounds.masked
        if masked is None:
            raise RefusedError("this run has no masks (secagg.enabled)")
        return masked
