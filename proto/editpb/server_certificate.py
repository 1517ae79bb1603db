"""A server's key and certificate as gRPC takes them: new connections get what lies in the files, without a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from edit.durable_files import read_private
from edit.errors import ConfigError
from editpb.identity import is_signed_by
from editpb.validity import Validity

__all__ = ["ServerCertificate"]

_log = logging.getLogger(__name__)
_Files = tuple[bytes, bytes, bytes | None]


class ServerCertificate:
    """The credentials of one port.

    Before each handshake gRPC asks, on a thread of its own, whether the certificate changed. The contents of the files are
    compared: their times would miss a second change within one tick of the clock. What cannot be read, or does not fit
    together, is logged once, and the certificate before it stays; so it does, while it is valid, before one that is not valid
    yet.

    Args:
        key, certificate: the files, in PEM.
        authority: the file of the run's authorities, of one of which callers must show a certificate, and the server does;
            None: callers need not show any.
        unix: the clock, in seconds since 1970.

    Raises ConfigError when the files cannot be read, or do not fit together.
    """

    def __init__(self, key: Path, certificate: Path, authority: Path | None, *, unix: Callable[[], float] = time.time) -> None:
        self._key, self._certificate, self._complaint = key, certificate, ""
        self._authority, self._unix = authority, unix
        self._files = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return what `add_secure_port` takes."""
        fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], self._changed)  # None is allowed; the stubs forget it
        return grpc.dynamic_ssl_server_credentials(self._configuration(), fetch, self._authority is not None)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new certificate, or None when it is the same as before."""
        try:
            files = self._key.read_bytes(), self._certificate.read_bytes(), self._authorities()
            if files == self._files:
                return None
            files = self._read()
            self._check_begun(files[1])
        except (OSError, ConfigError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.warning("%s; the server's certificate before it stays in use", error)
            return None
        self._files, self._complaint = files, ""
        _log.info("new connections get the certificate that lies in %s", self._certificate)
        return self._configuration()

    def _check_begun(self, certificate: bytes) -> None:
        """Raise ConfigError where this one, in PEM, is not valid yet, and the present one is."""
        new, present = (Validity.of(x509.load_pem_x509_certificate(each)) for each in (certificate, self._files[1]))
        if (early := new.too_early(present, self._unix(), "the clock of the machine that made it")) is not None:
            raise ConfigError(f"{self._certificate}: {early}")

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([self._files[:2]], self._files[2])

    def _read(self) -> _Files:
        try:
            key, certificate, authorities = read_private(self._key), self._certificate.read_bytes(), self._authorities()
            private, own = serialization.load_pem_private_key(key, None), x509.load_pem_x509_certificate(certificate)
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self._key} or {self._certificate.name} is damaged ({error})") from error
        if private.public_key() != own.public_key():
            raise ConfigError(f"{self._certificate}: is for another key than {self._key.name}")
        if authorities is not None:
            self._check_signed(own, authorities)
        return key, certificate, authorities

    def _check_signed(self, own: x509.Certificate, authorities: bytes) -> None:
        """Raise ConfigError unless one of these, in PEM, signed the server's own certificate."""
        try:
            roots = x509.load_pem_x509_certificates(authorities)
        except ValueError as error:
            raise ConfigError(f"{self._authority}: is damaged ({error})") from error
        if not any(is_signed_by(own, root) for root in roots):
            raise ConfigError(f"{self._authority}: has no authority that signed {self._certificate.name}")

    def _authorities(self) -> bytes | None:
        return self._authority.read_bytes() if self._authority is not None else None
