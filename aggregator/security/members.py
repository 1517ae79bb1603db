"""members.json: who was ever enrolled in the run, with which certificate, and who was evicted, also before it was enrolled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from aggregator.security.certificates import public_hash
from edit.durable_files import read_json, write_json
from edit.errors import RefusedError, StorageError
from edit.plain_text import parse_json
from editpb.identity import Identity, is_signed_by
from editpb.limits import one_line

__all__ = ["OPERATOR_ID", "MemberRecord", "Members"]

MEMBERS_FORMAT = 3  # of members.json
OPERATOR_ID = "operator"
_ENROLLED = ("peer", "observer")  # the roles that somebody was enrolled for, where `Members.pin` says who was


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """One member."""

    peer_id: str
    role: str
    serial: str  # of its newest certificate, in hexadecimal
    issued: float  # unix seconds
    evicted: str | None = None  # the reason
    key: str = ""  # SHA-256 of its public key; empty: not seen since members.json had format 2
    expires: float = 0.0  # when its newest certificate ends, in unix seconds; 0: as for `key`

    def __post_init__(self) -> None:
        """Raise ValueError for values that members.json cannot have: it may have been edited."""
        texts = self.peer_id, self.role, self.serial, self.key, self.evicted or ""
        numbers = self.issued, self.expires
        if not (all(isinstance(one, str) for one in texts) and all(type(one) in (int, float) for one in numbers)):
            raise ValueError(f"a value of {self.peer_id!r:.80} is of the wrong type")
        int(self.serial or "0", 16)

    @property
    def order(self) -> tuple[float, int]:
        """By which a later certificate is told from an earlier one, also of the same second."""
        return self.issued, int(self.serial or "0", 16)


class Members:
    """Everybody who was ever enrolled. Raises StorageError when the file is damaged or cannot be written.

    Args:
        path: members.json.
        new: the run is new here, and the file is made if it is missing. Otherwise a missing file is an error: without it, an
            evicted member would be a stranger who may come in again.
        enrols: False at a further aggregator, which is not told who was enrolled. There whoever has a certificate of the run's
            authority is a member, until evicted, or until a certificate of the same name that was issued later has been seen.
    """

    def __init__(self, path: Path, *, new: bool = False, enrols: bool = True) -> None:
        self._path, self._enrols = path, enrols
        self._keys: Mapping[str, str] = {}  # see `pin`
        self._closed = False  # likewise
        self.keys: Mapping[str, str] = {}  # for which key each name counts, as far as known; replaced as a whole, never changed
        self._authority: x509.Certificate | None = None  # see `trust`
        self._redeemed: Mapping[str, int] = {}  # see `redeemed`
        if new and not path.exists():
            self._save({})
        try:
            rows, self._redeemed = _read(path)
            self._records = {row["peer_id"]: MemberRecord(**row) for row in rows}
            self._note_keys()
        except FileNotFoundError:
            without = "" if enrols else f'; if nobody was evicted, write {{"format": {MEMBERS_FORMAT}, "members": []}} into it'
            raise StorageError(
                f"{path}: is missing: it says who is a member and who was evicted; restore it from a copy{without}"
            ) from None
        except OSError as error:
            raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{path}: is damaged; restore it from a copy ({error})") from error

    @property
    def knows_all(self) -> bool:
        """Whether everybody who was enrolled is known here."""
        return self._enrols

    def all(self) -> tuple[MemberRecord, ...]:
        """Return everybody, by peer_id."""
        return tuple(self._records[peer_id] for peer_id in sorted(self._records))

    def get(self, peer_id: str) -> MemberRecord | None:
        """Return one member, or None."""
        return self._records.get(peer_id)

    def redeemed(self, peer_id: str) -> int:
        """Return the greatest number of this name's invitations that were redeemed; 0: none was, or not known here."""
        return self._redeemed.get(peer_id, 0)

    def why_refused(self, identity: Identity, certificate: x509.Certificate | None = None) -> str | None:
        """Return why the holder of a certificate for this identity may not take part; None: it may.

        Args:
            certificate: what it shows. One that was replaced by a newer one for ANOTHER key is refused: the member has another
                machine. After a renewal, which is for the same key, both are accepted until they expire. None: the newest one.
        """
        if self._replaced(identity, certificate):
            return "the authority was replaced, and nobody is its operator or observer any more"
        record = self._records.get(identity.peer_id)
        if record is None:
            return f"{identity.peer_id} is not a member of this run"
        if record.evicted is not None:
            return record.evicted
        if record.role != identity.role:
            return f"{identity.peer_id} is a member as {record.role}, not as {identity.role}"
        if identity.role in _ENROLLED and self.unenrolled(identity.peer_id):
            return f"{identity.peer_id} is not enrolled, whoever signed its certificate"
        if certificate is not None and (not _is_for(record, certificate) or self.superseded(identity.peer_id, certificate)):
            return f"the certificate of {identity.peer_id} was replaced by a newer one"
        return None

    def add_caller(self, identity: Identity, certificate: x509.Certificate) -> None:
        """Learn from a caller what was not known here; call it before `why_refused`.

        The certificate is known to be signed by the run's authority. Where nobody is enrolled (`enrols` is False), one that was
        issued later replaces an earlier one. Also the key and the end of the newest one may be missing.
        """
        record, issued = self._records.get(identity.peer_id), certificate.not_valid_before_utc.timestamp()
        shut_out = (record is not None and record.evicted is not None) or self.superseded(identity.peer_id, certificate)
        if (
            shut_out
            or self._replaced(identity, certificate)
            or (identity.role in _ENROLLED and self.unenrolled(identity.peer_id))
        ):
            return
        if record is not None and not record.key and _is_for(record, certificate):
            self.add(identity, certificate, record.issued)
        elif not self._enrols and (
            record is None
            or record.order < (issued, certificate.serial_number)
            or (self._keys.get(identity.peer_id) == public_hash(certificate) != record.key)
        ):
            self.add(identity, certificate, issued)

    def pin(self, keys: Mapping[str, str], *, closed: bool = False) -> None:
        """Say for which key (`public_hash`) each name was enrolled last, where members agree on that: no other counts.

        closed: everybody was enrolled who is a peer or an observer, and a certificate alone makes nobody one.
        """
        self._closed = closed
        if keys != self._keys:
            self._keys = keys
            self._note_keys()

    def trust(self, authority: x509.Certificate) -> None:
        """Say which authority makes operators and observers now, where one can be replaced: one before it makes none any more.

        Peers are not concerned: theirs are renewed one after the other (`pin` says which keys count).
        """
        self._authority = authority

    def _replaced(self, identity: Identity, certificate: x509.Certificate | None) -> bool:
        """Return whether this is an operator or observer of an authority that was replaced."""
        if self._authority is None or certificate is None or identity.role not in ("operator", "observer"):
            return False
        return not is_signed_by(certificate, self._authority)

    def unenrolled(self, peer_id: str) -> bool:
        """Return whether this is the name of nobody who was enrolled, where members agree on who was."""
        return self._closed and peer_id not in self._keys

    def superseded(self, peer_id: str, certificate: x509.Certificate) -> bool:
        """Return whether the name was enrolled again since, for another key than this certificate's."""
        return self._keys.get(peer_id, key := public_hash(certificate)) != key

    def valid_until(self, peer_id: str, certificate: x509.Certificate) -> float:
        """Return until when a connection counts that was opened with this certificate, in unix seconds; 0: the name has another
        key since, and it counts no more.

        The handshake proved that the caller has the key. So a renewed certificate for the same key is as good on the
        connection as the one that opened it, and nothing need be connected anew.
        """
        own, record = certificate.not_valid_after_utc.timestamp(), self._records.get(peer_id)
        if self.superseded(peer_id, certificate) or (record is not None and not _is_for(record, certificate)):
            return 0.0
        return max(own, record.expires) if record is not None else own

    def still_counts(self, peer_id: str, key: str) -> bool:
        """Return whether what a member sent with this key counts: it was not evicted, and has no other key.

        key: its `public_hash`; empty: it was not known.
        """
        record = self._records.get(peer_id)
        return record is not None and record.evicted is None and key in ("", self.keys.get(peer_id, key))

    def evicted(self, peer_id: str) -> bool:
        """Return whether the operator shut this member out."""
        record = self._records.get(peer_id)
        return record is not None and record.evicted is not None

    def add(self, identity: Identity, certificate: x509.Certificate, now: float, redeemed: int = 0) -> None:
        """Remember a member and its newest certificate. now: unix seconds. redeemed: the number of its invitation; 0: none."""
        record = MemberRecord(
            peer_id=identity.peer_id,
            role=identity.role,
            serial=f"{certificate.serial_number:x}",
            issued=now,
            key=public_hash(certificate),
            expires=certificate.not_valid_after_utc.timestamp(),
        )
        last = max(redeemed, self.redeemed(identity.peer_id))
        self._save({**self._records, identity.peer_id: record}, {**self._redeemed, identity.peer_id: last} if last else None)

    def evict(self, peer_id: str, reason: str, invited: str = "") -> None:
        """Shut a member out for good, or who is invited: no invitation of an evicted name can be redeemed.

        invited: the role for which the name has an open invitation; '': it has none. Raises RefusedError for a name that was
        neither enrolled nor invited, and for the run's own operator.
        """
        if peer_id == OPERATOR_ID:
            raise RefusedError(f"{OPERATOR_ID} is this folder's own identity and cannot be evicted")
        record = self._records.get(peer_id)
        if record is None and (invited or not self._enrols):
            record = MemberRecord(peer_id=peer_id, role=invited or "peer", serial="", issued=0.0)
        if record is None:
            raise RefusedError(f"{one_line(peer_id, 64)} is not a member of this run, and has no open invitation")
        reason = one_line(reason) or "evicted by the operator"
        self._save({**self._records, peer_id: dataclasses.replace(record, evicted=reason)})

    def _save(self, records: dict[str, MemberRecord], redeemed: Mapping[str, int] | None = None) -> None:
        """Write the file. redeemed: None: as it is."""
        rows, redeemed = [dataclasses.asdict(records[peer_id]) for peer_id in sorted(records)], redeemed or self._redeemed
        write_json(self._path, {"members": rows, "redeemed": redeemed}, version=MEMBERS_FORMAT, mode=0o600)
        self._records, self._redeemed = records, redeemed
        self._note_keys()

    def _note_keys(self) -> None:
        self.keys = {**{peer_id: record.key for peer_id, record in self._records.items() if record.key}, **self._keys}


def _is_for(record: MemberRecord, certificate: x509.Certificate) -> bool:
    """Return whether this is the member's newest certificate, or an earlier one for the same key."""
    return record.key == public_hash(certificate) if record.key else record.serial == f"{certificate.serial_number:x}"


def _read(path: Path) -> tuple[list[Any], Mapping[str, int]]:
    """Return the members' records, and the numbers of invitations that were redeemed, by name, which not every file has.

    Format 1 was a bare list of records; before format 3 they had neither `key` nor `expires`.
    """
    kept = parse_json(path.read_bytes())
    if isinstance(kept, list):
        return kept, {}
    before = isinstance(kept, dict) and kept.get("format") == 2
    values = read_json(path, version=2 if before else MEMBERS_FORMAT)
    redeemed = dict(values.get("redeemed", {}))
    if not all(type(number) is int for number in redeemed.values()):
        raise ValueError("the number of an invitation is none")
    return list(values["members"]), redeemed
