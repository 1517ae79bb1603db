"""Keys and certificates as values: what a certificate says (names, key usage, lifetime), and which keys are accepted.

The run's authority signs, everybody else is signed. Keys are P-256 only.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edit.config.run import is_host
from edit.errors import ConfigError, RemoteProtocolError
from editpb.identity import Identity

__all__ = [
    "CA_LIFETIME_S",
    "Issuer",
    "certified_key",
    "key_pem",
    "make_ca",
    "names_of",
    "new_key",
    "public_der",
    "public_hash",
    "public_key_of",
]

CA_LIFETIME_S = 10 * 365 * 86400.0
MAX_CSR_BYTES = 4096
_BACKDATE = timedelta(hours=1)  # members' clocks may be slow


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key as PKCS#8 PEM, not encrypted: the mode of its file protects it."""
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def public_der(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as DER, by which two keys are compared."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def certified_key(certificate: x509.Certificate) -> bytes:
    """Return a certificate's public key as DER."""
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return certificate.public_key().public_bytes(encoding, form)


@lru_cache(1024)  # so that it is computed once for a member, and not at each call
def public_hash(certificate: x509.Certificate) -> str:
    """Return SHA-256 of a certificate's public key, in hexadecimal."""
    return hashlib.sha256(certified_key(certificate)).hexdigest()


def public_key_of(csr_der: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a PKCS#10 request; its names and extensions are ignored.

    Raises RemoteProtocolError: damaged, signature wrong (no proof that the sender holds the key), or not P-256.
    """
    if not 0 < len(csr_der) <= MAX_CSR_BYTES:
        raise RemoteProtocolError(f"a certificate request of {len(csr_der)} bytes; 1 to {MAX_CSR_BYTES} are allowed")
    try:
        request = x509.load_der_x509_csr(csr_der)
        key, signed = request.public_key(), request.is_signature_valid
    except x509.InvalidVersion as error:
        raise RemoteProtocolError("the certificate request is of another version than 1") from error
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise RemoteProtocolError("the certificate request is damaged, or its key is not P-256") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RemoteProtocolError("the certificate request's key is not P-256")
    if not signed:
        raise RemoteProtocolError("the certificate request is not signed with its own key")
    return key


def make_ca(run_id: str, now: float, what: str = "CA") -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return the key and the self-signed certificate of a run's authority. It may sign members but no further authorities.

    what: tells its name from that of another authority of the run. now: unix seconds.
    """
    key, name = new_key(), _name(f"{run_id[: 63 - len(what)]} {what}")
    certificate = (
        _dated(x509.CertificateBuilder(), now, CA_LIFETIME_S)
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


@dataclass(frozen=True, slots=True)
class Issuer:
    """Signs for one run, with the authority's key."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def der(self) -> bytes:
        """The authority's certificate, in DER."""
        return self.certificate.public_bytes(serialization.Encoding.DER)

    def issue(
        self,
        identity: Identity,
        public_key: ec.EllipticCurvePublicKey,
        *,
        lifetime_s: float,
        now: float,
        server_names: Sequence[str] = (),
    ) -> x509.Certificate:
        """Return a certificate for `identity`, which never outlives the authority.

        Args:
            lifetime_s: at most.
            now: unix seconds.
            server_names: hosts and addresses. With them it may only serve, without them only call; but a peer's may also serve,
                under its `Identity.server_name`.

        Raises ConfigError as `names_of`, and when the authority has expired.
        """
        authority = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        lifetime_s = min(lifetime_s, self.certificate.not_valid_after_utc.timestamp() - now)
        if lifetime_s <= 0:
            raise ConfigError("the run's authority has expired; make a new run")
        return (
            _dated(x509.CertificateBuilder(), now, lifetime_s)
            .subject_name(_name(identity.peer_id))
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(_serial(now))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_purposes(identity, server_names)), critical=True)
            .add_extension(x509.SubjectAlternativeName(names_of(identity, server_names)), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def issue_guest(
        self, invited: Identity, public_key: ec.EllipticCurvePublicKey, *, lifetime_s: float, now: float, made: float
    ) -> x509.Certificate:
        """Return a certificate of an invitation: whoever shows it can connect, and become the member that it is for.

        It names nobody who may call anything else. Its serial number is that of the invitation: a later one has a greater.

        made: orders invitations, in unix seconds; later than `now` where the clock was ahead when the one before was made.
        """
        return (
            _dated(x509.CertificateBuilder(), now, lifetime_s)
            .subject_name(_name("guest"))
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(_serial(made))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(invited.invited_uri)]), critical=False)
            .sign(self.key, hashes.SHA256())
        )


def _serial(now: float) -> int:
    """Return a serial number of less than 128 bits: of two certificates of the same second the later one has the greater."""
    return int(now * 1e9) << 64 | secrets.randbits(64)


def names_of(identity: Identity, server_names: Sequence[str] = ()) -> list[x509.GeneralName]:
    """Return the subject alternative names of a certificate.

    Raises ConfigError for a server's name that is neither a host name nor an address.
    """
    own = [x509.DNSName(identity.server_name)] if identity.role == "peer" else []
    return [x509.UniformResourceIdentifier(identity.uri), *own, *(_server_name(name) for name in server_names)]


def _purposes(identity: Identity, server_names: Sequence[str]) -> list[x509.ObjectIdentifier]:
    if server_names:
        return [ExtendedKeyUsageOID.SERVER_AUTH]
    serves = [ExtendedKeyUsageOID.SERVER_AUTH] if identity.role == "peer" else []
    return [ExtendedKeyUsageOID.CLIENT_AUTH, *serves]


def _server_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        if not is_host(name):
            raise ConfigError(f"{name!r:.260}: is neither a host name nor an address") from None
        return x509.DNSName(name)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _dated(builder: x509.CertificateBuilder, now: float, lifetime_s: float) -> x509.CertificateBuilder:
    start = datetime.fromtimestamp(now, UTC)
    return builder.not_valid_before(start - _BACKDATE).not_valid_after(start + timedelta(seconds=lifetime_s))


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )
