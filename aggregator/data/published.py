"""What peers fetch: published updates and snapshots, whole or cut to what one rank holds; and, sealed until the commit, what is
staged of the update that the open round may come to.

Payloads are cut fragment by fragment, while they are sent: a slow reader holds one fragment and not a replica's worth.
Snapshots are cut chunk by chunk, because every member may read them, also one who then reads nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from aggregator.storage.store import Store
from aggregator.worker_thread import Background
from edit.codecs import codec
from edit.codecs.base import Codec
from edit.codecs.error_feedback import codec_of
from edit.errors import BusyError, GoneError, StorageError
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.merging.injection import Injected
from edit.merging.outer_state import OuterState
from edit.records import Commit, EncodedTensor
from editpb import tensors_pb2 as pb
from editpb.messages import LogReceipt, SnapshotManifest, SnapshotRequest, UpdateRequest
from editpb.snapshot_cache import SnapshotCache
from editpb.transport.sealing import new_key

__all__ = ["MAX_PAST", "ComingUpdate", "CommittedState", "PublishedState", "wanted_payloads"]

MAX_PAST = 2  # past outer steps that readers may hold in memory
CHUNK_BYTES = 1 << 18  # of a snapshot: as much as a reader that reads nothing holds in memory
AHEAD_S = 45.0  # a call waits for what is staged at most so long; less than a peer waits for a byte
MAX_WAITING = 1024  # calls that do so at a time


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


class ComingUpdate:
    """The update that an open round may come to: what the outer step will be of the fragments that are merged already.

    Its bytes are sent ahead of the commit, by ascending fragment, sealed with a key that only the commit's manifest brings.
    """

    def __init__(self, round_id: int, outer_step: int, due: Sequence[int]) -> None:
        self.round_id, self.outer_step = round_id, outer_step  # the step that the update leads to
        self.key = new_key()
        self.dropped = False
        self._due = tuple(sorted(due))
        self._staged: dict[int, EncodedTensor] = {}

    def stage(self, fragment_id: int, payload: EncodedTensor) -> None:
        """Take the encoded step of one fragment."""
        self._staged[fragment_id] = payload

    def drop(self) -> None:
        """Let go of all that is staged: the round came to nothing, and nobody will have use of it."""
        self.dropped = True
        self._staged.clear()

    def holds_more(self, wanted: UpdateRequest) -> bool:
        """Return whether there are bytes beyond those that a request has."""
        return sum(_size_of(payload, i, wanted) for i, payload in self.fragments) > wanted.offset

    @property
    def fragments(self) -> Iterator[tuple[int, EncodedTensor]]:
        """The staged fragments before the first one that is not, when one comes to it: their place in the update is known."""
        return ((i, self._staged[i]) for i in itertools.takewhile(lambda i: i in self._staged, self._due))


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
        self._coming: ComingUpdate | None = None
        self._keys: dict[int, tuple[int, bytes]] = {}  # of kept updates that this process sent ahead: round and key, by step
        self._staged = asyncio.Event()  # pulsed at each news of the coming update
        self._waiting = 0
        self._measuring = ThreadPoolExecutor(1, thread_name_prefix="requests")

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
        if (coming := self._coming) is not None and coming.outer_step == self.outer_step:
            self._keys[coming.outer_step] = coming.round_id, coming.key
            self._coming = None
        self._keys = {step: known for step, known in self._keys.items() if step >= self.oldest_update}
        self.end_round()

    def open_round(self, round_id: int, due: Sequence[int]) -> None:
        """A round is open that tries to advance from here, with these fragments."""
        self._coming = ComingUpdate(round_id, self.outer_step + 1, due)

    def stage(self, round_id: int, fragment_id: int, payload: EncodedTensor) -> None:
        """Show what the round's update will have of a fragment to those who ask ahead; nothing once that round is over."""
        if self._coming is not None and self._coming.round_id == round_id:
            self._coming.stage(fragment_id, payload)
            self._tell_waiting()

    def end_round(self) -> None:
        """The round is over. What it staged is dropped with its key, unless it was committed."""
        if self._coming is not None:
            self._coming.drop()
        self._coming = None
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        self._staged.set()
        self._staged.clear()

    async def coming(self, wanted: UpdateRequest) -> ComingUpdate | None:
        """Return the update that the round of the request may come to, once there are bytes of it beyond those it has, or
        none have come for a while; None as soon as that round is over. Raises BusyError when it would wait and too many do."""
        coming = self._coming_to(wanted)
        if coming is None or coming.holds_more(wanted):
            return coming
        if self._waiting >= MAX_WAITING:
            raise BusyError(f"{self._waiting} others wait for the next update here already; try again later")
        self._waiting += 1
        try:
            async with asyncio.timeout(AHEAD_S):
                while coming is not None and not coming.holds_more(wanted):
                    await self._staged.wait()
                    coming = self._coming_to(wanted)
        except TimeoutError:
            return self._coming_to(wanted)
        finally:
            self._waiting -= 1
        return coming

    def _coming_to(self, wanted: UpdateRequest) -> ComingUpdate | None:
        coming = self._coming
        fits = coming is not None and (coming.outer_step, coming.round_id) == (wanted.outer_step, wanted.round_id)
        return coming if fits else None

    def key(self, commit: Commit, wanted: UpdateRequest) -> bytes:
        """Return what opens the bytes of this update that the request's round has sent ahead; empty: they are of no use."""
        round_id, key = self._keys.get(commit.outer_step, (0, b""))
        return key if commit.round_id == wanted.round_id == round_id else b""

    async def receipt(self, wanted: UpdateRequest) -> LogReceipt | None:
        """Return the receipt of the wanted update's commit; None: none is wanted, or there is no audit log.

        Raises as `AuditLog.receipt`; where its entry could not be written, that is tried again before.
        """
        audit = self._store.audit
        if audit is None or wanted.seen_size is None:
            return None
        try:
            return audit.receipt(wanted.outer_step, wanted.seen_size)
        except BusyError:
            try:
                await self._background.in_worker(audit.flush)
            except StorageError as error:
                raise BusyError(f"no receipt for outer step {wanted.outer_step}: {error}") from error
            return audit.receipt(wanted.outer_step, wanted.seen_size)

    def update(self, outer_step: int) -> Commit:
        """Return the published update TO `outer_step`. Raises GoneError when it is not kept (any more)."""
        commit = self._store.update(outer_step)
        if commit is None:
            raise GoneError(f"the update to outer step {outer_step} is not kept; take a snapshot")
        return commit

    async def measure(self, wanted: UpdateRequest) -> None:
        """Count what is wanted of each fragment, in a thread of its own, one request after the other: of thin pieces it takes
        long, and the event loop asks for it more than once."""
        if wanted.shards is not None:
            of = self._outer.config.codec.downlink
            cut = [(codec_of(shard.fragment, of), shard) for shard in wanted.shards if not shard.is_whole]
            await asyncio.get_running_loop().run_in_executor(self._measuring, _measure, cut)

    async def payloads(
        self, fragments: Iterable[tuple[int, EncodedTensor]], wanted: UpdateRequest, room: asyncio.Semaphore
    ) -> AsyncGenerator[tuple[int, EncodedTensor, int], None]:
        """Yield what `wanted_payloads` does, cut in the worker thread. Close the generator when it is not read to its end."""
        async with contextlib.aclosing(wanted_payloads(fragments, wanted, room, self._background.in_worker)) as found:
            async for each in found:
                yield each

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

    def snapshot_chunks(self, wanted: SnapshotRequest, chunk_bytes: int = CHUNK_BYTES) -> Iterator[pb.Chunk]:
        """Return the chunks of one fragment of a described snapshot, or of the boxes of it that are wanted: flat fp32.

        Each is cut when it is asked for, and has at most `chunk_bytes` and CHUNK_BYTES. Raises GoneError at once.
        """
        fragment = self._snapshots.take(wanted.outer_step, wanted.fragment_id, self._now())
        return _chunks(
            Shard(self.schema.fragments[wanted.fragment_id], wanted.boxes),
            fragment,
            wanted.offset,
            min(chunk_bytes, CHUNK_BYTES),
        )


async def wanted_payloads(
    fragments: Iterable[tuple[int, EncodedTensor]],
    wanted: UpdateRequest,
    room: asyncio.Semaphore,
    in_worker: Callable[..., Awaitable[EncodedTensor]],
) -> AsyncGenerator[tuple[int, EncodedTensor, int], None]:
    """Yield (fragment_id, what of it is wanted, the first byte of that) in the order given, from wanted.offset on.

    Close the generator when it is not read to its end.

    Args:
        room: for a shard that is cut, until the next one is asked for.
        in_worker: runs a call in a thread.
    """
    skipped = wanted.offset
    for fragment_id, payload in fragments:
        if (size := _size_of(payload, fragment_id, wanted)) <= skipped:
            skipped -= size
            continue
        shard = wanted.shards[fragment_id] if wanted.shards is not None else None
        if shard is None or shard.is_whole:
            yield fragment_id, payload, skipped
        else:
            async with room:
                yield fragment_id, await in_worker(codec(payload.codec).cut, payload, shard), skipped
        skipped = 0


def _measure(cut: Sequence[tuple[Codec, Shard]]) -> None:
    for one, shard in cut:
        one.cut_numel(shard)  # the shard remembers it


def _size_of(payload: EncodedTensor, fragment_id: int, wanted: UpdateRequest) -> int:
    """Return how many bytes of a fragment are wanted."""
    if wanted.shards is None:
        return memoryview(payload.data).nbytes
    of = codec(payload.codec)
    return of.encoded_size(of.cut_numel(wanted.shards[fragment_id]))


def _chunks(shard: Shard, fragment: Tensor, offset: int, chunk_bytes: int) -> Iterator[pb.Chunk]:
    while offset < 4 * shard.numel:
        start = offset // 4
        part = shard.take_part(fragment, start, min(shard.numel, start + chunk_bytes // 4))
        piece = part.contiguous().numpy().tobytes()[offset % 4 :]
        yield pb.Chunk(offset=offset, data=piece)
        offset += len(piece)
