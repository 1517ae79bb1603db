"""The rounds of a founded run without a server: a test says what peers send, and waits until a round is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from aggregator.data.published import PublishedState
from aggregator.data.round_runner import RoundRunner
from aggregator.resources import Clock, Resources
from aggregator.run_feed import RunFeed
from aggregator.security.members import Members
from aggregator.storage.journal import Disk
from aggregator.storage.operator_flags import OperatorFlags
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store, load_outer
from aggregator.storage.upload_buffer import UploadBuffer
from aggregator.worker_thread import Background
from edit.merging.mergers import Admission
from edit.merging.outer_state import OuterState
from edit.rounds import events
from edit.rounds.machine import RoundMachine
from editpb.messages import ContributionHeader
from tests.support.encoded import encode
from tests.support.served import SCHEMA, TOML, WAIT_S, new_folder, theta


@dataclass
class Readers:
    """The clock by which snapshots are kept: so many seconds ahead of the real one."""

    ahead_s: float = 0.0


class HeldFsync:
    """For a `Disk`: from `hold` on, until `release`, fsync does not return."""

    def __init__(self) -> None:
        self._held, self._begun, self._released = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, descriptor: int) -> None:
        if self._held.is_set():
            self._begun.set()
            assert self._released.wait(WAIT_S)

    def hold(self) -> None:
        self._held.set()

    async def begun(self) -> None:
        """Wait until an fsync is held."""
        assert await asyncio.to_thread(self._begun.wait, WAIT_S)

    def release(self) -> None:
        self._held.clear()
        self._released.set()


class FailingFsync:
    """For a `Disk`: fsync raises `error` once, after `fail_once`."""

    def __init__(self, error: Exception) -> None:
        self._error, self._fails = error, False

    def __call__(self, descriptor: int) -> None:
        if self._fails:
            self._fails = False
            raise self._error

    def fail_once(self) -> None:
        self._fails = True


@dataclass
class Rounds:
    """The objects of one run, and whether its feed said anything."""

    folder: StateFolder
    outer: OuterState
    runner: RoundRunner
    published: PublishedState
    background: Background
    readers: Readers
    _changed: asyncio.Event

    @property
    def machine(self) -> RoundMachine:
        return self.runner.machine

    @property
    def journal(self) -> Path:
        """The newest segment."""
        return max(self.folder.outer.glob("*.journal"))

    def ready(self, *peers: str) -> None:
        """These report the present outer step."""
        for peer_id in peers:
            self.runner.feed(events.MemberReady(peer_id, self.outer.outer_step, 0.0))

    async def contribute(self, peer_id: str, deltas: Sequence[Tensor]) -> None:
        """The whole contribution to the open round, which then may close."""
        self.ready(peer_id)
        headers = [self.header(peer_id, i, delta) for i, delta in enumerate(deltas)]
        for header, delta in zip(headers, deltas, strict=True):
            shard = self.runner.offer(header)
            assert shard is not None
            await self.runner.receive(shard, 0, bytes(encode("fp32", delta).data))
            await self.runner.arrived(shard)

    def header(self, peer_id: str, fragment_id: int, delta: Tensor) -> ContributionHeader:
        """Of one fragment of a contribution to the open round, in fp32."""
        return ContributionHeader(
            run_id=self.folder.run_id,
            round_id=self.machine.round_id,
            outer_step=self.machine.outer_step,
            peer_id=peer_id,
            fragment_id=fragment_id,
            schema_hash=SCHEMA.schema_hash,
            inner_steps=2,
            tokens=10,
            codec="fp32",
            numel=delta.numel(),
            total_bytes=4 * delta.numel(),
        )

    async def closed(self, round_id: int) -> None:
        """Wait until this round is over."""
        async with asyncio.timeout(WAIT_S):
            while self.runner.last_closed[0] < round_id:
                self._changed.clear()
                await self._changed.wait()

    def recovered(self) -> OuterState:
        """What a restart begins with."""
        return load_outer(self.folder)


@asynccontextmanager
async def open_rounds(
    path: Path,
    disk: Disk | None = None,
    *,
    quorum: int = 1,
    policy: Admission | None = None,
    founded: tuple[Store, OuterState] | None = None,
    toml: str = TOML,
) -> AsyncIterator[Rounds]:
    """A run that is founded with `theta()`, or was before; at the end it is left as a SIGKILL would leave it."""
    folder = new_folder(path / "run", quorum=quorum, toml=toml)
    config = folder.config()
    changed, feed = asyncio.Event(), RunFeed(lambda: 0.0)
    feed.subscribe(lambda event, unix: changed.set())
    with ThreadPoolExecutor(1) as worker, ThreadPoolExecutor(1) as files:
        if founded is None:
            founded = Store(folder.outer, config, folder.run_id, disk), OuterState(SCHEMA, config, theta())
            founded[0].found(founded[1])
        (store, outer), background = founded, Background(worker)
        resources = Resources(
            store=store,
            uploads=UploadBuffer(config.storage.buffer_bytes, folder.spill, files),
            members=Members(folder.path / "members.json", enrols=False),
            orders=OperatorFlags(folder.orders),
            background=background,
            feed=feed,
            clock=Clock(),
        )
        readers = Readers()
        published = PublishedState(outer, store, background, lambda: resources.clock.monotonic() + readers.ahead_s)
        runner = RoundRunner(outer, config, resources, published, first_round_id=1, policy=policy)
        try:
            yield Rounds(folder, outer, runner, published, background, readers, changed)
        finally:
            await background.stop()
            store.close()
            resources.uploads.close()
