"""The run's certificate authority on disk: creating, inviting, redeeming, renewing.

An invitation lies in invitations/ as `<sha256 of its token>.json`, never with the token itself. Redeeming renames it to
`<sha256>.<sha256 of the public key>.used` before a certificate is issued: the rename succeeds once, and its name says for which
key. So a crash or a lost reply costs the machine that redeemed it nothing: it asks again and gets the same certificate.
Each has a number, which says which of two for one name was made later: once that was redeemed, the earlier one is void. Those
of before there were numbers have 0. members.json keeps the last number that each name has redeemed, so that a damaged file
concerns nobody but who would redeem it.

A renewed certificate is for the same identity and the same key: only the certificate is replaced, so nothing can end up with a
key and a certificate that do not fit, and whoever has the earlier certificate of that key goes on with it until it expires.

One process at a time redeems, renews and evicts (the one that holds the folder's lock); `invite` may run beside it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aggregator.security.certificates import (
    CA_LIFETIME_S,
    Issuer,
    key_pem,
    make_ca,
    names_of,
    new_key,
    public_der,
    public_key_of,
)
from aggregator.security.members import OPERATOR_ID, Members
from edit.durable_files import names_in, read_json, read_private, write_atomic, write_json
from edit.errors import ConfigError, RefusedError, StaleError, StorageError
from edit.plain_text import reason_of
from editpb.identity import INVITED, Identity, is_signed_by
from editpb.invitation import MAX_ENDPOINTS, TOKEN, Invitation, SwarmAccess, fingerprint, guest_key, is_endpoint
from editpb.validity import Validity

__all__ = ["MEMBER_LIFETIME_S", "Authority", "check_equipped", "load_issuer", "load_key", "made_at"]

_log = logging.getLogger(__name__)

INVITATION_FORMAT = 1
MEMBER_LIFETIME_S = 365 * 86400.0
COORDINATOR_ID = "coordinator"
_CLOCK_SET_BACK_S = 3600.0  # a certificate is dated so far back, and no later one need seem to be earlier
_ROUNDED_S = 1.0  # the dates of certificates
_EQUIP = "make it with `edit-coordinator new-aggregator` on the coordinator's machine, and copy the folder"
_UNKNOWN = "this invitation is not known here: it is for another run, was withdrawn, or was altered; ask for a new one"


class Authority:
    """One run's authority: makes and opens the folder's keys, invites members and gives them certificates.

    Args:
        path: the coordinator's state folder.
        issuer: signs with the authority's key.
        members: everybody who was enrolled.
    """

    def __init__(self, path: Path, run_id: str, issuer: Issuer, members: Members) -> None:
        self.run_id, self.members = run_id, members
        self._path, self.issuer, self._invitations = path, issuer, path / "invitations"
        self._renewed: dict[str, x509.Certificate] = {}  # by peer_id: who asks again, since the reply was lost, gets the same
        self._passed_over: set[Path] = set()  # damaged files of which a warning was given
        self._used: set[str] | None = None  # hashes of the tokens that were redeemed, once they have been read

    @classmethod
    def create(cls, path: Path, run_id: str, advertise: Sequence[str] = (), *, now: float) -> Authority:
        """Make authority, server certificate (for the names in `advertise`) and operator certificate in the folder `path`.

        A swarm has no server, and names none.

        Raises ConfigError (already there, wrong names), StorageError.
        """
        if (path / "ca.key").exists():
            raise ConfigError(f"{path / 'ca.key'}: exists already; a second authority would shut every member out")
        coordinator, operator = Identity(run_id, "coordinator", COORDINATOR_ID), Identity(run_id, "operator", OPERATOR_ID)
        issuer = Issuer(*make_ca(run_id, now))
        try:
            (path / "invitations").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written ({error.strerror})") from error
        authority = cls(path, run_id, issuer, Members(path / "members.json", new=True))
        if advertise:
            authority._issue_own("server", coordinator, now, tuple(advertise))
        authority.members.add(operator, authority._issue_own("operator", operator, now), now)
        write_atomic(path / "ca.pem", _pem(issuer.certificate))
        write_atomic(path / "ca.key", key_pem(issuer.key), mode=0o600)  # last: its presence means that all is there
        return authority

    @classmethod
    def load(cls, path: Path, run_id: str) -> Authority:
        """Open the folder. Raises ConfigError that names the file, StorageError."""
        return cls(path, run_id, load_issuer(path), Members(path / "members.json"))

    @property
    def ca_der(self) -> bytes:
        """The authority's certificate, in DER."""
        return self.issuer.der

    @property
    def validity(self) -> Validity:
        """From when to when the authority itself is valid."""
        return Validity.of(self.issuer.certificate)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the authority's certificate, as `invite` prints it."""
        return fingerprint(self.ca_der)

    def equip(self, path: Path, aggregator: int, name: str, *, now: float) -> None:
        """Give the folder of a further aggregator its key, a certificate to serve as host `name`, and the authority's own.

        The authority's key stays here, so nobody can be enrolled with what is there. Raises ConfigError (name), StorageError.
        """
        identity, key = _aggregator(self.run_id, aggregator), new_key()
        certificate = self.issuer.issue(identity, key.public_key(), lifetime_s=CA_LIFETIME_S, now=now, server_names=(name,))
        write_atomic(path / "ca.pem", _pem(self.issuer.certificate))
        write_atomic(path / "server.key", key_pem(key), mode=0o600)
        write_atomic(path / "server.pem", _pem(certificate))

    def renew_own(self, advertise: Sequence[str], *, now: float) -> tuple[str, ...]:
        """Renew the folder's own certificates, the server's and the operator's, that are due. Return their files' names.

        The server's is also renewed when server.advertise changed, when it does not fit its key, when it is not valid yet (the
        clock was ahead) while the authority is, or when either is missing.
        Raises ConfigError when a key is damaged or others can read it, StorageError.
        """
        server, operator = Identity(self.run_id, "coordinator", COORDINATOR_ID), Identity(self.run_id, "operator", OPERATOR_ID)
        renewed = []
        if not _still_good(self._path, "server", set(names_of(server, tuple(advertise))), now, self.validity):
            self._issue_own("server", server, now, tuple(advertise))
            renewed.append("server.pem")
        record = self.members.get(OPERATOR_ID)
        known = record is not None and 0 < record.expires < self._latest
        if record is not None and known and Validity(record.issued, record.expires).renewal_due(now):
            self.members.add(operator, self._issue_own("operator", operator, now), now)
            renewed.append("operator.pem")
        return tuple(renewed)

    def renew(self, identity: Identity, certificate: x509.Certificate, *, now: float, mend: str = "make a new run") -> bytes:
        """Return a new certificate in DER for a member's identity and key; `certificate` is its present one.

        The caller has authorized the member by it. Who asks again gets the same, so that each certificate is renewed once,
        unless it is not valid yet (the clock was ahead). One that another authority signed is always due. Raises StaleError
        when it is not due, or when no later end is possible, with what helps then (`mend`), StorageError.
        """
        last = self._renewed.get(identity.peer_id)
        record, validity = self.members.get(identity.peer_id), Validity.of(certificate)
        good = last is not None and record is not None and record.serial == f"{last.serial_number:x}"
        if last is None or not good or Validity.of(last).begins > now or Validity.of(last).renewal_due(now):
            of_another = not is_signed_by(certificate, self.issuer.certificate)
            if not of_another and not validity.renewal_due(now):
                raise StaleError(f"the certificate of {identity.peer_id} is not due for renewal: it {validity.text(now)}")
            public_key = certificate.public_key()
            assert isinstance(public_key, ec.EllipticCurvePublicKey)  # this authority signs no other
            if not of_another and validity.ends >= self._latest:
                raise StaleError(f"the run's authority {self.validity.text(now)}; no certificate outlives it: {mend}")
            last = self._renewed[identity.peer_id] = self._issue(identity, public_key, now)
        return last.public_bytes(serialization.Encoding.DER)

    def enrol(self, identity: Identity, public_key: ec.EllipticCurvePublicKey, *, now: float) -> x509.Certificate:
        """Return a certificate for a member that needs no invitation: whoever founds a swarm. Raises StorageError."""
        return self._issue(identity, public_key, now)

    def invite(
        self,
        peer_id: str,
        *,
        role: str,
        enrol: Sequence[str],
        lifetime_s: float,
        now: float,
    ) -> Invitation:
        """Return a new single-use invitation. For a present member it means a new machine for the same identity.

        Args:
            enrol: HOST:PORT where it can be redeemed.
            lifetime_s: until it expires.

        Raises ConfigError (name, role, address), RefusedError (evicted, another role), StorageError.
        """
        if role not in INVITED:
            raise ConfigError(f"role {role!r:.80}: must be one of {', '.join(INVITED)}")
        identity = Identity(self.run_id, role, peer_id)
        self._check_invitable(identity)
        wrong = next((each for each in enrol if not is_endpoint(each)), None if enrol else "nothing")
        if wrong is not None or len(enrol) > MAX_ENDPOINTS:
            raise ConfigError(f"server.advertise: an invitation needs 1 to {MAX_ENDPOINTS} addresses HOST:PORT, not {wrong!r}")
        token, expires = secrets.token_urlsafe(32), math.ceil(now + lifetime_s)
        # In this order: one that is redeemed meanwhile is found as used.
        number = 1 + max(self._last_number(peer_id, "*.json"), self._last_redeemed(peer_id))
        record = {"peer_id": peer_id, "role": role, "expires": expires, "number": number}
        write_json(self._invitations / f"{_hash(token.encode())}.json", record, version=INVITATION_FORMAT, mode=0o600)
        return Invitation(identity=identity, token=token, enrol=tuple(enrol), ca=self.ca_der, expires=expires)

    def invited(self, peer_id: str, now: float) -> str:
        """Return the role for which a name that is no member can still be enrolled by an invitation; '': it cannot."""
        for path in (self._invitations / name for name in names_in(self._invitations, "*")):
            with contextlib.suppress(StorageError):  # nobody can redeem what is damaged
                record = _read_record(path)
                if record["peer_id"] == peer_id and now < record["expires"]:
                    return str(record["role"])
        return ""

    def withdraw(self, invitation: Invitation) -> None:
        """Take an invitation back, which nobody has redeemed; it is unknown from now on. Raises OSError."""
        (self._invitations / f"{_hash(invitation.token.encode())}.json").unlink(missing_ok=True)

    def invite_to_swarm(
        self,
        peer_id: str,
        *,
        role: str = "peer",
        hosts: Mapping[str, tuple[str, ...]],
        lifetime_s: float,
        now: float,
        after: str = "",
    ) -> Invitation:
        """Return a new single-use invitation to a swarm, which says all that who redeems it has to know. Nothing is kept here.

        Args:
            role: peer or observer; a swarm has no others.
            hosts: HOST:PORT of members by peer_id, those first who can redeem it.
            lifetime_s: until it expires.
            after: the number of an invitation for the same name, which this one must follow; '': there is none.

        Raises ConfigError (name, role, address), RefusedError (evicted, another role).
        """
        if role not in ("peer", "observer"):
            raise ConfigError(f"role {role!r:.80}: must be peer or observer in a swarm")
        identity = Identity(self.run_id, role, peer_id)
        self._check_invitable(identity)
        enrol = [address for addresses in hosts.values() for address in addresses][:MAX_ENDPOINTS]
        token, expires = secrets.token_urlsafe(32), math.ceil(now + lifetime_s)
        made = max(now, made_at(after) + 1e-3) if after else now
        certificate = self.issuer.issue_guest(
            identity, guest_key(token).public_key(), lifetime_s=max(expires - now, 1.0), now=now, made=made
        )
        swarm = SwarmAccess(hosts, certificate.public_bytes(serialization.Encoding.DER))
        return Invitation(identity=identity, token=token, enrol=tuple(enrol), ca=self.ca_der, expires=expires, swarm=swarm)

    def redeem(self, token: str, csr_der: bytes, *, now: float) -> tuple[bytes, Identity]:
        """Return (certificate in DER, identity) for the machine that holds the key of the request.

        The same key may ask again until the invitation expires, and gets the same certificate, unless that is not valid yet
        (the clock was ahead). Raises RefusedError (unknown, used, a later one used, expired, evicted), RemoteProtocolError
        (request damaged), StorageError. Nothing is used up by an error.
        """
        if not TOKEN.fullmatch(token):
            raise RefusedError(_UNKNOWN)
        pending = self._invitations / f"{_hash(token.encode())}.json"
        if not pending.exists() and pending.stem not in self._redeemed():  # before the request, which costs a signature
            raise RefusedError(_UNKNOWN)
        public_key = public_key_of(csr_der)
        used = pending.with_suffix(f".{_hash(public_der(public_key))}.used")
        if not used.exists() and not pending.exists():
            raise RefusedError(self._why_gone(pending))
        record = _read_record(used if used.exists() else pending)
        identity = Identity(self.run_id, record["role"], record["peer_id"])
        self._check_invitable(identity)
        if now >= float(record["expires"]):
            raise RefusedError("this invitation has expired; ask the run's operator for a new one")
        if "certificate" in record and _begins(used, record["certificate"]) > now:
            del record["certificate"]
        if "certificate" not in record and self._last_redeemed(identity.peer_id) > record["number"]:
            raise RefusedError(f"a later invitation for {identity.peer_id} was used; ask the run's operator for a new one")
        if not used.exists():
            self._claim(pending, used)
        if "certificate" not in record:
            record["certificate"] = self._enrol(identity, public_key, now, record["number"])
            write_json(used, record, version=INVITATION_FORMAT, mode=0o600)
        return base64.b64decode(record["certificate"]), identity

    @property
    def _latest(self) -> float:
        """No certificate can end later, but for the rounding of its dates."""
        return self.validity.ends - _ROUNDED_S

    def _enrol(self, identity: Identity, public_key: ec.EllipticCurvePublicKey, now: float, number: int) -> str:
        certificate = self._issue(identity, public_key, now, number)
        return base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()

    def _issue(
        self, identity: Identity, public_key: ec.EllipticCurvePublicKey, now: float, number: int = 0
    ) -> x509.Certificate:
        """Return a member's new certificate, which is kept as its newest: later than the last one, if need be by a moment."""
        record = self.members.get(identity.peer_id)
        if record is not None and now <= record.issued < now + _CLOCK_SET_BACK_S:
            now = record.issued + 1e-6
        certificate = self.issuer.issue(identity, public_key, lifetime_s=MEMBER_LIFETIME_S, now=now)
        self.members.add(identity, certificate, now, number)
        return certificate

    def _claim(self, pending: Path, used: Path) -> None:
        try:
            redeemed = self._redeemed()
            pending.rename(used)
            redeemed.add(pending.stem)
        except FileNotFoundError:
            raise RefusedError(self._why_gone(pending)) from None
        except OSError as error:
            raise StorageError(f"{pending}: cannot be renamed ({error.strerror})") from error

    def _why_gone(self, pending: Path) -> str:
        if pending.stem in self._redeemed():
            return "this invitation was used already, by another key; ask the run's operator for a new one"
        return _UNKNOWN

    def _redeemed(self) -> set[str]:
        """Return the hashes of the tokens that were redeemed. The folder is read once: only this process adds to them."""
        if self._used is None:
            self._used = {name.partition(".")[0] for name in names_in(self._invitations, "*.used")}
        return self._used

    def _last_redeemed(self, peer_id: str) -> int:
        """Return the greatest number of this name's invitations that were redeemed; 0: none was, or none has one."""
        return max(self.members.redeemed(peer_id), self._last_number(peer_id, "*.used"))

    def _last_number(self, peer_id: str, pattern: str) -> int:
        """Return the greatest number of this name's invitations in files of that pattern; 0: there is none, or none has one.

        A damaged file is passed over. Raises StorageError for one that the member of this name has redeemed before members.json
        had numbers: nobody knows which earlier ones are void.
        """
        last = 0
        for path in (self._invitations / name for name in names_in(self._invitations, pattern)):
            try:
                record = _read_record(path)
            except StorageError:
                if not path.exists():
                    continue  # redeemed or withdrawn since the folder was listed
                member = self.members.get(peer_id)
                own = member is not None and path.name.split(".")[1] == member.key
                if own and not self.members.redeemed(peer_id):
                    raise
                if path not in self._passed_over:
                    self._passed_over.add(path)
                    _log.warning("%s: is damaged, and is passed over; nobody can redeem this invitation any more", path)
                continue
            if record["peer_id"] == peer_id:
                last = max(last, record["number"])
        return last

    def _check_invitable(self, identity: Identity) -> None:
        if identity.peer_id in (OPERATOR_ID, COORDINATOR_ID):
            raise ConfigError(f"{identity.role} {identity.peer_id} cannot be invited; choose another name")
        record = self.members.get(identity.peer_id)
        if record is not None and record.evicted is not None:
            raise RefusedError(f"{identity.peer_id} was evicted ({record.evicted}); choose another name")
        if record is not None and record.role != identity.role:
            raise RefusedError(f"{identity.peer_id} is a member as {record.role} already; choose another name")

    def _issue_own(self, name: str, identity: Identity, now: float, server_names: tuple[str, ...] = ()) -> x509.Certificate:
        """Write a certificate for this file's key, which is made if there is none, and return it."""
        path, lifetime_s = self._path / f"{name}.key", MEMBER_LIFETIME_S if server_names else CA_LIFETIME_S
        key = _own_key(path)
        if key is None:
            key = new_key()
            write_atomic(path, key_pem(key), mode=0o600)
        certificate = self.issuer.issue(identity, key.public_key(), lifetime_s=lifetime_s, now=now, server_names=server_names)
        write_atomic(self._path / f"{name}.pem", _pem(certificate))
        return certificate


def made_at(invitation: str) -> float:
    """Return when an invitation to a swarm was made, in unix seconds, from its number (hexadecimal)."""
    return (int(invitation, 16) >> 64) / 1e9


def check_equipped(path: Path, run_id: str, aggregator: int, name: str, *, now: float) -> None:
    """Raise ConfigError unless the folder of a further aggregator has what `Authority.equip` gives, for that host name."""
    for needed in ("ca.pem", "server.key", "server.pem"):
        if not (path / needed).is_file():
            raise ConfigError(f"{path / needed}: is missing; {_EQUIP}")
    try:
        authority = Validity.of(x509.load_pem_x509_certificate((path / "ca.pem").read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / 'ca.pem'}: cannot be read ({reason_of(error)}); {_EQUIP}") from error
    if not _still_good(path, "server", set(names_of(_aggregator(run_id, aggregator), (name,))), now, authority, renews=False):
        raise ConfigError(
            f"{path / 'server.pem'}: does not name aggregator {aggregator} at {name}, does not fit server.key, has expired, or "
            f"is not valid yet by this machine's clock; {_EQUIP}"
        )


def _begins(path: Path, certificate: str) -> float:
    """Return from when on a certificate in a used invitation is valid, in unix seconds. Raises StorageError."""
    try:
        return Validity.of(x509.load_der_x509_certificate(base64.b64decode(certificate))).begins
    except (ValueError, TypeError) as error:
        raise StorageError(f"{path}: is damaged; delete it and invite again ({error})") from error


def _aggregator(run_id: str, number: int) -> Identity:
    return Identity(run_id, "coordinator", f"aggregator-{number}")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _own_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    """Return the key in this file, or None when there is no file. Raises ConfigError."""
    try:
        key = serialization.load_pem_private_key(read_private(path), None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is not a private key; remove it, and another one is made") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: is not a P-256 key; remove it, and another one is made")
    return key


def _still_good(
    path: Path, name: str, names: set[x509.GeneralName], now: float, authority: Validity, *, renews: bool = True
) -> bool:
    """Return whether a certificate of the folder bears these names, fits its key, and is valid and not due for renewal.

    Args:
        authority: one that ends with it is never due, for no other would end later. While it is not valid yet itself, the clock
            is behind, and nobody would take another one either.
        renews: False: whether it is due does not matter.
    """
    key = _own_key(path / f"{name}.key")
    try:
        certificate = x509.load_pem_x509_certificate((path / f"{name}.pem").read_bytes())
        present = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    validity = Validity.of(certificate)
    fits = key is not None and key.public_key() == certificate.public_key() and set(present) == names
    begun = validity.begins <= now or now < authority.begins
    due = renews and validity.ends < authority.ends - _ROUNDED_S and validity.renewal_due(now)
    return fits and begun and now < validity.ends and not due


def load_issuer(path: Path) -> Issuer:
    """Open the authority's key and certificate in a folder. Raises ConfigError that names the file."""
    try:
        key = serialization.load_pem_private_key(read_private(path / "ca.key"), None)
        certificate = x509.load_pem_x509_certificate((path / "ca.pem").read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: cannot be read ({error.strerror}); only the run's operator may do this"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: ca.key or ca.pem is damaged; restore both from a copy") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError(f"{path / 'ca.key'}: is not a P-256 key, as an authority's must be")
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{path}: ca.key and ca.pem do not belong together; restore both from a copy")
    try:
        certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except (x509.ExtensionNotFound, ValueError) as error:
        raise ConfigError(f"{path / 'ca.pem'}: has no subject key identifier, as an authority's must ({error})") from error
    return Issuer(key, certificate)


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a member's private key. Raises ConfigError that names the file."""
    try:
        key = serialization.load_pem_private_key(read_private(path), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be used ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: is not a P-256 key")
    return key


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path, version=INVITATION_FORMAT)
        peer_id, role = str(record["peer_id"]), str(record["role"])
        return {
            **record,
            "peer_id": peer_id,
            "role": role,
            "expires": float(record["expires"]),
            "number": int(record.get("number", 0)),
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{path}: is damaged; delete it and invite again ({error})") from error
