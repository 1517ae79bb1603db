"""One peer's contribution to one fragment: the parts that its ranks send, until together they are the fragment.

Owns: which attempt counts, what may not differ between the ranks of a replica, when the fragment is whole. Must not know: how
bytes travel, rounds, gRPC, threads. Rules:
 1. A part belongs to an attempt of its replica. A newer attempt replaces the parts of older ones, as long as the fragment is
    not whole; then the fragment stays as it is, whatever comes. A part of an older attempt is stale.
 2. inner_steps and tokens are the replica's: ranks that differ are the peer's fault, and so is a rank that declares its part
    anew with other values.
 3. Whole: every part is in and measured, and they cover each element once. More elements than the fragment has, or as many
    with two of them the same, is the peer's fault, found when the part is declared, before memory is taken for it. Fewer: the
    round ends without this peer's fragment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from aggregator.storage.upload_buffer import Upload, UploadBuffer
from edit.errors import LocalProtocolError, RemoteProtocolError, StaleError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Shard, partition_fault
from edit.merging.merge import Measured, ShardPayload
from edit.merging.norms import whole_norm
from edit.records import EncodedTensor
from editpb.messages import ContributionHeader

__all__ = ["ShardedFragment"]


@dataclass(slots=True)
class _Declared:
    """One rank's part. norm: None until it is in and measured."""

    header: ContributionHeader
    shard: Shard
    upload: Upload
    norm: float | None = None

    def read(self) -> EncodedTensor:
        return EncodedTensor(self.header.codec, self.header.numel, self.upload.payload())


class ShardedFragment:
    """See the module's text."""

    def __init__(self, fragment: FragmentSpec, intake: UploadBuffer) -> None:
        self._fragment = fragment
        self._intake = intake
        self._attempt = -1
        self._declared: dict[int, _Declared] = {}
        self._covered = 0  # elements of the declared parts
        self._awaited = 0  # declared parts that are not measured yet
        self._whole: Measured | None = None

    @property
    def received_bytes(self) -> int:
        """Of all parts, so far."""
        return sum(declared.upload.received_bytes for declared in self._declared.values())

    def contribution(self, staleness: int = 0) -> Measured:
        """All of it; staleness: in outer steps. Raises LocalProtocolError before it is whole."""
        if self._whole is None:
            raise LocalProtocolError(f"fragment {self._fragment.fragment_id}: a contribution that is not whole")
        return replace(self._whole, staleness=staleness)

    def drop(self, reason: str) -> None:
        """Let go of all bytes, once and for all; who reads them keeps them until it is done."""
        for declared in self._declared.values():
            self._intake.drop(declared.upload, reason)
        self._declared.clear()

    def declare(self, header: ContributionHeader) -> Upload | None:
        """The upload for the bytes of this part; None: no bytes are needed, the fragment is whole from an earlier attempt.

        Raises StaleError for an older attempt, RemoteProtocolError (rules 2 and 3).
        """
        if header.attempt > self._attempt:
            if self._whole is not None:
                return None
            self._replace(header.attempt)
        elif header.attempt < self._attempt:
            raise StaleError(f"{_who(header)}: a newer attempt of this replica has come")
        known = self._declared.get(header.rank)
        if known is None:
            shard = Shard(self._fragment, header.boxes)
            self._check_fits(header, shard)
        elif known.header != header:
            raise RemoteProtocolError(f"{_who(header)} was declared with another {_difference(known.header, header)} before")
        upload = self._intake.open(header.peer_id, header.round_id, header.fragment_id, header.total_bytes, header.rank)
        if known is None:
            self._declared[header.rank] = _Declared(header, shard, upload)
            self._covered += shard.numel
            self._awaited += 1
        elif known.upload is not upload:  # the disk had refused the one before, so it was not measured
            known.upload = upload
        return upload

    def reader(self, upload: Upload) -> Callable[[], EncodedTensor] | None:
        """What reads the bytes of a complete part to measure them; None when that part is measured already.

        Raises StaleError when the part was replaced meanwhile.
        """
        declared = self._of(upload)
        return declared.read if declared.norm is None else None

    def measured(self, upload: Upload, norm: float) -> bool:
        """The part in that upload is here and its bytes are what they claim to be; whether this made the fragment whole."""
        declared = self._of(upload)
        if declared.norm is not None:
            return False
        declared.norm = norm
        self._awaited -= 1
        if self._awaited or self._covered < self._fragment.numel:
            return False
        self._whole = self._assembled()
        return True

    def _replace(self, attempt: int) -> None:
        self.drop("a newer attempt of this replica has come")
        self._covered = self._awaited = 0
        self._attempt = attempt

    def _check_fits(self, header: ContributionHeader, shard: Shard) -> None:
        if other := next((declared.header for declared in self._declared.values()), None):
            for field in ("inner_steps", "tokens"):
                mine, theirs = getattr(header, field), getattr(other, field)
                if mine != theirs:
                    raise RemoteProtocolError(f"{_who(header)} says {field} = {mine}, rank {other.rank} says {theirs}")
        covered = self._covered + shard.numel
        if covered > self._fragment.numel:
            raise RemoteProtocolError(
                f"{_who(header)}: the ranks' parts overlap: {covered} elements, the fragment has {self._fragment.numel}"
            )
        if covered == self._fragment.numel:
            shares = [*(declared.shard.boxes for declared in self._declared.values()), shard.boxes]
            if fault := partition_fault(self._fragment, shares):
                raise RemoteProtocolError(f"{_who(header)}: {fault}")

    def _of(self, upload: Upload) -> _Declared:
        declared = self._declared.get(upload.rank)
        if declared is None or declared.upload is not upload:
            raise StaleError(f"{upload}: a newer attempt of this replica has come")
        return declared

    def _assembled(self) -> Measured:
        ordered = [self._declared[rank] for rank in sorted(self._declared)]
        first, norms = ordered[0], [part.norm for part in ordered if part.norm is not None]
        return Measured(
            peer_id=first.header.peer_id,
            inner_steps=first.header.inner_steps,
            tokens=first.header.tokens,
            norm=whole_norm(norms) if len(norms) > 1 else norms[0],
            payload=first.read if first.shard.is_whole else tuple(ShardPayload(part.shard, part.read) for part in ordered),
        )


def _who(header: ContributionHeader) -> str:
    return f"contribution of {header.peer_id} to round {header.round_id}, fragment {header.fragment_id}, rank {header.rank}"


def _difference(one: ContributionHeader, other: ContributionHeader) -> str:
    """The first field in which they differ."""
    return next(field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name))
