"""What peers fetch: published updates and snapshots, whole or cut to what one rank holds.

Payloads are cut fragment by fragment, while they are sent: a slow reader holds one fragment and not a replica's worth.
Snapshots are cut chunk by chunk, because every member may read them, also one who then reads nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
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
from editpb import tensors_pb2 as pb
from editpb.messages import SnapshotManifest, SnapshotRequest, UpdateRequest
from editpb.snapshot_cache import SnapshotCache

__all__ = ["MAX_PAST", "CommittedState", "PublishedState"]

MAX_PAST = 2  # past outer steps that readers may hold in memory
CHUNK_BYTES = 1 << 18  # of a snapshot: as much as a reader that reads nothing holds in memory


@dataclass(frozen=True, slots=True)
class CommittedState:
    """What is said of the outer parameters as last committed."""

    manifest: SnapshotManifest
    injected: Injected | None  # what of a run above is in theta

    @classmethod
    def of(cls, outer: OuterState) -> CommittedState:
        """Read the outer state, where nobody commits meanwhile."""
        manifest = SnapshotManifest(
            outer_step=outer.outer_step, digest=outer.digest, schema=outer.schema, fragment_hash=outer.fragment_hashes
        )
        return cls(manifest, outer.injected)


class PublishedState:
    """What a founded run shows to everybody.

    The outer state itself changes in the worker thread, between `begin` and `show` or `undo`. What is shown is replaced in one
    go, on the event loop, so nobody sees the outer step of one commit with the digest of another, or theta while it changes.

    Args:
        outer: the outer state; no commit of it is under way.
        store: has the published updates.
        now: the clock, in monotonic seconds.
    """

    def __init__(self, outer: OuterState, store: Store, background: Background, now: Callable[[], float]) -> None:
        self._outer, self._store, self._background, self._now = outer, store, background, now
        self._committed = CommittedState.of(outer)
        self._snapshots = SnapshotCache()
        self._at_rest = asyncio.Event()
        self._at_rest.set()

    @property
    def schema(self) -> Schema:
        """Of the run's model."""
        return self._committed.manifest.schema

    @property
    def outer_step(self) -> int:
        """The last committed outer step."""
        return self._committed.manifest.outer_step

    @property
    def digest(self) -> str:
        """Of theta at `outer_step`."""
        return self._committed.manifest.digest

    @property
    def injected(self) -> Injected | None:
        """What of a run above is in theta at `outer_step`."""
        return self._committed.injected

    @property
    def oldest_update(self) -> int:
        """The smallest outer step that an update is kept TO; 0 when none is."""
        return self._store.oldest_update

    def tick(self) -> None:
        """Keep the snapshots no longer that nobody has read lately: they take memory, and a commit copies what they hold."""
        self._snapshots.forget_unread(self._now())

    def begin(self) -> None:
        """A commit is about to change theta: nobody is given it until then."""
        self._at_rest.clear()

    def undo(self) -> None:
        """The commit came to nothing before it changed anything."""
        self._at_rest.set()

    def show(self, committed: CommittedState) -> None:
        """Show this from now on. Its commit is on disk, and theta has changed."""
        self._committed = committed
        self._at_rest.set()

    def update(self, outer_step: int) -> Commit:
        """Return the published update TO `outer_step`. Raises GoneError when it is not kept (any more)."""
        commit = self._store.update(outer_step)
        if commit is None:
            raise GoneError(f"the update to outer step {outer_step} is not kept; take a snapshot")
        return commit

    async def payloads(
        self, commit: Commit, wanted: UpdateRequest, room: asyncio.Semaphore
    ) -> AsyncGenerator[tuple[int, EncodedTensor, int], None]:
        """Yield (fragment_id, what of it is wanted, the first byte of that) in the commit's order, from wanted.offset on.

        Those that were rolled back are left out. room: for a shard that is cut, until the next one is asked for. Close the
        generator when it is not read to its end.
        """
        skipped = wanted.offset
        for fragment in commit.fragments:
            payload = fragment.payload
            if payload is None:
                continue
            of, shard = codec(payload.codec), wanted.shards[fragment.fragment_id] if wanted.shards is not None else None
            size = of.encoded_size(payload.numel if shard is None else of.cut_numel(shard))
            if size <= skipped:
                skipped -= size
                continue
            if shard is None or shard.is_whole:
                yield fragment.fragment_id, payload, skipped
            else:
                async with room:
                    yield fragment.fragment_id, await self._background.in_worker(of.cut, payload, shard), skipped
            skipped = 0

    async def describe_snapshot(self) -> SnapshotManifest:
        """Return what a snapshot of now holds. It is kept for a while, so that it can be fetched in several calls.

        Waits for the end of a commit that is being applied. While as many past ones are kept as may be, this is the newest of
        them, as long as the kept updates lead from there to now: so slow readers of a run with fast commits share a snapshot.
        Otherwise the oldest is forgotten.
        """
        while True:
            now = self._now()
            if (manifest := self._snapshots.known(self.outer_step, now)) is not None:
                return manifest
            kept = self._snapshots.steps
            full = len(kept) >= MAX_PAST
            if full and 0 < self.oldest_update <= kept[-1] + 1 and (shared := self._snapshots.known(kept[-1], now)) is not None:
                return shared
            if self._at_rest.is_set():
                if full:
                    self._snapshots.forget(kept[0])
                return self._snapshots.put(self._committed.manifest, tuple(self._outer.theta), now)
            await self._at_rest.wait()

    def snapshot_chunks(self, wanted: SnapshotRequest) -> Iterator[pb.Chunk]:
        """Return the chunks of one fragment of a described snapshot, or of the boxes of it that are wanted: flat fp32.

        Each is cut when it is asked for. Raises GoneError at once.
        """
        fragment = self._snapshots.take(wanted.outer_step, wanted.fragment_id, self._now())
        return _chunks(Shard(self.schema.fragments[wanted.fragment_id], wanted.boxes), fragment, wanted.offset)


def _chunks(shard: Shard, fragment: Tensor, offset: int) -> Iterator[pb.Chunk]:
    while offset < 4 * shard.numel:
        start = offset // 4
        part = shard.take_part(fragment, start, min(shard.numel, start + CHUNK_BYTES // 4))
        piece = part.contiguous().numpy().tobytes()[offset % 4 :]
        yield pb.Chunk(offset=offset, data=piece)
        offset += len(piece)
