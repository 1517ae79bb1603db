"""What the ranks of a replica fetch together: updates, whole or fragment by fragment, and snapshots.

There is one background transfer per update, begun once and resumed after a break. It may begin while the update's round is
open, with what is merged already; nothing of that is used before the manifest of the commit is here. No rank goes on before all
ranks have their shards of the same update or snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from edit.config.codec import CodecChoice
from edit.config.run import SyncConfig
from edit.errors import EditError, OutdatedError, RemoteProtocolError, TransportError
from edit.fragments.groups import fragments_due
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Committed, DescribedSnapshot, EncodedTensor, Lacks, RolledBack, Snapshot, Update
from editpb.messages import SnapshotManifest
from peers.carriers.hub.assemblies import UpdateAssembly
from peers.carriers.hub.data_calls import DataCalls, Wanted, once
from peers.carriers.hub.receipts import Receipts
from peers.carriers.io_thread import IoThread
from peers.carriers.rank_agreement import RankAgreement

__all__ = ["Arrival", "Downlink"]

SNAPSHOT_TRIES = 5
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Transfer: TypeAlias = Callable[[Callable[[], None]], Coroutine[Any, Any, None]]
Start: TypeAlias = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class _Download:
    """One update on its way to this rank. Everything happens on the loop's thread."""

    def __init__(self, assembly: UpdateAssembly, transfer: Transfer, start: Start) -> None:
        self.assembly = assembly
        self._transfer = transfer  # completes the assembly; calls back at each piece of news
        self._start = start
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # pulsed at each piece of news
        self._there = False  # whether the update is known to be there
        self._error: EditError | None = None

    @property
    def is_there(self) -> bool:
        """Whether the update is known to be committed; then somebody may wait for it."""
        return self._there

    @property
    def broke_ahead(self) -> bool:
        """Whether the transfer ended before the manifest came, and may go on: its round was not given up."""
        ended = self._task is not None and self._task.done()
        return ended and self.assembly.manifest is None and isinstance(self._error, TransportError)

    def cancel(self) -> None:
        """Fetch it no longer."""
        if self._task is not None:
            self._task.cancel()

    def begin(self, *, ahead: bool = False) -> None:
        """Fetch it, or resume where the stream broke. ahead: it need not be there yet."""
        self._there = self._there or not ahead
        if self._task is None or self._task.done():
            self._error = None
            self._task = None if self.assembly.complete else self._start(self._run())

    async def until(self, look: Callable[[UpdateAssembly], _T | None]) -> _T:
        """Begin or resume; return what `look` finds once it finds something. Raises what ended the transfer."""
        self.begin()
        while (found := look(self.assembly)) is None:
            if self._task is None or self._task.done():
                raise self._error or TransportError(f"update {self.assembly.outer_step} is no longer fetched")
            await self._news.wait()
        return found

    async def _run(self) -> None:
        early = not self._there
        try:
            try:
                await self._transfer(self._tell)
            except OutdatedError:
                if not (early and self._there):
                    raise
                await self._transfer(self._tell)  # the first had asked before the update was there
        except EditError as error:
            self._error = error
        finally:
            asyncio.get_running_loop().call_soon(self._tell)  # once this task is done

    def _tell(self) -> None:
        self._news.set()
        self._news.clear()


@dataclass(frozen=True, slots=True)
class Arrival:
    """One fragment of an update that is still on its way; an `edit.records.Arriving`."""

    agreement: RankAgreement
    download: _Download
    position: int

    def wait(self) -> EncodedTensor:
        """Block until every rank has its shard. All ranks call it in the same order; all get it or raise the same.

        Raises TransportError when cut off (called again, it resumes where the stream broke), RemoteProtocolError when what came
        was bad again and again, GoneError when the update is no longer kept; also EvictedError, RefusedError, Interrupted.
        """
        return self.agreement.together(self.download.until(lambda assembly: assembly.payload(self.position)))


class Downlink:
    """Fetches this rank's shards of updates and snapshots, in step with the other ranks.

    Args:
        io: the I/O thread.
        data: the calls that carry the bytes.
        agreement: of the replica's ranks.
        schema: of the model.
        shards: what this rank holds, one per fragment of the schema.
        sync: says which fragments an outer step exchanges. In its mode "forward" updates are returned as soon as every rank has
            the manifest; their payloads arrive in the background.
        choice: the codecs of updates.
        receipts: of a run with an audit log, at rank 0; else None.
        wanted: whether a transfer is worth another try.
        attending: whether one is that runs ahead of a commit.
    """

    def __init__(
        self,
        io: IoThread,
        data: DataCalls,
        agreement: RankAgreement,
        schema: Schema,
        shards: Sequence[Shard],
        sync: SyncConfig,
        choice: CodecChoice,
        *,
        wanted: Wanted,
        attending: Wanted,
        receipts: Receipts | None = None,
    ) -> None:
        self._io = io
        self._data = data
        self._agreement = agreement
        self._schema = schema
        self._shards = tuple(shards)
        self._sync = sync
        self._choice = choice
        self._wanted = wanted
        self._attending = attending
        self._receipts = receipts
        self._comparing, self._compared = asyncio.Lock(), False
        self._downloads: dict[int, _Download] = {}  # by outer step, until `forget`; on the loop's thread
        self._tasks: set[asyncio.Task[None]] = set()  # of downloads, also of those that nobody asks for any more

    # ---- the main thread ---------------------------------------------------------------------------------------------------

    def update(self, outer_step: int) -> Committed:
        """Return the update that led to `outer_step`, at every rank.

        Raises TransportError when a rank was cut off (asked again, it resumes where the stream broke), OutdatedError or
        RemoteProtocolError when a rank cannot get it, ReceiptFault when it is not what the audit log must say.
        """
        return self._agreement.together(self._update(outer_step))

    def snapshot(self, lacks: Lacks | None = None) -> Snapshot:
        """Return the outer parameters of the latest commit, of one outer step at all ranks, and abandon all updates.

        lacks: what of them is fetched; the others are empty tensors. None: all. Raises TransportError, also when what arrived
        was damaged again and again; ReceiptFault when they are not those of the audit log.
        """
        self._io.post(lambda: self.forget(taken=False))
        for _ in range(SNAPSHOT_TRIES):
            try:
                manifest = self._agreement.on_leader(self._described)
                lacking = None if lacks is None else lacks(_described(manifest))
                shards = self._shards if lacking is None else _some(self._shards, lacking.fragments)
                snapshot = self._agreement.together(self._data.snapshot(manifest, shards, self._wanted))
                if (receipts := self._receipts) is not None:
                    self._io.change(partial(receipts.at, snapshot.outer_step, snapshot.digest))
                return snapshot
            except OutdatedError as error:
                _log.info("the snapshot is gone (%s); taking a newer one", error)
            except RemoteProtocolError as error:
                raise TransportError(f"no snapshot: {error}") from error
        raise TransportError("snapshots are gone before they are read; this link is too slow for the run")

    # ---- the loop's thread -------------------------------------------------------------------------------------------------

    def foresee(self, outer_step: int) -> None:
        """Begin to fetch the update that led to `outer_step`: it will be asked for."""
        known = self._downloads.get(outer_step)
        if known is None or (known.assembly.round_id and known.assembly.manifest is None):
            self._download(outer_step).begin()

    def fetch_ahead(self, outer_step: int, round_id: int) -> None:
        """Begin to fetch the update to `outer_step` that this open round may come to, as far as it is known."""
        known = self._downloads.get(outer_step)
        if known is not None and known.is_there:
            return  # whoever serves the run now may be cut off, or not say yet that this update is committed
        if known is not None and known.assembly.round_id != round_id and known.assembly.manifest is None:
            known.cancel()
            del self._downloads[outer_step]
            known = None
        if known is None or known.broke_ahead:
            self._download(outer_step, round_id).begin(ahead=True)

    def forget(self, *, taken: bool) -> None:
        """Forget all updates: all ranks have their answer. taken: whoever took one holds it; else it is no longer fetched."""
        self._downloads.clear()
        if not taken:
            for task in self._tasks:
                task.cancel()

    async def compare_logs(self) -> None:
        """Hold the coordinator's audit log to what this peer has seen of it, by the receipt of the newest commit.

        A coordinator that goes on from an old copy of its folder, or beside another one, refuses contributions that name heads
        which it does not know. Its own head comes with the receipt, which keeps both (`Receipts.fault`). Where there is no
        receipt to be had, only the refusal is known.
        """
        async with self._comparing:
            if self._receipts is None or self._compared:
                return
            try:
                if newest := (await self._data.describe(self._schema, once)).outer_step:
                    await self._read_receipt(newest, once)
            except EditError as error:
                _log.info("the audit log of the coordinator that refuses: %s", error)
            self._compared = True

    async def _described(self) -> SnapshotManifest:
        """Return what the snapshot of the latest commit consists of; once the log is known, what it says of that commit, too.

        Where there is no receipt of the commit to be had (it is kept no longer), the next one is compared with the snapshot.
        """
        manifest = await self._data.describe(self._schema, self._wanted)
        if (receipts := self._receipts) is None or receipts.agrees(manifest):
            return manifest
        try:
            await self._read_receipt(manifest.outer_step, self._wanted)
        except OutdatedError as error:
            _log.info("no receipt of the snapshot of outer step %d: %s", manifest.outer_step, error)
        receipts.check_snapshot(manifest)
        return manifest

    async def _read_receipt(self, outer_step: int, wanted: Wanted) -> None:
        """Take the receipt of a commit, and nothing of its update. Raises as `DataCalls.update`, and ReceiptFault."""
        nothing = [Shard(fragment, ()) for fragment in self._schema.fragments]
        assembly = UpdateAssembly(self._schema, outer_step, self._due(outer_step), nothing, receipts=self._receipts)
        await self._data.update(assembly, wanted, lambda: None)
        await self._save_receipt()

    async def _update(self, outer_step: int) -> Committed:
        download = self._download(outer_step)
        if self._sync.mode != "forward":
            commit = await download.until(lambda assembly: assembly.finish() if assembly.complete else None)
            await self._save_receipt()
            return Committed(commit)
        commit = await download.until(lambda assembly: assembly.manifest)
        await self._save_receipt()
        updates: tuple[Update, ...] = tuple(
            RolledBack() if download.assembly.rolled_back(position) else Arrival(self._agreement, download, position)
            for position in range(len(commit.fragments))
        )
        return Committed(commit, updates)

    async def _save_receipt(self) -> None:
        if self._receipts is not None:
            await self._receipts.save()

    def _download(self, outer_step: int, round_id: int = 0) -> _Download:
        if outer_step not in self._downloads:
            assembly = UpdateAssembly(
                self._schema,
                outer_step,
                self._due(outer_step),
                self._shards,
                round_id=round_id,
                choice=self._choice,
                receipts=self._receipts,
            )

            def wanted() -> bool:
                ahead = assembly.round_id and assembly.manifest is None
                return self._attending() if ahead else self._wanted()

            transfer = partial(self._data.update, assembly, wanted)
            self._downloads[outer_step] = _Download(assembly, transfer, self._start_task)
        return self._downloads[outer_step]

    def _due(self, outer_step: int) -> tuple[int, ...]:
        """Return the fragments that the update to `outer_step` is of."""
        return fragments_due(outer_step - 1, len(self._schema.fragments), self._sync.groups, self._sync.pattern)

    def _start_task(self, transfer: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._io.start(transfer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _described(manifest: SnapshotManifest) -> DescribedSnapshot:
    return DescribedSnapshot(manifest.outer_step, manifest.digest, manifest.fragment_hash, manifest.run_outer_step)


def _some(shards: Sequence[Shard], lacking: Collection[int]) -> list[Shard]:
    """Return these fragments' shards, and nothing of the others."""
    return [shard if i in lacking else Shard(shard.fragment, ()) for i, shard in enumerate(shards)]
