"""Hosts of a swarm in a thread of their own, while the test's thread trains; and faults at each point of an outer step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from torch import Tensor

from aggregator.data.contributions import ShardUpload
from aggregator.data.round_runner import RoundRunner
from aggregator.swarm.engine_store import EngineStore
from aggregator.swarm.host import Host
from edit.config.run import RunConfig
from edit.fragments.schema import Schema
from edit.records import Commit
from tests.support.council.hosts import Hosts, hosts
from tests.support.loops import WAIT_S, HeldLoop

__all__ = ["POINTS", "Trained", "trained"]

_T = TypeVar("_T")
POINTS = ("before the upload", "in the upload", "after the upload", "after the commit")


class Trained:
    """Hosts a, b, c whose time passes as outside."""

    def __init__(self, swarm: Hosts, loop: asyncio.AbstractEventLoop) -> None:
        self.swarm, self.loop = swarm, loop
        self.point = ""  # at which the owner ends next
        self.ended: list[str] = []  # who owned the part and was ended
        self._ending = threading.Lock()

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run it on the hosts' loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=WAIT_S)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until it is true on the hosts' loop."""
        self.call(self.swarm.until(condition))

    def addresses(self) -> dict[str, str]:
        return {peer_id: host.listen for peer_id, host in self.swarm.running.items()}

    def credentials(self, peer_id: str = "peer") -> grpc.ChannelCredentials:
        key, certificate = self.swarm.own(peer_id)
        return grpc.ssl_channel_credentials(self.swarm.ca, key, certificate)

    def whole(self) -> None:
        """Start whoever ended; return when all vote, and the parts are served."""

        async def start() -> None:
            for peer_id in self.ended:
                if peer_id not in self.swarm.running:
                    await self.swarm.start(peer_id)
            await self.swarm.until(lambda: self.swarm.settled("abc") and self._served())

        self.call(start())

    def _served(self) -> bool:
        return all(self.swarm.owner(part) is not None for part in range(self.swarm.parts))

    def end_owner(self, part: int = 0) -> None:
        """End the owner now."""
        owner = self.swarm.record.parts[part].owner
        self.ended.append(owner)
        self.call(self.swarm.stop(owner))

    # -- where the code under test passes ------------------------------------------------------------------------------------

    def reached(self, point: str, code: RoundRunner | EngineStore) -> bool:
        """End the owner whose code passes there, once, if this is where one is to end."""
        with self._ending:
            if self.point != point:
                return False
            self.point = ""
        owner = next(peer_id for peer_id, host in self.swarm.running.items() if _runs(host, code))
        self.ended.append(owner)
        asyncio.run_coroutine_threadsafe(self.swarm.stop(owner), self.loop)
        return True


@contextmanager
def trained(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schema: Schema,
    theta: Sequence[Tensor],
    toml: str,
    parts: int = 1,
    *,
    config: RunConfig | None = None,
) -> Iterator[Trained]:
    """Serve in a thread until the block ends. config: in place of what `toml` says."""
    ready: Future[Trained] = Future()
    over = threading.Event()

    async def serve() -> None:
        async with hosts(path, parts, model=(schema, theta), toml=toml, config=config) as swarm:
            await swarm.grow("a", "b", "c")
            ready.set_result(Trained(swarm, asyncio.get_running_loop()))
            while not over.is_set():
                until = time.monotonic() + 1.0
                await swarm.until(lambda until=until: over.is_set() or time.monotonic() > until, passes=1.0)

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=HeldLoop) as runner:
                runner.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        at = ready.result(timeout=WAIT_S)
        _watch(monkeypatch, at)
        yield at
    finally:
        over.set()
        thread.join(timeout=WAIT_S)


def _watch(monkeypatch: pytest.MonkeyPatch, at: Trained) -> None:
    arrived, append_commit, applied = RoundRunner.arrived, EngineStore.append_commit, EngineStore.applied

    async def stops_after_a_fragment(self: RoundRunner, shard: ShardUpload) -> None:
        await arrived(self, shard)
        if at.reached("in the upload", self):
            await asyncio.Event().wait()

    def stops_before_it_proposes(self: EngineStore, *arguments: Any, **named: Any) -> None:
        if at.reached("after the upload", self):
            _wait(self)
        append_commit(self, *arguments, **named)

    def stops_before_it_publishes(self: EngineStore, commit: Commit) -> None:
        applied(self, commit)
        if at.reached("after the commit", self):
            _wait(self)

    monkeypatch.setattr(RoundRunner, "arrived", stops_after_a_fragment)
    monkeypatch.setattr(EngineStore, "append_commit", stops_before_it_proposes)
    monkeypatch.setattr(EngineStore, "applied", stops_before_it_publishes)


def _runs(host: Host, code: RoundRunner | EngineStore) -> bool:
    engines = [(part.engine.run.rounds, part.replica._engine) for part in host.parts if part.engine is not None]
    return any(code in each for each in engines)


def _wait(store: EngineStore) -> None:
    while not store._ended:
        time.sleep(0.001)
