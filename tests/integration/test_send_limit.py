"""`--max-mbit`: what is large waits for its turn, what is small does not, and all that is large is counted."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import torch

from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.records import Committed, Contribution, Progress
from editpb.identity import Identity
from editpb.messages import PeerState
from editpb.transport.send_limit import SendLimit
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from tests.integration.test_snapshots_from_peers import WHOLE, outer, reading, serving
from tests.support.council.hosts import SIZES, hosts
from tests.support.encoded import encode
from tests.support.loops import run_held
from tests.support.running import address, running
from tests.support.served import SCHEMA, found_run, new_folder, served, theta

NUMEL = 200_000
MODEL = Schema((FragmentSpec(fragment_id=0, name="w", tensors=(TensorSpec(name="w", shape=(NUMEL,)),)),))
OVERHEAD = 200  # bytes of each message beside its chunk: headers


class Held(SendLimit):
    """Lets nothing go while `open` is not set, and counts what went."""

    chunk_bytes = 20_000

    def __init__(self) -> None:
        self.open, self.went, self.waiting = threading.Event(), list[int](), 0

    async def room(self, count: int) -> None:
        self.waiting += 1
        while not self.open.is_set():  # noqa: ASYNC110 (another thread sets it)
            await asyncio.sleep(0)
        self.waiting -= 1
        self.went.append(count)


def whole(went: list[int], payload: int) -> bool:
    """Whether these are the messages that bring so many bytes, each small enough."""
    return max(went) <= Held.chunk_bytes + OVERHEAD and payload <= sum(went) <= payload + OVERHEAD * len(went)


def test_a_contribution_waits_and_heartbeats_do_not(tmp_path: Path) -> None:
    limit, folder = Held(), new_folder(tmp_path / "run")
    first = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))]
    limit.open.set()
    with running(folder) as here, IoThread() as io:
        channels = Channels([address(folder)], here.served.credentials("me"), limit)
        collective = HubCollective(io, channels, Identity(folder.run_id, "peer", "me"))
        try:
            collective.join(MODEL, lambda: first)
            assert whole(limit.went, 4 * NUMEL), "the founder's parameters"
            limit.went.clear()
            limit.open.clear()
            payload = encode("fp32", torch.ones(NUMEL))
            collective.contribute(Contribution(fragment_id=0, payload=payload, outer_step=0, inner_steps=2, tokens=10))
            here.await_(lambda run: limit.waiting)
            for inner_steps in (5, 6):
                collective.report(
                    Progress(outer_step=0, digest=digest(first), exchanging=True, inner_steps=inner_steps, round_inner_steps=2)
                )
                here.await_(lambda run, steps=inner_steps: _told(run, steps))
            assert not limit.went and collective.connected and collective.outcome(0, block=False) is None
            limit.open.set()
            outcome = collective.outcome(0, block=True)
            assert isinstance(outcome, Committed) and outcome.commit.outer_step == 1
            assert whole(limit.went, 4 * NUMEL)
        finally:
            collective.close()


def _told(run: object, inner_steps: int) -> bool:
    member = run.attendances.membership.members["me"]  # type: ignore[attr-defined]
    return bool(member.heartbeat and member.heartbeat.inner_steps == inner_steps)


def test_a_peer_that_serves_its_snapshot_keeps_to_it(tmp_path: Path) -> None:
    async def body() -> None:
        limit = Held()
        limit.open.set()
        async with served(new_folder(tmp_path / "run")) as run, serving(run, "a", limit=limit) as server, run.peer("a") as a:
            await found_run(a)
            server.show(SCHEMA, outer(0, theta()))
            await a.report(0, digest(theta()), PeerState.TRAINING, serving=server.offer(0))
            async with asyncio.timeout(30), reading(run, "b") as data:
                while not (manifest := await data.describe(SCHEMA, lambda: True)).donors:
                    pass
                await data.snapshot(manifest, WHOLE, lambda: True)
                assert data.origin is not None and data.origin.sources == ("a",)
        assert whole(limit.went, 4 * SCHEMA.numel)

    asyncio.run(body())


def test_a_hosts_update_waits_and_the_council_does_not(tmp_path: Path) -> None:
    """While nothing goes the others still follow who leads, and nobody is taken for dead; then the update is agreed on."""

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            limit = Held()
            limit.open.set()
            swarm.limits["a"] = limit
            await swarm.grow("a", "b", "c")
            limit.open.clear()
            limit.went.clear()
            term = swarm.running["a"].council.term
            await swarm.contribute(0, [torch.ones(size) for size in SIZES])
            await swarm.until(lambda: limit.waiting == 2)  # the others read it
            loop = asyncio.get_running_loop()
            later = loop.time() + 5.0  # that is five leases
            await swarm.until(lambda: loop.time() > later, passes=5.0)
            assert swarm.leader == "a" and swarm.running["a"].council.term == term and not limit.went
            limit.open.set()
            await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))
            assert sum(limit.went) >= 4 * sum(SIZES)

    run_held(body())


def test_a_host_does_not_count_what_its_own_peer_reads_here(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            limit = Held()
            limit.open.set()
            swarm.limits["a"] = limit
            await swarm.grow("a")
            await swarm.contribute(0, [torch.ones(size) for size in SIZES])
            await swarm.until(lambda: swarm.steps()["a"] == 1)
            for peer_id, counted in (("a", False), ("b", True)):
                async with swarm.peer("a", peer_id) as peer:
                    await peer.attend()
                    await peer.fetch(1)
                assert bool(limit.went) is counted

    run_held(body())
