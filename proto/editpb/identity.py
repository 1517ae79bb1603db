"""Who is at the other end: a certificate names `edit://<run_id>/<role>/<peer_id>` as a URI.

This module has the form of that URI, reads it from a certificate or from gRPC's authentication context, and derives the name
under which a peer serves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from edit.errors import ConfigError, RefusedError
from editpb.limits import is_id

__all__ = [
    "INVITED",
    "MAX_CERTIFICATE_BYTES",
    "ROLES",
    "Identity",
    "admitted",
    "certificate_fault",
    "check_member",
    "from_auth_context",
    "from_certificate",
    "from_uri",
    "invited_by",
    "is_signed_by",
]

MAX_CERTIFICATE_BYTES = 16_384
INVITED = ("peer", "region", "observer", "auditor", "scorer", "operator")  # the roles that an invitation may be for
ROLES = (*INVITED, "coordinator", "relay")
_SCHEME = "edit://"
_INVITED = "invitation:"  # before the URI of whom an invitation to a swarm is for
_SAN = "x509_subject_alternative_name"


def check_member(peer_id: str) -> None:
    """Raise ConfigError when no member can have this peer_id."""
    if not is_id(peer_id):
        raise ConfigError(f"peer_id {peer_id[:80]!r}: must be 1 to 64 of A-Z a-z 0-9 . _ -, and not . or ..")


@dataclass(frozen=True, slots=True)
class Identity:
    """One member of one run. Raises ConfigError when a field could not be written into a certificate."""

    run_id: str
    role: str  # one of ROLES
    peer_id: str

    def __post_init__(self) -> None:
        if not is_id(self.run_id):
            raise ConfigError(f"run_id {self.run_id[:80]!r}: must be 1 to 64 of A-Z a-z 0-9 . _ -, and not . or ..")
        check_member(self.peer_id)
        if self.role not in ROLES:
            raise ConfigError(f"role {self.role[:80]!r}: must be one of {', '.join(ROLES)}")

    @property
    def uri(self) -> str:
        """The URI in the certificate."""
        return f"{_SCHEME}{self.run_id}/{self.role}/{self.peer_id}"

    @property
    def invited_uri(self) -> str:
        """The URI in the certificate of an invitation for this member: who shows it is not that member yet."""
        return f"{_INVITED}{self.uri}"

    @property
    def server_name(self) -> str:
        """The DNS name in a peer's certificate for when it serves, at whatever address.

        No host has this name (RFC 2606), and no two members share one, so that nobody can pose as another member or as the
        coordinator.
        """
        return f"{hashlib.sha256(self.uri.encode()).hexdigest()[:40]}.invalid"


def from_uri(uri: str) -> Identity:
    """Return the identity that a certificate's URI names. Raises RefusedError."""
    parts = uri.removeprefix(_SCHEME).split("/")
    if not uri.startswith(_SCHEME) or len(parts) != 3:
        raise RefusedError(f"the certificate names {uri[:80]!r}, not edit://RUN/ROLE/PEER")
    try:
        return Identity(*parts)
    except ConfigError as error:
        raise RefusedError(f"the certificate's identity is wrong: {error}") from None


def from_auth_context(context: Mapping[str, Iterable[bytes]]) -> Identity:
    """Return the caller's identity, from `grpc.ServicerContext.auth_context()`. Raises RefusedError without exactly one."""
    names = [name.decode("utf-8", "replace") for name in context.get(_SAN, ())]
    return _only([name for name in names if name.startswith(_SCHEME)])


def admitted(context: Mapping[str, Iterable[bytes]], run_id: str, roles: Collection[str]) -> Identity:
    """Return the caller's identity when it is of this run and has one of `roles`. Raises RefusedError."""
    identity = from_auth_context(context)
    if identity.run_id != run_id:
        raise RefusedError(f"the certificate is of run {identity.run_id}, this is {run_id}")
    if identity.role not in roles:
        raise RefusedError(f"role {identity.role} may not do this; it needs {' or '.join(roles)}")
    return identity


def from_certificate(certificate: x509.Certificate) -> Identity:
    """Return the identity that a certificate names. Raises RefusedError without exactly one."""
    return _only([uri for uri in _uris(certificate) if uri.startswith(_SCHEME)])


def certificate_fault(
    certificate: x509.Certificate, authorities: Iterable[x509.Certificate], identity: Identity, key: ec.EllipticCurvePrivateKey
) -> str | None:
    """Return what is wrong with a member's certificate, or None if one of `authorities` signed it for `identity` and `key`."""
    if not any(is_signed_by(certificate, each) for each in authorities):
        return "the certificate is not signed by the run's authority"
    try:
        named, public = from_certificate(certificate), certificate.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return "the certificate cannot be read"
    except RefusedError as error:
        return str(error)
    if named != identity:
        return f"the certificate is for {named.uri}, not {identity.uri}"
    if public != key.public_key():
        return "the certificate is for another key than peer.key"
    return None


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether this authority signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def invited_by(certificate: x509.Certificate) -> Identity:
    """Return whom the invitation is for that this certificate is of. Raises RefusedError when it is of none."""
    return _only([uri.removeprefix(_INVITED) for uri in _uris(certificate) if uri.startswith(_INVITED)])


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError) as error:
        raise RefusedError("the certificate names no member of a run") from error
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _only(uris: list[str]) -> Identity:
    if len(uris) != 1:
        raise RefusedError(f"the certificate names {len(uris)} members of a run; it must name one")
    return from_uri(uris[0])
