"""Putting the fragments of an update or a snapshot back together from the chunks of a stream. Pure: messages in, bytes out.

Owns: whose turn it is, and that what arrived is what the manifest announced. Must not know: connections, retries.
"""

from __future__ import annotations

import torch
from blake3 import blake3
from torch import Tensor

from edit.errors import RemoteProtocolError
from edit.records import Commit
from edit.schema import FragmentSpec, Schema
from editpb import data_pb2, tensors_pb2
from editpb.convert import Reassembly, commit_from_parts, update_manifest_from_pb

__all__ = ["SnapshotFragment", "UpdateAssembly"]


class UpdateAssembly:
    """One update: its manifest first, then the bytes of each fragment that was not rolled back, one after the other.

    Raises RemoteProtocolError for whatever does not fit `schema`, `outer_step` or the manifest.
    """

    def __init__(self, first: data_pb2.UpdatePart, schema: Schema, outer_step: int) -> None:
        if first.WhichOneof("kind") != "manifest":
            raise RemoteProtocolError("an update does not begin with its manifest")
        self._manifest = update_manifest_from_pb(first.manifest, schema, outer_step)
        self._payloads = [
            None
            if update.codec is None
            else Reassembly(f"update of fragment {spec.name}", update.total_bytes, update.total_bytes)
            for spec, update in zip(schema.fragments, self._manifest.fragments, strict=True)
        ]

    def take(self, part: data_pb2.UpdatePart) -> None:
        """Append one chunk to the fragment whose turn it is."""
        if part.WhichOneof("kind") != "chunk":
            raise RemoteProtocolError("an update has a second manifest")
        turn = next((i for i, payload in enumerate(self._payloads) if payload is not None and not payload.complete), None)
        payload = None if turn is None else self._payloads[turn]
        if payload is None or part.chunk.fragment_id != turn:
            raise RemoteProtocolError(f"an update's chunk of fragment {part.chunk.fragment_id} is out of turn")
        payload.take(part.chunk.chunk)

    def finish(self) -> Commit:
        """The commit with its payloads, once all bytes are there."""
        return commit_from_parts(self._manifest, [None if payload is None else payload.finish() for payload in self._payloads])


class SnapshotFragment:
    """One fragment of a snapshot, over as many streams as it takes. Raises RemoteProtocolError for what does not fit."""

    def __init__(self, fragment: FragmentSpec, digest: bytes) -> None:
        self._fragment = fragment
        self._digest = digest
        self.clear()

    @property
    def received(self) -> int:
        """Bytes so far: the offset from which to ask for more."""
        return self._bytes.received

    def clear(self) -> None:
        """Trust nothing that arrived."""
        total = 4 * self._fragment.numel
        self._bytes = Reassembly(f"snapshot of fragment {self._fragment.name}", total, total)
        self._hash = blake3()

    def take(self, chunk: tensors_pb2.Chunk) -> None:
        """Append one chunk."""
        self._bytes.take(chunk)
        self._hash.update(chunk.data)

    def finish(self) -> Tensor:
        """The flat fp32 tensor (numel,), once all bytes are there and their BLAKE3 is right."""
        data = self._bytes.finish()
        if self._hash.digest() != self._digest:
            raise RemoteProtocolError(f"snapshot of fragment {self._fragment.name}: its BLAKE3 is not the manifest's")
        return torch.frombuffer(data, dtype=torch.float32)
