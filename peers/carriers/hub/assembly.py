"""Putting an update back together from the messages of its streams: messages in, payloads out, no I/O.

The bytes of one fragment are put together by `editpb.chunks.Reassembly`; here is the order of the fragments, what is still to
be asked for, and the check that what arrived is what the manifest announced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from edit.errors import RemoteProtocolError
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Commit, EncodedTensor
from editpb import data_pb2
from editpb.chunks import Reassembly
from editpb.data_messages import commit_from_parts, update_manifest_from_pb
from editpb.messages import FragmentUpdate, UpdateManifest

__all__ = ["UpdateAssembly"]


class UpdateAssembly:
    """This rank's shards of one update, over as many streams as it takes.

    A stream begins with its manifest; then come the bytes of each fragment that was not rolled back, one after the other. The
    next stream need not repeat fragments that are complete (see `missing`). Raises RemoteProtocolError for whatever does not
    fit `schema`, `outer_step`, `due` or the manifest.

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
        self._updates: list[FragmentUpdate] = []  # of the first stream's manifest, which lists all fragments
        self._data: dict[int, bytearray] = {}  # by position in the manifest; whole ones only
        self._arriving: list[tuple[int, Reassembly]] = []  # of the present stream, in their order

    @property
    def missing(self) -> tuple[Shard, ...]:
        """What to ask for: this rank's shards, empty for the fragments that are here."""
        here = {self._due[position] for position in self._data}
        return tuple(Shard(shard.fragment, ()) if i in here else shard for i, shard in enumerate(self._shards))

    @property
    def manifest(self) -> Commit | None:
        """The commit without its payloads, once the first message is in."""
        manifest = self._manifest
        if manifest is None:
            return None
        fragments = tuple(update.commit for update in self._updates)
        return Commit(
            outer_step=manifest.outer_step,
            round_id=manifest.round_id,
            digest=manifest.digest,
            reason=manifest.reason,
            fragments=fragments,
        )

    def rolled_back(self, position: int) -> bool:
        """Return whether the fragment at this position of the manifest comes without a payload."""
        return self._updates[position].codec is None

    def payload(self, position: int) -> EncodedTensor | None:
        """Return the fragment at this position of the manifest; None while bytes are missing."""
        update, data = self._updates[position], self._data.get(position)
        return None if update.codec is None or data is None else EncodedTensor(update.codec, update.numel, data)

    @property
    def complete(self) -> bool:
        """Whether all is here."""
        return self._manifest is not None and all(
            update.codec is None or position in self._data for position, update in enumerate(self._updates)
        )

    def begin(self, first: data_pb2.UpdatePart) -> None:
        """Take a stream's first message. What an earlier stream left incomplete is forgotten."""
        if first.WhichOneof("kind") != "manifest":
            raise RemoteProtocolError("an update does not begin with its manifest")
        manifest = update_manifest_from_pb(first.manifest, self._schema, self.outer_step, due=self._due, shards=self.missing)
        if self._manifest is None:
            self._manifest, self._updates = manifest, list(manifest.fragments)
        elif (manifest.digest, manifest.round_id) != (self._manifest.digest, self._manifest.round_id):
            raise RemoteProtocolError(f"the update to outer step {self.outer_step} is another than before")
        self._arriving = []
        for position, (update, fragment_id) in enumerate(zip(manifest.fragments, self._due, strict=True)):
            if update.codec is not None and position not in self._data:
                name = f"update of fragment {self._schema.fragments[fragment_id].name}"
                self._arriving.append((position, Reassembly(name, update.total_bytes, update.total_bytes)))
        self._settle()

    def take(self, part: data_pb2.UpdatePart) -> bool:
        """Append one chunk to the fragment whose turn it is; return whether that is complete now."""
        if part.WhichOneof("kind") != "chunk":
            raise RemoteProtocolError("an update has a second manifest")
        if not self._arriving or part.chunk.fragment_id != self._due[self._arriving[0][0]]:
            raise RemoteProtocolError(f"an update's chunk of fragment {part.chunk.fragment_id} is out of turn")
        self._arriving[0][1].take(part.chunk.chunk)
        return self._settle()

    def finish(self) -> Commit:
        """Return the commit with its payloads, once all bytes are here."""
        if self._manifest is None:
            raise RemoteProtocolError("an empty update")
        if self._arriving:
            self._arriving[0][1].finish()
        return commit_from_parts(
            dataclasses.replace(self._manifest, fragments=tuple(self._updates)),
            [self._data.get(position) for position in range(len(self._updates))],
        )

    def _settle(self) -> bool:
        """Move on to the next fragment that has bytes to come."""
        before = len(self._arriving)
        while self._arriving and self._arriving[0][1].complete:
            position, payload = self._arriving.pop(0)
            self._data[position] = payload.finish()
        return len(self._arriving) < before
