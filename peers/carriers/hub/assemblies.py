"""What this rank reads, put together: its shards of one update, or of one snapshot. No I/O.

A stream may break anywhere: what has arrived stays, and the next one goes on from there. Positions count bytes over all
fragments. Everything raises RemoteProtocolError for what does not fit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from edit.errors import RemoteProtocolError
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Commit, EncodedTensor
from editpb import data_pb2
from editpb.data_messages import commit_from_parts, update_manifest_from_pb
from editpb.limits import MAX_FOLLOWING
from editpb.messages import FragmentUpdate, SnapshotManifest, SnapshotRequest, UpdateManifest, UpdateRequest
from editpb.transport.chunk_frames import ReceivedChunk
from editpb.transport.chunks import Chunk, Reassembly

__all__ = ["SnapshotAssembly", "UpdateAssembly"]


class UpdateAssembly:
    """This rank's shards of one update, over as many streams as it takes.

    The first stream begins with the manifest; then come the bytes of each fragment that was not rolled back, one after the
    other.

    Args:
        schema: of the model.
        outer_step: the one that the update leads to.
        due: the fragments that the update is of, ascending.
        shards: what this rank holds, one per fragment of the schema.
    """

    def __init__(self, schema: Schema, outer_step: int, due: Sequence[int], shards: Sequence[Shard]) -> None:
        self.outer_step = outer_step
        self._schema = schema
        self._due = tuple(due)
        self._shards = tuple(shards)
        self._manifest: UpdateManifest | None = None
        self._awaits_manifest = True  # of the present stream
        self._finished_bytes = 0  # of the fragments in `_data`
        self._data: dict[int, memoryview] = {}  # by position in the manifest; whole ones only
        self._arriving: list[tuple[int, Reassembly]] = []  # in their order

    def request(self, run_id: str, start: int, limit: int) -> UpdateRequest:
        """Return what to ask for, to get at most `limit` bytes from `start` on."""
        if start == 0 or self._manifest is None:
            self._awaits_manifest = True
            return UpdateRequest(run_id, self.outer_step, self._shards, limit=limit)
        return UpdateRequest(run_id, self.outer_step, self._shards, start, limit, self._manifest.digest)

    @property
    def manifest(self) -> Commit | None:
        """The commit without its payloads, once the first message is in."""
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
        update, data = self._update(position), self._data.get(position)
        return None if update.codec is None or data is None else EncodedTensor(update.codec, update.numel, data)

    @property
    def received(self) -> int:
        """Bytes so far."""
        return self._finished_bytes + (self._arriving[0][1].received if self._arriving else 0)

    @property
    def total_bytes(self) -> int | None:
        """Of all of it; None before the manifest is in."""
        return None if self._manifest is None else sum(update.total_bytes for update in self._manifest.fragments)

    @property
    def complete(self) -> bool:
        """Whether all is here."""
        return self._manifest is not None and not self._arriving

    @property
    def at_an_end(self) -> bool:
        """Whether the bytes so far are those of whole fragments."""
        return not self._arriving or self._arriving[0][1].received == 0

    def take(self, part: data_pb2.UpdatePart | ReceivedChunk) -> bool:
        """Take the next message of the stream; return whether the manifest, or a whole fragment more, is here now."""
        if self._awaits_manifest == isinstance(part, ReceivedChunk):
            raise RemoteProtocolError("an update is its manifest, and then chunks")
        if not isinstance(part, ReceivedChunk):
            self._begin(part)
            return True
        if not self._arriving or part.fragment_id != self._due[self._arriving[0][0]]:
            raise RemoteProtocolError(f"an update's chunk of fragment {part.fragment_id} is out of turn")
        self._arriving[0][1].take(part)
        return self._move_on()

    def refuse_end(self) -> None:
        """Raise RemoteProtocolError: bytes are missing."""
        if self._manifest is None:
            raise RemoteProtocolError("an empty update")
        self._arriving[0][1].finish()

    def finish(self) -> Commit:
        """Return the commit with its payloads, once all bytes are here."""
        if self._manifest is None or self._arriving:
            self.refuse_end()
        assert self._manifest is not None
        return commit_from_parts(self._manifest, [self._data.get(i) for i in range(len(self._manifest.fragments))])

    def _update(self, position: int) -> FragmentUpdate:
        assert self._manifest is not None
        return self._manifest.fragments[position]

    def _begin(self, first: data_pb2.UpdatePart) -> None:
        if first.WhichOneof("kind") != "manifest":
            raise RemoteProtocolError("an update does not begin with its manifest")
        manifest = update_manifest_from_pb(first.manifest, self._schema, self.outer_step, due=self._due, shards=self._shards)
        self._awaits_manifest = False
        if self._manifest is not None:
            if (manifest.digest, manifest.round_id) != (self._manifest.digest, self._manifest.round_id):
                raise RemoteProtocolError(f"the update to outer step {self.outer_step} is another than before")
            return
        self._manifest = manifest
        for position, (update, fragment_id) in enumerate(zip(manifest.fragments, self._due, strict=True)):
            if update.codec is not None:
                name = f"update of fragment {self._schema.fragments[fragment_id].name}"
                self._arriving.append((position, Reassembly(name, update.total_bytes, update.total_bytes)))
        self._move_on()

    def _move_on(self) -> bool:
        """Move on to the next fragment that has bytes to come."""
        before = len(self._arriving)
        while self._arriving and self._arriving[0][1].complete:
            position, payload = self._arriving.pop(0)
            self._data[position] = payload.finish()
            self._finished_bytes += payload.received
        return len(self._arriving) < before


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
