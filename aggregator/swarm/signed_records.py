"""What a member says in the DHT of where it is: a small record that only this member can write.

A DHT is anybody's. So each record carries the member's certificate and a signature over all that the DHT keeps with it: the
key, the subkey (whose record it is), when it expires, and the value. Nobody else can write a record, change it, or make it live
longer; nor can who was evicted, or whose certificate has ended. What a member says is only where it is: a lie costs others an
attempt to connect, for a connection shows who is there.

`SignedRecords` is a `RecordValidatorBase` of hivemind, without its import: each node of a member asks it of each record that
others store or send.

    stored value  msgpack of [FORMAT, certificate (DER), signature (ECDSA, SHA-256), value]
    value         msgpack of {addresses, maddr, stamp, leader, expires}, of a coordinator also {enrol}
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Protocol

import msgpack
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edit.council.record import MOST_ADDRESSES, MOST_TEXT, Stamp, check_count
from edit.errors import ConfigError, EditError, LocalProtocolError
from edit.plain_text import shallow
from editpb.identity import Identity, from_certificate
from editpb.invitation import is_endpoint, is_maddr
from editpb.limits import is_id

__all__ = ["FORMAT", "LONGEST_S", "MOST_BYTES", "Announcement", "DhtRecord", "SignedRecords", "key_of"]

FORMAT = 1
MOST_BYTES = 8192  # of a stored value
LONGEST_S = 120.0  # that a record may last from now
_PURPOSE = b"edit: where a member of a swarm is, 1\n"  # the member's key signs TLS handshakes, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a member says. Raises ValueError for what no member may say."""

    addresses: tuple[str, ...]  # HOST:PORT of its host
    maddr: str  # of its libp2p node, or ""
    stamp: Stamp  # of its record of the swarm; tells a person how far it is, and decides nothing
    leader: str  # whom it hears, or ""; likewise
    expires: float  # unix seconds
    enrol: tuple[str, ...] = ()  # HOST:PORT where invitations of a run with a coordinator are redeemed

    def __post_init__(self) -> None:
        if not self.addresses or not _are_endpoints(self.addresses):
            raise ValueError(f"addresses {self.addresses!r:.80}")
        if not _are_endpoints(self.enrol):
            raise ValueError(f"enrol {self.enrol!r:.80}")
        if self.maddr != "" and not (isinstance(self.maddr, str) and is_maddr(self.maddr)):
            raise ValueError(f"maddr {self.maddr!r:.80}")
        if len(self.stamp) != 3:
            raise ValueError(f"stamp {self.stamp!r:.80}")
        for count in self.stamp:
            check_count("stamp", count)
        if self.leader != "" and not (isinstance(self.leader, str) and is_id(self.leader)):
            raise ValueError(f"leader {self.leader!r:.80}")
        if type(self.expires) is not float or not math.isfinite(self.expires):
            raise ValueError(f"expires {self.expires!r:.80}")

    def as_value(self) -> dict[str, object]:
        """Return it as the DHT's value."""
        names = ("addresses", "stamp", "maddr", "leader", "expires", *(("enrol",) if self.enrol else ()))
        return {name: list(each) if isinstance(each := getattr(self, name), tuple) else each for name in names}

    @classmethod
    def from_value(cls, value: object) -> Announcement:
        """Return what `as_value` wrote. Raises ValueError, TypeError for anything else."""
        shallow(value)  # before it is shown
        if not isinstance(value, dict) or not all(isinstance(value.get(name), list) for name in ("addresses", "stamp")):
            raise ValueError(f"no announcement: {value!r:.80}")
        if len(value["stamp"]) != 3:
            raise ValueError(f"stamp {value['stamp']!r:.80}")
        lists = {name: tuple(value[name]) for name in ("addresses", "enrol") if isinstance(value.get(name), list)}
        return cls(**{**value, **lists, "stamp": Stamp(*value["stamp"])})


def _are_endpoints(found: object) -> bool:
    return (
        isinstance(found, tuple)
        and len(found) <= MOST_ADDRESSES
        and all(isinstance(each, str) and len(each) <= MOST_TEXT and is_endpoint(each) for each in found)
    )


class DhtRecord(Protocol):
    """`hivemind.dht.validation.DHTRecord`."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


class SignedRecords:
    """Signs this member's records, and checks those of all members. Raises ConfigError for keys that cannot be read.

    Args:
        run_id: whose members count.
        key: the DHT's key of the run's records; nothing else is stored at this node.
        authority: certificates in PEM; a member's must be signed by one of them.
        private_key, certificate: this member's, in PEM; b"": who only looks, and signs nothing.
        evicted: whether the record of the swarm shuts a peer out.
        unix: seconds since 1970.
        role: of those whose records count, as their certificates say it.
    """

    def __init__(
        self,
        run_id: str,
        key: bytes,
        authority: bytes,
        private_key: bytes,
        certificate: bytes,
        evicted: Callable[[str], bool],
        unix: Callable[[], float] = time.time,
        role: str = "peer",
    ) -> None:
        self._role = role
        self._run_id, self._key, self._evicted, self._unix = run_id, key, evicted, unix
        self.renew(certificate, authority)
        self._private_key: ec.EllipticCurvePrivateKey | None = None
        if not private_key:
            return
        try:
            own = serialization.load_pem_private_key(private_key, None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"peer.key, peer.pem or ca.pem is damaged ({error})") from error
        if not isinstance(own, ec.EllipticCurvePrivateKey):
            raise ConfigError("peer.key is not a P-256 key")
        self._private_key = own

    def renew(self, certificate: bytes, authority: bytes) -> None:
        """Sign with this certificate (PEM) from now on, which is for the same key, and trust these authorities.

        Raises ConfigError.
        """
        try:
            own = x509.load_pem_x509_certificate(certificate) if certificate else None
            self._certificate = own.public_bytes(serialization.Encoding.DER) if own is not None else b""
            self._authorities = x509.load_pem_x509_certificates(authority)
        except ValueError as error:
            raise ConfigError(f"peer.key, peer.pem or ca.pem is damaged ({error})") from error
        self._member = lru_cache(1024)(self._member_of)  # of certificates of this run only: others raise

    # -- hivemind's RecordValidatorBase ------------------------------------------------------------------------------------

    priority = 0

    def sign_value(self, record: DhtRecord) -> bytes:
        """Return the value with this member's signature. Raises LocalProtocolError for who only looks."""
        if self._private_key is None:
            raise LocalProtocolError("nothing is announced in the DHT without a certificate of the run")
        signature = self._private_key.sign(_signed(record, record.value), ec.ECDSA(hashes.SHA256()))
        return bytes(msgpack.packb([FORMAT, self._certificate, signature, record.value]))

    def validate(self, record: DhtRecord) -> bool:
        """Return whether a member wrote this record, as it is."""
        return self.read(record) is not None

    def strip_value(self, record: DhtRecord) -> bytes:
        """Return the value without the signature. Call it for what is valid."""
        return _unpacked(record.value)[2]

    def merge_with(self, other: object) -> bool:
        """Return False: see the base."""
        return False

    # -- for who looks -----------------------------------------------------------------------------------------------------

    def read(self, record: DhtRecord) -> tuple[str, Announcement] | None:
        """Return (peer_id, what it says), or None for what no member wrote, and what lasts no longer or too long."""
        now, expires = self._unix(), record.expiration_time
        if record.key != self._key or type(record.value) is not bytes or len(record.value) > MOST_BYTES:
            return None
        if type(expires) is not float or not now < expires <= now + LONGEST_S:
            return None
        try:
            certificate, signature, value = _unpacked(record.value)
            identity, public_key, begins, ends = self._member(certificate)
            if record.subkey != msgpack.packb(identity.peer_id) or not begins <= now < ends or self._evicted(identity.peer_id):
                return None
            public_key.verify(signature, _signed(record, value), ec.ECDSA(hashes.SHA256()))
            said = Announcement.from_value(msgpack.unpackb(value, strict_map_key=True))
        except (ValueError, TypeError, KeyError, InvalidSignature, msgpack.UnpackException, EditError):
            return None
        return (identity.peer_id, said) if said.expires == expires else None

    def found(self, items: Iterable[tuple[bytes, bytes, float]], record: type[Any]) -> Mapping[str, Announcement]:
        """Return what is valid of (subkey, value, expiration) as a node sent them; by peer_id, the latest.

        record: makes a `DhtRecord` of its four fields.
        """
        latest: dict[str, Announcement] = {}
        for subkey, value, expires in items:
            read = self.read(record(self._key, subkey, value, expires))
            if read is not None and (read[0] not in latest or latest[read[0]].expires < read[1].expires):
                latest[read[0]] = read[1]
        return latest

    def _member_of(self, certificate: bytes) -> tuple[Identity, ec.EllipticCurvePublicKey, float, float]:
        """Return who a certificate is of, and when it begins and ends. Raises ValueError, EditError when it is no member's."""
        read = x509.load_der_x509_certificate(certificate)
        if not any(_issued(read, authority, self._unix()) for authority in self._authorities):
            raise ValueError("signed by another authority")
        identity, public_key = from_certificate(read), read.public_key()
        if (identity.run_id, identity.role) != (self._run_id, self._role) or not isinstance(
            public_key, ec.EllipticCurvePublicKey
        ):
            raise ValueError("of another run or role")
        return identity, public_key, read.not_valid_before_utc.timestamp(), read.not_valid_after_utc.timestamp()


def key_of(run_id: str) -> str:
    """Return the DHT's key under which the members of a run are."""
    return f"{run_id}.members"


def _issued(certificate: x509.Certificate, authority: x509.Certificate, now: float) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return authority.not_valid_before_utc <= datetime.fromtimestamp(now, UTC) < authority.not_valid_after_utc


def _unpacked(stored: bytes) -> tuple[bytes, bytes, bytes]:
    """Return (certificate, signature, value). Raises ValueError, UnpackException."""
    parts = msgpack.unpackb(stored)
    if (
        not isinstance(parts, list)
        or len(parts) != 4
        or parts[0] != FORMAT
        or not all(type(each) is bytes for each in parts[1:])
    ):
        raise ValueError("no signed record")
    return parts[1], parts[2], parts[3]


def _signed(record: DhtRecord, value: bytes) -> bytes:
    """Return what is signed: unambiguous, for each length is said."""
    lengths = struct.pack(">3Qd", len(record.key), len(record.subkey), len(value), record.expiration_time)
    return _PURPOSE + lengths + record.key + record.subkey + value
