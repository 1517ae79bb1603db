"""Who may call: the certificate of the connection decides, never a field of a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cryptography import x509

from aggregator.control.run import Run
from edit.errors import EvictedError, RefusedError
from editpb.identity import Identity, admitted

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["admit"]


def admit(run: Run, context: Context, *roles: str) -> Identity:
    """Who calls: a member of this run in a fitting role, neither evicted nor replaced. Raises RefusedError, EvictedError."""
    facts = context.auth_context()
    identity = admitted(facts, run.run_id, roles)
    certificate = x509.load_pem_x509_certificate(next(iter(facts["x509_pem_cert"])))
    run.members.see(identity, certificate)
    if (reason := run.members.is_allowed(identity, certificate.serial_number)) is not None:
        raise EvictedError(reason) if run.members.evicted(identity.peer_id) else RefusedError(reason)
    return identity
