"""What comes down to the ranks of a replica: updates, as a whole or fragment by fragment, and snapshots.

Owns: one background transfer per update, begun once and gone on with after a break; who may wait for what of it; that all ranks
have their parts of the same update or snapshot before any goes on. Must not know: what an outcome is, rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from edit.config.run import SyncConfig
from edit.errors import EditError, RemoteProtocolError, StaleError, TransportError
from edit.fragments.groups import fragments_due
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Arriving, Commit, Committed, EncodedTensor, Snapshot
from peers.carriers.hub.assembly import UpdateAssembly
from peers.carriers.hub.data_calls import DataPlane, Wanted
from peers.carriers.io_thread import IoThread
from peers.carriers.rank_agreement import RankAgreement

__all__ = ["Arrival", "Downlink", "Download"]

SNAPSHOT_TRIES = 5
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Transfer: TypeAlias = Callable[[UpdateAssembly, Callable[[], None]], Coroutine[Any, Any, None]]
Start: TypeAlias = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Download:
    """One update on its way. `transfer` completes an assembly, and calls back at each piece of news."""

    def __init__(self, assembly: UpdateAssembly, transfer: Transfer, start: Start) -> None:
        self._assembly = assembly
        self._transfer = transfer
        self._start = start
        self._news = asyncio.Event()
        self._error: EditError | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Fetch it, or go on where it broke (loop's thread)."""
        if self._task is None or self._task.done():
            self._error = None
            self._task = None if self._assembly.complete else self._start(self._run())

    async def begun(self) -> Commit:
        """The commit without its payloads, once its manifest is in. Raises what ended the transfer."""
        return await self._until(lambda: self._assembly.manifest)

    async def whole(self) -> Commit:
        """The commit, once all of it is in. Raises what ended the transfer."""
        return await self._until(lambda: self._assembly.finish() if self._assembly.complete else None)

    async def fragment(self, position: int) -> EncodedTensor:
        """The payload at this position of the commit, once it is in. Raises what ended the transfer."""
        return await self._until(lambda: self._assembly.payload(position))

    def rolled_back(self, position: int) -> bool:
        """Whether there is no payload at this position of the commit."""
        return self._assembly.rolled_back(position)

    async def _until(self, look: Callable[[], _T | None]) -> _T:
        """Begin, or go on where it broke; then wait."""
        self.begin()
        while (here := look()) is None:
            if self._task is None or self._task.done():
                raise self._error or TransportError(f"update {self._assembly.outer_step} is no longer fetched")
            await self._news.wait()
        return here

    async def _run(self) -> None:
        try:
            await self._transfer(self._assembly, self._tell)
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
    download: Download
    position: int

    def wait(self) -> EncodedTensor:
        """Block until every rank has its part. To be called by all ranks, in the same order; all get it or raise the same.

        Raises TransportError when cut off (called again, it goes on where it broke), RemoteProtocolError when what came was bad
        again and again, StaleError when the update is no longer kept; also EvictedError, RefusedError, Interrupted.
        """
        return self.agreement.together(self.download.fragment(self.position))


class Downlink:
    """What every rank of a replica fetches together: its shards of updates and snapshots.

    shards: what this rank holds, one per fragment of the schema; wanted: whether a transfer is worth another try. The main
    thread calls; what begins with an underscore runs on the loop.
    """

    def __init__(
        self,
        bridge: IoThread,
        data: DataPlane,
        agreement: RankAgreement,
        schema: Schema,
        shards: Sequence[Shard],
        wanted: Wanted,
    ) -> None:
        self._bridge = bridge
        self._data = data
        self._agreement = agreement
        self._schema = schema
        self._shards = tuple(shards)
        self._wanted = wanted
        self._sync = SyncConfig()
        self._downloads: dict[int, Download] = {}  # until all ranks have answered the question after them
        self._tasks: set[asyncio.Task[None]] = set()

    def configure(self, sync: SyncConfig) -> None:
        """Take the run's groups of fragments."""
        self._sync = sync

    def whole(self, outer_step: int) -> Committed:
        """The update that led to `outer_step`, complete at every rank. Raises TransportError when one was cut off (asked again,
        it goes on where it broke), StaleError or RemoteProtocolError when one cannot get it."""
        return self._agreement.together(self._whole(outer_step))

    def begun(self, outer_step: int) -> Committed:
        """As `whole`, as soon as every rank has the manifest; the rest goes on in the background."""
        return self._agreement.together(self._begun(outer_step))

    def foresee(self, outer_step: int) -> None:
        """Begin to fetch the update that led to `outer_step`: somebody will ask for it (loop's thread)."""
        if outer_step not in self._downloads:
            self._download(outer_step).begin()

    def snapshot(self) -> Snapshot:
        """The outer parameters of the latest commit, of one outer step at all ranks. Raises TransportError, also when what
        arrived was damaged again and again. No update that is still on its way is wanted any more."""
        self.abandon()
        for _ in range(SNAPSHOT_TRIES):
            try:
                manifest = self._agreement.led(lambda: self._data.describe(self._schema, self._wanted))
                return self._agreement.together(self._data.snapshot(manifest, self._shards, self._wanted))
            except StaleError as error:
                _log.info("the snapshot is gone (%s); taking a newer one", error)
            except RemoteProtocolError as error:
                raise TransportError(f"no snapshot: {error}") from error
        raise TransportError("snapshots are gone before they are read; this link is too slow for the run")

    def settle(self) -> None:
        """All ranks have their answer: whoever took an update holds it now."""
        self._bridge.post(self._downloads.clear)

    def abandon(self) -> None:
        """No update that is still on its way is wanted any more."""
        self._bridge.post(self._cancel)

    def _cancel(self) -> None:
        self._downloads.clear()
        for task in self._tasks:
            task.cancel()

    async def _whole(self, outer_step: int) -> Committed:
        return Committed(await self._download(outer_step).whole())

    async def _begun(self, outer_step: int) -> Committed:
        download = self._download(outer_step)
        commit = await download.begun()
        arriving: tuple[Arriving | None, ...] = tuple(
            None if download.rolled_back(position) else Arrival(self._agreement, download, position)
            for position in range(len(commit.fragments))
        )
        return Committed(commit, arriving)

    def _download(self, outer_step: int) -> Download:
        if outer_step not in self._downloads:
            due = fragments_due(outer_step - 1, len(self._schema.fragments), self._sync.groups, self._sync.pattern)
            assembly = UpdateAssembly(self._schema, outer_step, due, self._shards)
            self._downloads[outer_step] = Download(assembly, self._fetch, self._begin)
        return self._downloads[outer_step]

    async def _fetch(self, assembly: UpdateAssembly, arrived: Callable[[], None]) -> None:
        await self._data.update(assembly, self._wanted, arrived)

    def _begin(self, transfer: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._bridge.start(transfer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
