"""Who may call: the certificate of the connection decides, never a field of a message. An eviction, or another key,
ends the calls under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cryptography import x509

from aggregator.open_call import OpenCall
from aggregator.run_feed import MachineReplaced, OrderGiven, RunEvent
from aggregator.security.members import Members
from edit.errors import EvictedError, RefusedError, TransportError
from editpb.identity import Identity, admitted
from editpb.validity import over

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["Authorizer"]

_PARSED_CERTIFICATES = 1024  # kept, so that a peer's certificate is parsed once and not at each call


class Authorizer:
    """Decides who may call one run, and ends the calls of a member that is evicted, or of the machine that was a member before.

    Subscribe `on_event` to the run's feed.

    Args:
        only: the one member that may call; '': all.
        unix: seconds since 1970. A connection outlives the certificate that opened it, so each call looks at the certificate.
    """

    def __init__(self, run_id: str, members: Members, unix: Callable[[], float], only: str = "") -> None:
        self._run_id, self._members, self._unix, self._only = run_id, members, unix, only
        self._calls: dict[str, dict[OpenCall, x509.Certificate]] = {}  # under way, by peer_id
        self._parse = lru_cache(_PARSED_CERTIFICATES)(x509.load_pem_x509_certificate)

    def authorize(self, context: Context, *roles: str) -> Identity:
        """Return who calls: a member of this run in one of these roles. Call this before anything else of the request is read.

        Raises EvictedError, RefusedError (another run, another role, not a member, a certificate that was replaced), and
        TransportError for one that has expired: it may be the clock here that is wrong.
        """
        identity = admitted(context.auth_context(), self._run_id, roles)
        if self._only and identity.peer_id != self._only:
            raise RefusedError(f"only {self._only} itself trains here")
        certificate = self.certificate(context)
        self._members.add_caller(identity, certificate)
        if (reason := self._members.why_refused(identity, certificate)) is not None:
            raise EvictedError(reason) if self._members.evicted(identity.peer_id) else RefusedError(reason)
        if (ends := self._members.valid_until(identity.peer_id, certificate)) <= (now := self._unix()):
            raise TransportError(over(identity.peer_id, ends, now, "the aggregator's clock"))
        return identity

    def certificate(self, context: Context) -> x509.Certificate:
        """Return the certificate of the caller's connection."""
        return self._parse(next(iter(context.auth_context()["x509_pem_cert"])))

    def expires(self, context: Context, peer_id: str) -> Callable[[], float]:
        """Return what says until when the caller's connection counts, in seconds since 1970: a renewal moves it."""
        certificate = self.certificate(context)
        return lambda: self._members.valid_until(peer_id, certificate)

    @contextlib.contextmanager
    def admit(self, context: Context, *roles: str) -> Iterator[Identity]:
        """Authorize a call that receives, and keep hold of it: an eviction raises EvictedError inside at once, another key of
        the member RefusedError.

        A call that sends authorizes again before each chunk instead: while gRPC sends one, no status can be sent.
        Raises as `authorize`.
        """
        identity = self.authorize(context, *roles)
        call = OpenCall()
        self._calls.setdefault(identity.peer_id, {})[call] = self.certificate(context)
        try:
            with call:
                yield identity
        finally:
            calls = self._calls[identity.peer_id]
            del calls[call]
            if not calls:
                del self._calls[identity.peer_id]

    def on_event(self, event: RunEvent, unix: float) -> None:
        """End the calls of a member that was evicted, or whose certificate counts no more."""
        match event:
            case OrderGiven("evicted", peer_id, reason):
                for call in self._calls.get(peer_id, ()):
                    call.end(EvictedError(reason))
            case MachineReplaced(peer_id, reason):
                for call, certificate in self._calls.get(peer_id, {}).items():
                    if self._members.valid_until(peer_id, certificate) == 0.0:
                        call.end(RefusedError(reason))
