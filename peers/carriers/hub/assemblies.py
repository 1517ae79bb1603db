"""What this rank reads, put together: its shards of one update, or of one snapshot; at a scorer a contribution. No I/O.

The bytes of an update may come ahead of its commit, sealed. Nobody gets them before the manifest is here, which brings the key;
without a manifest they are thrown away.

A stream may break anywhere: what has arrived stays, and the next one goes on from there. Positions count bytes over all
fragments. Everything raises RemoteProtocolError for what does not fit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, NoReturn, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from edit.codecs.error_feedback import codec_of
from edit.config.codec import CodecChoice
from edit.errors import RemoteProtocolError
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Commit, EncodedTensor
from editpb import data_pb2
from editpb.data_messages import commit_from_parts, update_manifest_from_pb
from editpb.limits import MAX_FOLLOWING
from editpb.messages import (
    ContributionHeader,
    ContributionRequest,
    FragmentUpdate,
    SeenHead,
    SnapshotManifest,
    SnapshotRequest,
    UpdateManifest,
    UpdateRequest,
)
from editpb.receipts import NOTHING_SEEN, Head
from editpb.transport.chunk_frames import ReceivedChunk
from editpb.transport.chunks import Chunk, Reassembly
from editpb.transport.sealing import Seal

__all__ = ["ContributionAssembly", "SnapshotAssembly", "TakesReceipts", "UpdateAssembly"]


class TakesReceipts(Protocol):
    """What an update asks of the receipts of a run with an audit log: `peers.carriers.hub.receipts.Receipts`."""

    @property
    def head(self) -> Head: ...

    def seen(self) -> SeenHead | None: ...

    def accept(
        self, manifest: UpdateManifest, message: data_pb2.LogReceipt | None, asked: Head
    ) -> Mapping[int, str | None]: ...

    def fault(self, manifest: UpdateManifest, why: str) -> NoReturn: ...


class UpdateAssembly:
    """This rank's shards of one update, over as many streams as it takes.

    A stream begins with the manifest, or ahead of the commit with a mark; one that goes on after the manifest, with neither.
    Then come the bytes of each fragment that was not rolled back, one after the other.

    Args:
        schema: of the model.
        outer_step: the one that the update leads to.
        due: the fragments that the update is of, ascending.
        shards: what this rank holds, one per fragment of the schema.
        round_id: the open round that may come to it; 0: it is asked for when it is committed.
        choice: the codecs of updates, as this peer knows the run's configuration; None: nothing is taken ahead.
        receipts: takes the receipt that the manifest brings, and says which bytes it is of; None: no receipt is asked for.
    """

    def __init__(
        self,
        schema: Schema,
        outer_step: int,
        due: Sequence[int],
        shards: Sequence[Shard],
        *,
        round_id: int = 0,
        choice: CodecChoice | None = None,
        receipts: TakesReceipts | None = None,
    ) -> None:
        self.outer_step = outer_step
        self.round_id = round_id if choice is not None else 0
        self._schema = schema
        self._due = tuple(due)
        self._shards = tuple(shards)
        self._choice = choice
        self._manifest: UpdateManifest | None = None
        self._begins = True  # the present stream, with its next message
        self._parts: list[_Part | None] = []  # by position in the manifest; None: rolled back
        self._at = 0  # the position that the next byte is of
        self._finished_bytes = 0  # of the positions before
        self._sealed: list[tuple[int, int]] = []  # positions with bytes to open, and how many
        self._receipts = receipts
        self._asked = NOTHING_SEEN  # the head of the log that the manifest was asked for with
        self._logged: dict[int, str] = {}  # by position: the BLAKE3 of bytes that are still to be compared

    def request(self, run_id: str, start: int, limit: int) -> UpdateRequest:
        """Return what to ask for, to get at most `limit` bytes from `start` on."""
        request = UpdateRequest(run_id, self.outer_step, self._shards, start, limit)
        if start > 0 and self._manifest is not None:
            return replace(request, digest=self._manifest.digest)
        self._begins = True
        if self._receipts is None:
            return replace(request, round_id=self.round_id)
        self._asked = self._receipts.head
        return replace(request, round_id=self.round_id, seen_size=self._asked.size, seen=self._receipts.seen())

    @property
    def manifest(self) -> Commit | None:
        """The commit without its payloads, once its message is in."""
        manifest = self._manifest
        if manifest is None:
            return None
        return Commit(
            outer_step=manifest.outer_step,
            round_id=manifest.round_id,
            digest=manifest.digest,
            reason=manifest.reason,
            fragments=tuple(update.commit for update in manifest.fragments),
        )

    def rolled_back(self, position: int) -> bool:
        """Return whether the fragment at this position of the manifest comes without a payload."""
        return self._update(position).codec is None

    def payload(self, position: int) -> EncodedTensor | None:
        """Return the fragment at this position of the manifest; None while bytes are missing."""
        update, part = self._update(position), self._parts[position]
        if part is None or update.codec is None or not part.bytes.complete or position in dict(self._sealed):
            return None
        self._compare(position)
        return EncodedTensor(update.codec, update.numel, part.bytes.finish())

    @property
    def received(self) -> int:
        """Bytes so far."""
        part = self._parts[self._at] if self._at < len(self._parts) else None
        return self._finished_bytes + (part.bytes.received if part is not None else 0)

    @property
    def total_bytes(self) -> int | None:
        """Of all of it; None before the manifest is in."""
        return None if self._manifest is None else sum(update.total_bytes for update in self._manifest.fragments)

    @property
    def complete(self) -> bool:
        """Whether all is here."""
        return self._manifest is not None and self._at == len(self._parts) and not self._sealed

    @property
    def at_an_end(self) -> bool:
        """Whether the bytes so far are those of whole fragments."""
        part = self._parts[self._at] if self._at < len(self._parts) else None
        return part is None or part.bytes.received == 0

    def take(self, part: data_pb2.UpdatePart | ReceivedChunk) -> bool:
        """Take the next message of the stream; return whether the manifest, or a whole fragment more, is here now."""
        if self._begins == isinstance(part, ReceivedChunk):
            raise RemoteProtocolError("an update is its manifest, and then chunks")
        if not isinstance(part, ReceivedChunk):
            self._begin(part)
            return self._manifest is not None
        arriving = self._parts[self._at] if self._at < len(self._parts) else None
        if arriving is None or part.fragment_id != self._due[self._at]:
            raise RemoteProtocolError(f"an update's chunk of fragment {part.fragment_id} is out of turn")
        arriving.bytes.take(part)
        before = self._at
        moved = self._move_on()
        if moved and self._manifest is not None and before not in dict(self._sealed):
            self._compare(before)
        return moved and self._manifest is not None

    def open_one(self) -> bool:
        """Open what came ahead of one fragment, once the manifest is here; return False when there is nothing to open."""
        if self._manifest is None or not self._sealed:
            return False
        position, count = self._sealed[0]
        part = self._parts[position]
        assert part is not None
        Seal(self._manifest.key, self._shards[self._due[position]]).in_place(part.bytes.arrived[:count])
        del self._sealed[0]
        if part.bytes.complete:
            self._compare(position)
        return True

    def _compare(self, position: int) -> None:
        """Raise ReceiptFault when a whole fragment's bytes are not those that the audit log names."""
        part, logged = self._parts[position], self._logged.pop(position, "")
        if logged and part is not None and blake3(part.bytes.finish()).hexdigest() != logged:
            assert self._receipts is not None and self._manifest is not None
            why = f"the bytes of fragment {self._due[position]} are not those of the log"
            self._receipts.fault(self._manifest, why)

    def refuse_end(self) -> None:
        """Raise RemoteProtocolError: bytes are missing."""
        if self._manifest is None:
            raise RemoteProtocolError("an empty update")
        if self._at == len(self._parts):
            raise RemoteProtocolError("an update that comes sealed where nothing comes ahead of its commit")
        part = self._parts[self._at]
        assert part is not None
        part.bytes.finish()

    def finish(self) -> Commit:
        """Return the commit with its payloads, once all bytes are here."""
        if self._manifest is None or self._at < len(self._parts):
            self.refuse_end()
        while self.open_one():
            pass
        for position in list(self._logged):
            self._compare(position)
        assert self._manifest is not None
        return commit_from_parts(self._manifest, [part.bytes.finish() if part else None for part in self._parts])

    def _update(self, position: int) -> FragmentUpdate:
        assert self._manifest is not None
        return self._manifest.fragments[position]

    def _begin(self, first: data_pb2.UpdatePart) -> None:
        match first.WhichOneof("kind"):
            case "manifest":
                self._take_manifest(first.manifest)
            case "ahead" if self._manifest is None and self.round_id and self._choice is not None:
                self._parts = self._parts or [_expected(self._shards[i], self._choice) for i in self._due]
            case _:
                raise RemoteProtocolError("an update does not begin with its manifest")
        self._begins = False
        self._move_on()

    def _take_manifest(self, message: data_pb2.UpdateManifest) -> None:
        manifest = update_manifest_from_pb(message, self._schema, self.outer_step, due=self._due, shards=self._shards)
        if self._manifest is not None:
            if (manifest.digest, manifest.round_id) != (self._manifest.digest, self._manifest.round_id):
                raise RemoteProtocolError(f"the update to outer step {self.outer_step} is another than before")
            return
        if self._receipts is not None:
            receipt = message.receipt if message.HasField("receipt") else None
            hashes = self._receipts.accept(manifest, receipt, self._asked)
            whole = [(at, hashes[i]) for at, i in enumerate(self._due) if self._shards[i].is_whole]
            self._logged = {at: logged for at, logged in whole if logged is not None}
        parts = [_announced(update, self._shards[i]) for update, i in zip(manifest.fragments, self._due, strict=True)]
        if manifest.key and self.received:
            if manifest.round_id != self.round_id or not all(map(_continues, self._parts, parts)):
                self.round_id, self._parts, self._at, self._finished_bytes = 0, [], 0, 0
                raise RemoteProtocolError("what came ahead of the commit is of another update")
            self._sealed = [(i, part.bytes.received) for i, part in enumerate(self._parts) if part and part.bytes.received]
            self._parts = [known if part else None for known, part in zip(self._parts, parts, strict=True)]
        else:
            self._parts, self._at, self._finished_bytes = parts, 0, 0
        self._manifest = manifest

    def _move_on(self) -> bool:
        """Move on to the next fragment that has bytes to come."""
        before = self._at
        while self._at < len(self._parts) and ((part := self._parts[self._at]) is None or part.bytes.complete):
            self._finished_bytes += part.bytes.received if part is not None else 0
            self._at += 1
        return self._at > before


class _Part(NamedTuple):
    """One fragment of an update, as far as it is here."""

    codec: str
    bytes: Reassembly


def _announced(update: FragmentUpdate, shard: Shard) -> _Part | None:
    """Return what a manifest announces of a fragment."""
    if update.codec is None:
        return None
    return _Part(update.codec, Reassembly(f"update of fragment {shard.fragment.name}", update.total_bytes, update.total_bytes))


def _expected(shard: Shard, choice: CodecChoice) -> _Part:
    """Return what comes ahead of a fragment, unless it is rolled back."""
    of = codec_of(shard.fragment, choice)
    size = of.encoded_size(of.cut_numel(shard))
    return _Part(of.name, Reassembly(f"update of fragment {shard.fragment.name}", size, size))


def _continues(known: _Part | None, announced: _Part | None) -> bool:
    """Return whether what came ahead can be the first bytes of what is announced."""
    if known is None or announced is None:
        return known is None or known.bytes.received == 0
    return (known.codec, known.bytes.total) == (announced.codec, announced.bytes.total)


class ContributionAssembly:
    """The bytes of one shard of what was merged, over as many streams as it takes.

    Args:
        header: of the shard.
        outer_step: that the commit led to.
    """

    def __init__(self, header: ContributionHeader, outer_step: int) -> None:
        self.header, self._outer_step = header, outer_step
        what = f"fragment {header.fragment_id} of {header.peer_id}, rank {header.rank}"
        self._part = Reassembly(what, header.total_bytes, header.total_bytes, header.payload_blake3 or None)

    @property
    def received(self) -> int:
        """Bytes so far."""
        return self._part.received

    @property
    def total_bytes(self) -> int:
        """Of all of it."""
        return self._part.total

    @property
    def complete(self) -> bool:
        """Whether all are here."""
        return self._part.complete

    @property
    def at_an_end(self) -> bool:
        """A call may end early at the end only."""
        return self.complete

    def request(self, run_id: str, start: int, limit: int) -> ContributionRequest:
        """Return what to ask for, to get at most `limit` bytes from `start` on."""
        header = self.header
        return ContributionRequest(
            run_id=run_id,
            outer_step=self._outer_step,
            peer_id=header.peer_id,
            fragment_id=header.fragment_id,
            rank=header.rank,
            offset=start,
            limit=limit,
        )

    def take(self, chunk: Chunk) -> None:
        """Take the next chunk. Raises RemoteProtocolError."""
        self._part.take(chunk)

    def clear(self) -> None:
        """Throw away what has arrived."""
        self._part.clear()

    def refuse_end(self) -> None:
        """Raise RemoteProtocolError: bytes are missing."""
        self._part.finish()

    def payload(self) -> EncodedTensor:
        """Return it, once complete. Raises RemoteProtocolError where its bytes are not those that its peer signed."""
        return EncodedTensor(self.header.codec, self.header.numel, self._part.finish())


class SnapshotAssembly:
    """Shards of one snapshot, fp32, over as many streams as it takes. Whole fragments are checked against their hashes.

    Args:
        manifest: of the snapshot.
        shards: what is read, by ascending fragment, none of them empty.
    """

    def __init__(self, manifest: SnapshotManifest, shards: Sequence[Shard]) -> None:
        self._outer_step = manifest.outer_step
        self._shards = tuple(shards)
        self._ends = list(accumulate(4 * shard.numel for shard in shards))
        self._parts = [_reassembly(manifest, shard) for shard in shards]
        self._tensors: dict[int, Tensor] = {}  # by fragment

    @property
    def received(self) -> int:
        """Bytes so far."""
        at = self.finished
        return self._start(at) + (0 if self.complete else self._parts[at].received)

    @property
    def total_bytes(self) -> int:
        """Of all of it."""
        return self._start(len(self._shards))

    @property
    def finished(self) -> int:
        """How many of the shards are here."""
        return len(self._tensors)

    @property
    def complete(self) -> bool:
        """Whether all are here."""
        return self.finished == len(self._shards)

    @property
    def at_an_end(self) -> bool:
        """Whether the bytes so far are those of whole shards."""
        return self.complete or self._parts[self.finished].received == 0

    def request(self, run_id: str, start: int, limit: int, ticket: str = "") -> SnapshotRequest:
        """Return what to ask for, to get at most `limit` bytes from `start` on."""
        first = bisect_right(self._ends, start)
        last = bisect_right(self._ends, start + limit - 1, hi=len(self._ends) - 1)
        shard = self._shards[first]
        return SnapshotRequest(
            run_id=run_id,
            outer_step=self._outer_step,
            fragment_id=shard.fragment.fragment_id,
            offset=start - self._start(first),
            boxes=None if shard.is_whole else shard.boxes,
            ticket=ticket,
            limit=limit,
            following=self._shards[first + 1 : min(last, first + MAX_FOLLOWING) + 1],
        )

    def take(self, chunk: Chunk) -> None:
        """Take the next chunk. What a whole fragment's bytes are not is thrown away with what arrived of it before."""
        if self.complete:
            raise RemoteProtocolError("a snapshot goes on after its end")
        part = self._parts[self.finished]
        part.take(chunk)
        if part.complete:
            fragment_id = self._shards[self.finished].fragment.fragment_id
            self._tensors[fragment_id] = torch.frombuffer(part.finish(), dtype=torch.float32)

    def clear_unfinished(self) -> None:
        """Throw away what has arrived of the shard that is not here yet: some of it may be wrong."""
        if not self.complete:
            self._parts[self.finished].clear()

    def refuse_end(self) -> None:
        """Raise RemoteProtocolError: bytes are missing."""
        self._parts[self.finished].finish()

    def tensor(self, shard: Shard) -> Tensor:
        """Return one of the shards, flat, once it is here."""
        return self._tensors[shard.fragment.fragment_id]

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0


def _reassembly(manifest: SnapshotManifest, shard: Shard) -> Reassembly:
    fragment, size = shard.fragment, 4 * shard.numel
    digest = manifest.fragment_hash[fragment.fragment_id] if shard.is_whole else None
    return Reassembly(f"snapshot of fragment {fragment.name}", size, size, digest)
