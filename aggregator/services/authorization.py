"""Who may call: the certificate of the connection decides, never a field of a message."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cryptography import x509

from aggregator.security.members import Members
from edit.errors import EvictedError, RefusedError
from editpb.identity import Identity, admitted

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["Authorizer"]

_PARSED_CERTIFICATES = 1024  # kept, so that a peer's certificate is parsed once and not at each call


class Authorizer:
    """Decides who may call one run."""

    def __init__(self, run_id: str, members: Members) -> None:
        self._run_id, self._members = run_id, members
        self._parse = lru_cache(_PARSED_CERTIFICATES)(x509.load_pem_x509_certificate)

    def authorize(self, context: Context, *roles: str) -> Identity:
        """Return who calls: a member of this run in one of these roles. Call this before anything else of the request is read.

        Raises EvictedError, RefusedError (another run, another role, not a member, a certificate that was replaced).
        """
        facts = context.auth_context()
        identity = admitted(facts, self._run_id, roles)
        certificate = self._parse(next(iter(facts["x509_pem_cert"])))
        self._members.add_caller(identity, certificate)
        if (reason := self._members.why_refused(identity, certificate.serial_number)) is not None:
            raise EvictedError(reason) if self._members.evicted(identity.peer_id) else RefusedError(reason)
        return identity
