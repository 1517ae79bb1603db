"""The services of enrolment.proto: an invitation and a certificate request in, a certificate out; and later ones over it.

Who calls Enrolment has no certificate yet, so TLS authenticates the server only. Renewal is beside Control and Data.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence

import grpc

from aggregator.run_feed import CertificateRenewed, MemberEnrolled, RunFeed
from aggregator.security.authority import Authority
from aggregator.services.authorization import Authorizer
from edit.errors import EditError, RemoteProtocolError
from editpb import enrolment_pb2 as pb
from editpb import enrolment_pb2_grpc
from editpb.identity import INVITED
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.chunk_frames import add_handlers, handlers_of
from editpb.transport.guarded_calls import guarded

__all__ = ["EnrolmentService", "Refusals", "RenewalService", "add_enrolment_servicer", "source_of"]

MAX_TOKEN_CHARS = 64
_LINE_S = 1.0
_SOURCES = 1000  # remembered for the next line
_log = logging.getLogger(__name__)


class Refusals:
    """Logs refused enrolments: at most one line a second for each source, with how many there were since its last line."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}  # source -> unix seconds of its last line, refusals since

    def log(self, source: str, reason: str, now: float) -> None:
        """Count a refusal, and log it unless this source had a line in the last second."""
        at, since = self._last.pop(source, (-math.inf, 0))
        if abs(now - at) < _LINE_S:  # also when the clock was set back
            self._last[source] = (at, since + 1)
            return
        more = f" ({since} more since the last line)" if since else ""
        _log.warning("enrolment from %s refused: %s%s", source, reason, more)
        self._last[source] = (now, 0)
        while len(self._last) > _SOURCES:  # the one that was heard of longest ago
            del self._last[next(iter(self._last))]


def source_of(peer: str) -> str:
    """Return the host of what gRPC calls a peer (ipv4:HOST:PORT, ipv6:[HOST]:PORT): each connection has another port."""
    return peer.rpartition(":")[0] or peer


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
        self._refusals = Refusals()

    async def Enrol(
        self, request: pb.EnrolRequest, context: grpc.aio.ServicerContext[pb.EnrolRequest, pb.EnrolReply]
    ) -> pb.EnrolReply:
        """Redeem an invitation. Aborts with the status of RefusedError, RemoteProtocolError or StorageError."""
        async with abort_on_error(context):
            try:
                return self._redeem(request)
            except EditError as error:
                self._refusals.log(source_of(context.peer()), str(error), self._clock())
                raise
        raise AssertionError("unreachable: abort raises")

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


def add_enrolment_servicer(servicer: EnrolmentService, server: grpc.aio.Server) -> None:
    """Add Enrolment for strangers: each has only a bounded time for its request."""
    anybody = contextlib.nullcontext()
    methods = handlers_of(enrolment_pb2_grpc.add_EnrolmentServicer_to_server, servicer)
    add_handlers(
        server,
        "editpb.Enrolment",
        {name: guarded(each, lambda _: anybody, lambda _: anybody) for name, each in methods.items()},
    )


class RenewalService:
    """Renewal of enrolment.proto: every member may ask, unless it was evicted or has another key now."""

    def __init__(self, authority: Authority, authorizer: Authorizer, clock: Callable[[], float], feed: RunFeed) -> None:
        self._authority, self._authorizer, self._clock, self._feed = authority, authorizer, clock, feed

    async def Renew(
        self, request: pb.RenewRequest, context: grpc.aio.ServicerContext[pb.RenewRequest, pb.RenewReply]
    ) -> pb.RenewReply:
        """Return a new certificate for the caller's identity and key."""
        async with abort_on_error(context):
            identity = self._authorizer.authorize(context, *INVITED)
            before = self._authority.members.get(identity.peer_id)
            certificate = self._authority.renew(identity, self._authorizer.certificate(context), now=self._clock())
            if self._authority.members.get(identity.peer_id) != before:
                self._feed.publish(CertificateRenewed(identity.peer_id))
            return pb.RenewReply(certificate_der=certificate)
        raise AssertionError("unreachable: abort raises")
