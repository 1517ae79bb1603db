"""An update with its bytes: what an owner streams to the other members, and each of them writes to its journal.

The manifest is JSON: the round, the tokens merged in all, the headers that the journal gives its fragments, and in a run with
an audit log the commit's entry, which the owner has signed. The bodies are the encoded merged pseudo-gradients. What a record
leaves out (`MergeRecord.residual`) stays with the owner: theta, the optimizer's state and the statistics do not depend on it,
and the next owner begins without it.

A state is named by the update that led to it, and the founding state by the digest of its parameters. The id of an update is a
hash of its base, its manifest and its bodies, and the manifest has the digest of the parameters that it was merged for. So who
holds an update knows what it leads to before it is computed; and who comes to other parameters notices with the next update.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from aggregator.storage.journal import CommittedRound
from aggregator.storage.journal_records import Buffer, Record, fragment_header, fragment_of
from edit.config.plugins import is_entry
from edit.council.record import Update, update_id
from edit.errors import EditError, RemoteProtocolError
from edit.merging.outer_state import MergeRecord, OuterState
from edit.plain_text import parse_json
from edit.records import FragmentCommit
from editpb.limits import MAX_COUNT, within
from editpb.status_messages import fragment_verdicts_from_pb, fragment_verdicts_to_pb

__all__ = ["MOST_MANIFEST", "Offer", "Round"]

MOST_MANIFEST = 16 << 20  # bytes of a manifest
_KEYS = {"round_id", "reason", "theta", "tokens", "fragments"}


@dataclass(frozen=True, slots=True)
class Round:
    """A merged round, not an outer step yet."""

    round_id: int
    reason: str  # why it closed
    theta: str  # digest of the parameters that it was merged for
    records: tuple[MergeRecord, ...]  # by fragment_id
    audit: str = ""  # its entry in the part's audit log; empty: there is none


@dataclass(frozen=True, slots=True)
class Offer:
    """An update and its bytes. manifest: JSON; bodies: of each fragment, in order of the manifest."""

    update: Update
    manifest: bytes
    bodies: tuple[Buffer, ...]

    @classmethod
    def of(cls, run_id: str, part: int, grant: int, base: str, tokens: int, merged: Round) -> Offer:
        """Return the offer of a merged round.

        Args:
            base: name of the part's state that it was merged for.
            tokens: merged in all, with it.
        """
        records = [replace(record, residual=None) for record in merged.records]
        headers = [fragment_header(merged.round_id, record, None) for record in records]
        values = {"round_id": merged.round_id, "reason": merged.reason, "theta": merged.theta, "tokens": tokens}
        values["fragments"] = headers
        if merged.audit:
            values["audit"] = merged.audit
        manifest = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
        bodies = tuple(record.payload.data if record.payload is not None else b"" for record in records)
        outer_step = records[0].outer_step + 1
        unnamed = cls(Update(part, outer_step, grant, base, base, base, tokens), manifest, bodies)
        found = update_id(run_id, part, outer_step, base, manifest, unnamed.hashes)
        return replace(unnamed, update=replace(unnamed.update, id=found, digest=found))

    @classmethod
    def again(cls, run_id: str, update: Update, committed: CommittedRound) -> Offer:
        """Return the offer that a journalled round was held as."""
        merged = Round(committed.round_id, committed.reason, committed.base, committed.fragments, committed.audit)
        return cls.of(run_id, update.part, update.grant, update.base, update.tokens, merged)

    @property
    def hashes(self) -> list[bytes]:
        """BLAKE3 of each body."""
        return [blake3(body).digest() for body in self.bodies]

    def check(self, run_id: str) -> None:
        """Raise RemoteProtocolError unless the bytes are those of the update's id."""
        update = self.update
        if len(self.manifest) > MOST_MANIFEST:
            raise RemoteProtocolError(f"part {update.part}: a manifest of {len(self.manifest)} bytes")
        found = update_id(run_id, update.part, update.outer_step, update.base, self.manifest, self.hashes)
        if found != update.id or update.digest != update.id:
            raise RemoteProtocolError(
                f"part {update.part}: the bytes to outer step {update.outer_step} are not those of its id"
            )

    def merged(self, outer: OuterState) -> Round:
        """Return the round in it. Raises RemoteProtocolError unless it fits this outer state, whose next step it is."""
        what = f"part {self.update.part}: the update to outer step {self.update.outer_step}"
        try:
            values = parse_json(self.manifest, finite=True)
            if not isinstance(values, dict) or values.keys() != (_KEYS | {"audit"} if outer.config.audit.enabled else _KEYS):
                raise ValueError("not a manifest")
            round_id, reason, theta, audit = values["round_id"], values["reason"], values["theta"], values.get("audit", "")
            if type(round_id) is not int or any(type(each) is not str for each in (reason, theta, audit)):
                raise ValueError("not a round")
            within("round_id", round_id, 0, MAX_COUNT)
            for text in (reason, theta, audit):
                text.encode()  # raises ValueError for halves of surrogate pairs, which no message holds
            if type(values["tokens"]) is not int or values["tokens"] != self.update.tokens:
                raise ValueError("other tokens than were announced")
            records = tuple(
                _record(round_id, header, body, outer) for header, body in zip(values["fragments"], self.bodies, strict=True)
            )
            records = outer.check(records)
        except (EditError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"{what} cannot be read ({str(error) or type(error).__name__})") from error
        return Round(round_id, reason, theta, records, audit)


def _record(round_id: int, header: Any, body: Buffer, outer: OuterState) -> MergeRecord:
    """Return one fragment.

    Once it is agreed on, every member publishes its verdicts, and judges later rounds with its statistics. So they must be what
    peers can read. Raises EditError, LookupError, TypeError, ValueError unless an owner would write it so.
    """
    numbers = header["outer_step"], header["fragment_id"]
    if (
        header["residual"] is not None
        or header["injected"] is not False
        or "rollback" in header
        or {*map(type, numbers)} != {int}
    ):
        raise ValueError("a fragment is written otherwise")  # before anything of it is made
    record, _ = fragment_of(Path("manifest"), Record(0, 0, header, body))
    if fragment_header(round_id, record, None) != header:
        raise ValueError(f"fragment {record.fragment_id} is written otherwise")
    if record.payload is not None and record.payload.codec != outer.recorded_as[record.fragment_id]:
        raise ValueError(f"fragment {record.fragment_id} is recorded in {record.payload.codec:.40}")
    _check_verdicts(record)
    if not is_entry(outer.config.penalty.detector) and not all(each.of_detector for each in record.statistics.values()):
        raise ValueError(f"fragment {record.fragment_id} has norm statistics that no detector computes")
    return record


def _check_verdicts(record: MergeRecord) -> None:
    """Raise EditError, TypeError or ValueError unless peers can read the verdicts, and only contributors have statistics."""
    said = FragmentCommit(
        fragment_id=record.fragment_id,
        payload=None,
        verdicts=record.verdicts,
        merged_norm=record.merged_norm,
        clip=record.clip,
    )
    fragment_verdicts_from_pb(fragment_verdicts_to_pb(said))
    if not record.statistics.keys() <= {verdict.peer_id for verdict in record.verdicts}:
        raise ValueError(f"fragment {record.fragment_id} has statistics of peers that contributed nothing")
