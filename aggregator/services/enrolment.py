"""The Enrolment service of enrolment.proto: an invitation and a certificate request in, a certificate out.

Who calls has no certificate yet, so TLS authenticates the server only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import grpc

from aggregator.run_feed import MemberEnrolled, RunFeed
from aggregator.security.authority import Authority
from edit.errors import EditError, RemoteProtocolError
from editpb import enrolment_pb2 as pb
from editpb.status import to_status

__all__ = ["EnrolmentService"]

MAX_TOKEN_CHARS = 64
_log = logging.getLogger(__name__)


class EnrolmentService:
    """Enrolment of enrolment.proto.

    Args:
        clock: unix seconds.
        endpoints: returns HOST:PORT of control and data, as members reach them.
    """

    def __init__(
        self, authority: Authority, clock: Callable[[], float], endpoints: Callable[[], Sequence[str]], feed: RunFeed
    ) -> None:
        self._authority, self._clock, self._endpoints, self._feed = authority, clock, endpoints, feed

    async def Enrol(
        self, request: pb.EnrolRequest, context: grpc.aio.ServicerContext[pb.EnrolRequest, pb.EnrolReply]
    ) -> pb.EnrolReply:
        """Redeem an invitation. Aborts with the status of RefusedError, RemoteProtocolError or StorageError."""
        try:
            return self._redeem(request)
        except EditError as error:
            _log.warning("enrolment from %s refused: %s", context.peer(), error)
            await context.abort(*to_status(error))

    def _redeem(self, request: pb.EnrolRequest) -> pb.EnrolReply:
        if len(request.token) > MAX_TOKEN_CHARS:
            raise RemoteProtocolError(f"a token of {len(request.token)} characters, more than {MAX_TOKEN_CHARS}")
        certificate, identity = self._authority.redeem(request.token, request.csr_der, now=self._clock())
        self._feed.publish(MemberEnrolled(identity.peer_id, identity.role))
        return pb.EnrolReply(
            certificate_der=certificate,
            ca_der=self._authority.ca_der,
            run_id=identity.run_id,
            peer_id=identity.peer_id,
            role=identity.role,
            endpoints=self._endpoints(),
        )
