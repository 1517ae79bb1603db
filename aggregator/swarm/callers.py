"""Who calls a member's host, and what they may do: each right is one method here. The certificate of the connection decides,
never a field of a message.

    peer               whom the run's authority made a peer: it trains, or is a member, or was one and asks before it comes back
    member             a peer that is in the record
    itself             the peer beside this host
    peer_or_observer   observers, too
    inquirer           operators, too: who may know how things stand. Each peer may be a member, own parts and fetch all states,
                       and so knows as much
    operator           gives orders

An operator has the authority's key, and so needs no entry in the record. All others are refused when they are evicted (a voter
only once it is voted out), not enrolled by what is known here, or on another machine now; everybody with an ended certificate.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cryptography import x509

from aggregator.security.certificates import public_hash
from aggregator.security.members import Members
from edit.council.record import Record, peer_of
from edit.errors import EvictedError, RefusedError, StaleError, TransportError
from editpb.identity import Identity, admitted, from_auth_context, is_signed_by
from editpb.validity import Notice, Validity, over

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["Callers", "certificate_of", "moved", "shut_out", "why_outside"]

_HERE = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")  # as gRPC names callers on this machine


class Callers:
    """See above. All methods that take a context raise RefusedError, EvictedError, StaleError for a name that nobody was
    enrolled with (it may be known in a moment), and TransportError for a peer's certificate that has expired: it may be the
    clock here that is wrong.

    Args:
        run_id: of the run.
        peer_id: of this member.
        members: who may train; hears of each certificate that a peer shows.
        authority: returns the certificate of the run's present authority; None: nobody follows here which one that is.
        record: returns the newest record that is known here.
        unix: returns the time in seconds since 1970.
    """

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        members: Members,
        authority: Callable[[], x509.Certificate] | None,
        record: Callable[[], Record | None],
        unix: Callable[[], float],
    ) -> None:
        self._run_id, self._peer_id, self._members, self._authority = run_id, peer_id, members, authority
        self._record, self._unix = record, unix

    def peer(self, context: Context) -> str:
        """Return which peer of the run calls."""
        return self._check(context, "peer").peer_id

    def member(self, context: Context) -> str:
        """Return which member calls."""
        peer_id, record = self.peer(context), self._record()
        if record is None or not (peer_id in record.members or peer_id in map(peer_of, record.electors)):
            raise RefusedError(f"{peer_id} is no member of the swarm")
        return peer_id

    def itself(self, context: Context, only: str) -> None:
        """Check that the peer beside this host calls. only: what is said to others, after its name."""
        if self.peer(context) != self._peer_id:
            raise RefusedError(f"only {self._peer_id} itself {only}")

    def peer_or_observer(self, context: Context) -> Identity:
        """Return which peer or observer of the run calls."""
        return self._check(context, "peer", "observer")

    def inquirer(self, context: Context) -> Identity:
        """Return which peer, observer or operator of the run calls."""
        return self._check(context, "peer", "observer", "operator")

    def operator(self, context: Context) -> None:
        """Check that somebody calls whom the run's authority made its operator."""
        self._check(context, "operator")

    @contextmanager
    def anybody(self, context: Context) -> Iterator[None]:
        """Refuse a caller that no service of a host would answer. Who is no member may show an invitation: Enrol reads it."""
        try:
            from_auth_context(context.auth_context())
        except RefusedError:
            yield
            return
        self.inquirer(context)
        yield

    def is_here(self, context: Context) -> bool:
        """Return whether this member calls, from this machine."""
        return context.peer().startswith(_HERE) and from_auth_context(context.auth_context()).peer_id == self._peer_id

    def why_over(self, peer_id: str, certificate: x509.Certificate) -> str:
        """Return that a connection counts no more that a peer opened with this certificate, or ''. A renewal moves the end."""
        now = self._unix()
        ends = (
            self._members.valid_until(peer_id, certificate) or Validity.of(certificate).ends
        )  # 0: the record has whose key counts
        return over(peer_id, ends, now, self.clock) if ends <= now else ""

    @property
    def clock(self) -> str:
        """What the clock here is called on other machines."""
        return f"the clock of {self._peer_id}"

    def _check(self, context: Context, *roles: str) -> Identity:
        identity, certificate = admitted(context.auth_context(), self._run_id, roles), certificate_of(context)
        if identity.role == "operator":
            self._check_authority(identity.peer_id, certificate)
            return identity
        self._check_evicted(identity.peer_id)
        if identity.role == "observer":
            self._check_authority(identity.peer_id, certificate)
        record = self._record()
        if record is not None and not record.may_enter(identity.peer_id):
            raise StaleError(_not_enrolled(identity.peer_id))
        if self._members.superseded(identity.peer_id, certificate):
            raise RefusedError(moved(identity.peer_id))
        if identity.role == "peer":
            self._members.add_caller(identity, certificate)  # what trains beside a member has an older one for a while
            if text := self.why_over(identity.peer_id, certificate):
                raise TransportError(text)
        return identity

    def _check_evicted(self, peer_id: str) -> None:
        """Raise EvictedError for a peer that was evicted. A voter still counts until it is voted out, which may need it."""
        record = self._record()
        if record is not None and peer_id in shut_out(record):
            raise EvictedError(record.evicted[peer_id])

    def _check_authority(self, peer_id: str, certificate: x509.Certificate) -> None:
        """The keys of peers are in the record, whoever signed their certificates; others need the present authority."""
        if self._authority is not None and not is_signed_by(certificate, self._authority()):
            raise RefusedError("the authority was replaced, and this copy of its key gives no orders any more")
        validity, now = Validity.of(certificate), self._unix()
        if validity.notice(now) in (Notice.EXPIRED, Notice.NOT_YET):
            raise RefusedError(f"the certificate of {peer_id} {validity.text(now, self.clock)}")


def certificate_of(context: Context) -> x509.Certificate:
    """Return the certificate of the caller's connection."""
    return _parsed(next(iter(context.auth_context()["x509_pem_cert"])))


@lru_cache(1024)
def _parsed(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def moved(peer_id: str) -> str:
    """Return that another machine has a member's name now."""
    return f"{peer_id} was enrolled again, with another key: it is on another machine now"


def shut_out(record: Record) -> frozenset[str]:
    """Return the evicted whom nobody needs any more. A voter, also one that is being voted out, may be needed for a quorum."""
    return frozenset(record.evicted.keys() - {peer_of(name) for name in record.electors})


def why_outside(record: Record, identity: Identity, certificate: x509.Certificate) -> str | None:
    """Return why the record shuts the holder of a certificate out, which an authority of the run signed; None: it does not.

    The record may be what another member says: an authority in it that cannot be read has signed nothing.
    """
    peer_id, enrolled = identity.peer_id, record.enrolled.get(identity.peer_id)
    if identity.role in ("operator", "observer") and record.roots:
        try:
            present = x509.load_der_x509_certificate(base64.b64decode(record.roots[-1].certificate))
        except ValueError:
            return "the certificate of the run's authority cannot be read"
        if not is_signed_by(certificate, present):
            return "the authority that signed it was replaced"
    if identity.role == "operator":
        return None
    if peer_id in record.evicted:
        return record.evicted[peer_id]
    if not record.may_enter(peer_id):
        return _not_enrolled(peer_id)
    return moved(peer_id) if enrolled is not None and enrolled.key != public_hash(certificate) else None


def _not_enrolled(peer_id: str) -> str:
    return f"{peer_id} is not enrolled, whoever signed its certificate"
