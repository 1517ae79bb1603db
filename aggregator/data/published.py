"""What peers fetch: published updates and snapshots, whole or cut to what one rank holds.

Owns: which of them can still be had, the committed state as everybody sees it, and when payloads are cut: fragment by fragment,
while they are sent, so that a slow reader holds one fragment and not a replica's worth. Must not know: gRPC, rounds, who asks.

The outer state itself changes in the worker thread. What is shown here is replaced in one go, on the event loop, so nobody sees
the outer step of one commit with the digest of another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from torch import Tensor

from aggregator.storage.store import Store
from aggregator.worker_thread import Background
from edit.codecs import codec
from edit.errors import GoneError
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.merging.injection import Injected
from edit.merging.outer_state import OuterState
from edit.records import Commit, EncodedTensor
from editpb.messages import SnapshotManifest, SnapshotRequest, UpdateRequest
from editpb.snapshot_cache import SnapshotCache

__all__ = ["Downlink", "Head"]


@dataclass(frozen=True, slots=True)
class Head:
    """theta as last committed, its manifest, and what of a run above is in it."""

    manifest: SnapshotManifest
    theta: tuple[Tensor, ...]
    injected: Injected | None

    @classmethod
    def of(cls, outer: OuterState) -> Head:
        """Taken where nobody commits meanwhile."""
        manifest = SnapshotManifest(
            outer_step=outer.outer_step, digest=outer.digest, schema=outer.schema, fragment_hash=outer.fragment_hashes
        )
        return cls(manifest, tuple(outer.theta), outer.injected)


class Downlink:
    """Everything that is served of one founded run. now: monotonic seconds."""

    def __init__(self, head: Head, store: Store, background: Background, now: Callable[[], float]) -> None:
        self._head, self._store, self._background, self._now = head, store, background, now
        self._shelf = SnapshotCache()

    @property
    def schema(self) -> Schema:
        """The run's."""
        return self._head.manifest.schema

    @property
    def outer_step(self) -> int:
        """The last committed one."""
        return self._head.manifest.outer_step

    @property
    def digest(self) -> str:
        """Of theta at `outer_step`."""
        return self._head.manifest.digest

    @property
    def injected(self) -> Injected | None:
        """What of a run above is in theta at `outer_step`."""
        return self._head.injected

    @property
    def oldest_update(self) -> int:
        """The smallest outer step an update is kept TO; 0 when none is."""
        return self._store.oldest_update

    def show(self, head: Head) -> None:
        """A commit is on disk: from now on everybody sees this."""
        self._head = head

    def update(self, outer_step: int) -> Commit:
        """The published update TO `outer_step`. Raises GoneError when it is not kept (any more)."""
        commit = self._store.update(outer_step)
        if commit is None:
            raise GoneError(f"the update to outer step {outer_step} is not kept; take a snapshot")
        return commit

    async def payloads(self, commit: Commit, wanted: UpdateRequest) -> AsyncIterator[tuple[int, EncodedTensor]]:
        """(fragment_id, what of it is wanted), in the commit's order, without those that were rolled back."""
        for fragment in commit.fragments:
            payload = fragment.payload
            if payload is None:
                continue
            shard = wanted.shards[fragment.fragment_id] if wanted.shards is not None else None
            if shard is not None and not shard.is_whole:
                payload = await self._background.in_worker(codec(payload.codec).cut, payload, shard)
            yield fragment.fragment_id, payload

    def describe_snapshot(self) -> SnapshotManifest:
        """theta of now; it is kept for a while, so that it can be read in several calls."""
        now = self._now()
        return self._shelf.known(self.outer_step, now) or self._shelf.put(self._head.manifest, self._head.theta, now)

    async def snapshot_fragment(self, wanted: SnapshotRequest) -> Tensor:
        """One fragment of a snapshot that was described, or the boxes of it that are wanted: flat fp32. Raises GoneError."""
        fragment = self._shelf.take(wanted.outer_step, wanted.fragment_id, self._now())
        if wanted.boxes is None:
            return fragment
        shard = Shard(self.schema.fragments[wanted.fragment_id], wanted.boxes)
        return await self._background.in_worker(shard.take, fragment)
