"""members.json: who was ever enrolled in the run, with which certificate, and who was evicted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from edit.durable_files import read_json, write_json
from edit.errors import RefusedError, StorageError
from edit.plain_text import parse_json
from editpb.identity import Identity
from editpb.limits import one_line

__all__ = ["OPERATOR_ID", "MemberRecord", "Members"]

MEMBERS_FORMAT = 2  # of members.json
OPERATOR_ID = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """One member."""

    peer_id: str
    role: str
    serial: str  # of its newest certificate, in hexadecimal
    issued: float  # unix seconds
    evicted: str | None = None  # the reason


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
        if new and not path.exists():
            self._save({})
        try:
            self._records = {row["peer_id"]: MemberRecord(**row) for row in _read_rows(path)}
        except FileNotFoundError:
            without = "" if enrols else f'; if nobody was evicted, write {{"format": {MEMBERS_FORMAT}, "members": []}} into it'
            raise StorageError(
                f"{path}: is missing: it says who is a member and who was evicted; restore it from a copy{without}"
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{path}: is damaged; restore it from a copy ({error})") from error

    def all(self) -> tuple[MemberRecord, ...]:
        """Return everybody, by peer_id."""
        return tuple(self._records[peer_id] for peer_id in sorted(self._records))

    def get(self, peer_id: str) -> MemberRecord | None:
        """Return one member, or None."""
        return self._records.get(peer_id)

    def why_refused(self, identity: Identity, serial: int | None = None) -> str | None:
        """Return why the holder of a certificate for this identity may not take part; None: it may.

        Args:
            serial: of its certificate; a certificate that a newer one replaced is refused. None: of the newest one.
        """
        record = self._records.get(identity.peer_id)
        if record is None:
            return f"{identity.peer_id} is not a member of this run"
        if record.evicted is not None:
            return record.evicted
        if record.role != identity.role:
            return f"{identity.peer_id} is a member as {record.role}, not as {identity.role}"
        if serial is not None and f"{serial:x}" != record.serial:
            return f"the certificate of {identity.peer_id} was replaced by a newer one"
        return None

    def add_caller(self, identity: Identity, certificate: x509.Certificate) -> None:
        """Remember a caller where nobody is enrolled (`enrols` is False); call it before `why_refused`.

        The certificate is known to be signed by the run's authority. One that was issued later replaces an earlier one.
        """
        record = self._records.get(identity.peer_id)
        issued = certificate.not_valid_before_utc.timestamp()
        if self._enrols or (record is not None and (record.evicted is not None or record.issued >= issued)):
            return
        self.add(identity, certificate, issued)

    def evicted(self, peer_id: str) -> bool:
        """Return whether the operator shut this member out."""
        record = self._records.get(peer_id)
        return record is not None and record.evicted is not None

    def add(self, identity: Identity, certificate: x509.Certificate, now: float) -> None:
        """Remember a member and its newest certificate. now: unix seconds."""
        record = MemberRecord(peer_id=identity.peer_id, role=identity.role, serial=f"{certificate.serial_number:x}", issued=now)
        self._save({**self._records, identity.peer_id: record})

    def evict(self, peer_id: str, reason: str) -> None:
        """Shut a member out for good. Raises RefusedError for one that was never enrolled, and for the run's own operator."""
        if peer_id == OPERATOR_ID:
            raise RefusedError(f"{OPERATOR_ID} is this folder's own identity and cannot be evicted")
        record = self._records.get(peer_id)
        if record is None and not self._enrols:
            record = MemberRecord(peer_id=peer_id, role="peer", serial="", issued=0.0)
        if record is None:
            raise RefusedError(f"{one_line(peer_id, 64)} is not a member of this run")
        reason = one_line(reason) or "evicted by the operator"
        self._save({**self._records, peer_id: dataclasses.replace(record, evicted=reason)})

    def _save(self, records: dict[str, MemberRecord]) -> None:
        rows = [dataclasses.asdict(records[peer_id]) for peer_id in sorted(records)]
        write_json(self._path, {"members": rows}, version=MEMBERS_FORMAT, mode=0o600)
        self._records = records


def _read_rows(path: Path) -> list[Any]:
    """Return the members' records. Format 1 was a bare list of them."""
    kept = parse_json(path.read_bytes())
    return kept if isinstance(kept, list) else list(read_json(path, version=MEMBERS_FORMAT)["members"])
