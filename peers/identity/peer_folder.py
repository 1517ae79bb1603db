"""The peer's folder: identity.json (with the coordinator's addresses), peer.key (0600), peer.pem and ca.pem, with their checks.

identity.json is written last: a folder without it is not enrolled. Where the member had another key before, its certificate is
in earlier.pem (`editpb.earlier_keys`). In a swarm there are no addresses in it. join.lock is
locked by whoever joins.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from edit.durable_files import lock_file, read_json, read_private, write_atomic, write_json
from edit.errors import ConfigError, RemoteProtocolError, StorageError
from edit.plain_text import quoted
from editpb.earlier_keys import keep_earlier
from editpb.identity import MAX_CERTIFICATE_BYTES, Identity, certificate_fault
from editpb.invitation import MAX_ENDPOINTS, is_endpoint
from editpb.server_certificate import ServerCertificate
from editpb.validity import Notice, Validity

__all__ = ["Enrolment", "PeerFolder", "key_pem"]

FORMAT = 1  # of identity.json


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a peer needs to connect."""

    identity: Identity
    endpoints: tuple[str, ...]  # HOST:PORT of control and data; empty in a swarm
    credentials: grpc.ChannelCredentials  # mutual TLS
    serving: grpc.ServerCredentials | None  # for serving other members; None when its certificate does not allow that
    certificate: bytes  # PEM
    authority: bytes  # PEM; in a swarm, while it is replaced, more than one
    validity: Validity

    @property
    def run_id(self) -> str:
        return self.identity.run_id


class PeerFolder:
    """One peer's folder. The constructor reads and writes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity, self._key = path / "identity.json", path / "peer.key"
        self._certificate, self._ca = path / "peer.pem", path / "ca.pem"

    def identity(self) -> Identity | None:
        """Return the owner of this folder, or None before an invitation was redeemed. Raises ConfigError when it is damaged."""
        return self._read_identity()[0] if self._has_identity() else None

    def of_swarm(self) -> bool:
        """Return whether its run is a swarm; False before an invitation was redeemed. Raises ConfigError as `identity`."""
        return self._has_identity() and not self._read_identity()[1]

    def load(self, now: float | None = None, *, swarm: bool = False) -> Enrolment:
        """Load everything and check that it fits together. now: unix seconds; if given, the certificate must be valid then.

        swarm: whether the run must be a swarm; else it must have a coordinator.

        Raises ConfigError with one line that says how to repair it.
        """
        if not self._has_identity():
            join = "edit-peer swarm join" if swarm else "edit-peer join"
            raise ConfigError(f"no invitation redeemed in {self.path}; run: {join} INVITATION --home {quoted(self.path)}")
        identity, endpoints = self._read_identity()
        if swarm == bool(endpoints):
            there, program = ("a coordinator", "edit-peer") if endpoints else ("no coordinator", "edit-peer swarm")
            verb = "watch" if identity.role != "peer" else "run" if endpoints else "join"
            what = "watch it" if verb == "watch" else "train"
            raise ConfigError(f"{self.path}: its run has {there}; {what} with: {program} {verb} --home {quoted(self.path)}")
        key, ca, certificate = self._read_key(), _read(self._ca), _read(self._certificate)
        repair = f"ask for a new invitation and run: edit-peer join INVITATION --home {quoted(self.path)}"
        try:
            own, authorities = x509.load_pem_x509_certificate(certificate), x509.load_pem_x509_certificates(ca)
        except ValueError as error:
            raise ConfigError(f"{self._certificate} or {self._ca} is damaged; {repair}") from error
        fault = certificate_fault(own, authorities, identity, _load_key(self._key, key))
        if fault is not None:
            raise ConfigError(f"{self._certificate}: {fault}; {repair}")
        validity = Validity.of(own)
        if now is not None and validity.notice(now) in (Notice.EXPIRED, Notice.NOT_YET):
            mend = repair if validity.notice(now) is Notice.EXPIRED else "set the clock"
            raise ConfigError(f"{self._certificate}: {validity.text(now)}; {mend}")
        serving = ServerCertificate(self._key, self._certificate, self._ca).credentials() if _may_serve(own) else None
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        return Enrolment(identity, endpoints, credentials, serving, certificate, ca, validity)

    def swarm_settings(self) -> Path:
        """Return the run.toml in the folder of a member of a swarm. Raises ConfigError where nobody has told it yet."""
        if not (path := self.path / "run.toml").exists():
            start = f"edit-peer swarm join --data PATH --home {quoted(self.path)}"
            raise ConfigError(
                f"{self.path}: the run's settings are not here yet; other members tell them at the first start: {start}"
            )
        return path

    def key(self) -> bytes:
        """Return this folder's private key, in PEM. Raises ConfigError (missing, readable by others)."""
        return self._read_key()

    @property
    def revealed(self) -> Path:
        """The file that says which masked sums this peer helped to open."""
        return self.path / "revealed.json"

    def make_private(self) -> None:
        """Create the folder if there is none, and let nobody else read it. Raises ConfigError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be made a private folder ({error.strerror}); choose another --home"
            ) from error

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Make the folder if there is none, and let no other process join into it until the block ends.

        Two at once would each make a key, and the certificate of one would lie beside the key of the other. A file system
        without locks keeps nobody away. Raises ConfigError where another process joins, or the folder cannot be made,
        StorageError.
        """
        self._make()
        path = self.path / "join.lock"  # not the lock of a swarm's host: it may run meanwhile
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written ({error.strerror})") from error
        try:
            with contextlib.suppress(StorageError):
                if not lock_file(descriptor, path):
                    raise ConfigError(f"another join is under way in {self.path}; wait until it has ended")
            yield
        finally:
            os.close(descriptor)

    def make_key(self) -> ec.EllipticCurvePrivateKey:
        """Return this folder's key, so that joining can be retried; create one (P-256, 0600) if there is none.

        Raises ConfigError (damaged, readable by others), StorageError.
        """
        self._make()
        if not self._key.exists():
            write_atomic(self._key, key_pem(ec.generate_private_key(ec.SECP256R1())), mode=0o600)
        return _load_key(self._key, self._read_key())

    def store(self, identity: Identity, endpoints: Sequence[str], certificate_der: bytes, ca_der: bytes) -> None:
        """Store the result of an enrolment; identity.json last. endpoints: empty in a swarm.

        The certificate of an earlier key is kept (`editpb.earlier_keys`). Raises StorageError, and ConfigError where what is
        kept of these is damaged.
        """
        keep_earlier(self.path, identity, self._certificate, x509.load_der_x509_certificate(certificate_der))
        write_atomic(self._ca, _pem(ca_der))
        write_atomic(self._certificate, _pem(certificate_der))
        values = {
            "run_id": identity.run_id,
            "peer_id": identity.peer_id,
            "role": identity.role,
            "endpoints": list(endpoints),
        }
        write_json(self._identity, values, version=FORMAT)

    def renew(self, present: Enrolment, certificate_der: bytes, now: float, clock: str) -> None:
        """Replace the certificate by a later one for the same identity and key.

        Args:
            now: unix seconds: one that is not valid yet replaces none that is.
            clock: whose time the new one's dates are.

        Raises RemoteProtocolError when it is anything else, ConfigError, StorageError; then nothing has changed.
        """
        if not 0 < len(certificate_der) <= MAX_CERTIFICATE_BYTES:
            raise RemoteProtocolError(f"the coordinator sent a certificate of {len(certificate_der)} bytes")
        try:
            certificate = x509.load_der_x509_certificate(certificate_der)
            authorities = x509.load_pem_x509_certificates(_read(self._ca))
        except ValueError as error:
            raise RemoteProtocolError("the coordinator sent a damaged certificate") from error
        key = _load_key(self._key, self._read_key())
        if (fault := certificate_fault(certificate, authorities, present.identity, key)) is not None:
            raise RemoteProtocolError(f"the coordinator's answer does not fit: {fault}")
        validity = Validity.of(certificate)
        if validity.ends <= present.validity.ends:
            raise RemoteProtocolError("the coordinator sent a certificate that ends no later than the present one")
        if (early := validity.too_early(present.validity, now, clock)) is not None:
            raise RemoteProtocolError(early)
        write_atomic(self._certificate, _pem(certificate_der))

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be created ({error.strerror})") from error

    def _has_identity(self) -> bool:
        try:
            return self._identity.exists()
        except OSError as error:
            raise ConfigError(f"{self._identity}: cannot be read ({error.strerror})") from error

    def _read_identity(self) -> tuple[Identity, tuple[str, ...]]:
        try:
            values: Any = read_json(self._identity, version=FORMAT)
            identity = Identity(str(values["run_id"]), str(values["role"]), str(values["peer_id"]))
            endpoints = tuple(str(each) for each in values["endpoints"])
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{self._identity}: is damaged; delete it and join again ({error})") from error
        if len(endpoints) > MAX_ENDPOINTS or not all(is_endpoint(each) for each in endpoints):
            raise ConfigError(f"{self._identity}: endpoints must be at most {MAX_ENDPOINTS} of HOST:PORT")
        return identity, endpoints

    def _read_key(self) -> bytes:
        try:
            return read_private(self._key)
        except OSError as error:
            raise ConfigError(f"{self._key}: cannot be read ({error.strerror})") from error


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key as PEM, not encrypted."""
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _may_serve(certificate: x509.Certificate) -> bool:
    """Return whether members accept this certificate from a server. Certificates from older versions are not accepted."""
    try:
        return ExtendedKeyUsageOID.SERVER_AUTH in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False


def _load_key(path: Path, pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: is not a private key; delete it and join with a new invitation") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: is not a P-256 key; delete it and join with a new invitation")
    return key


def _pem(der: bytes) -> bytes:
    return x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); join again") from error
