"""Hosts tell a peer who owns each part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from edit.council import events as ev
from editpb import council_pb2 as pb
from editpb import council_pb2_grpc
from peers.carriers.swarm.channels import PartChannels
from peers.carriers.swarm.owners import OwnerWatch
from tests.support.council.hosts import Hosts, hosts
from tests.support.loops import run_held


@asynccontextmanager
async def watching(swarm: Hosts, order: str) -> AsyncIterator[list[PartChannels]]:
    """The channels of all parts, whose first host is asked first. All begin at the first host."""
    key, certificate = swarm.certificate("peer")
    credentials = grpc.ssl_channel_credentials(swarm.ca, key, certificate)
    known = {peer_id: swarm.running[peer_id].listen for peer_id in order}
    channels = [PartChannels(swarm.run_id, known, part, credentials) for part in range(swarm.parts)]
    watch = OwnerWatch(swarm.run_id, channels)
    task = asyncio.ensure_future(watch.run())
    try:
        yield channels
    finally:
        watch.stop()
        await asyncio.wait([task])
        assert task.cancelled()
        assert not watch._asking._open, "its channel is closed"


def at_owners(swarm: Hosts, channels: list[PartChannels]) -> bool:
    wanted = [swarm.running.get(part.owner) for part in swarm.record.parts]
    return all(host is not None and host.listen == each.endpoint for host, each in zip(wanted, channels, strict=True))


def test_a_change_of_owners_is_told_at_once_and_another_host_is_asked_when_one_is_gone(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path, parts=3) as swarm:
            await swarm.grow("a", "b", "c")
            await swarm.until(lambda: len({part.owner for part in swarm.record.parts}) == 3, passes=3.0)
            everybody = swarm.running.values()
            await swarm.until(lambda: all(host.council.committed == swarm.record for host in everybody), passes=0.1)
            async with watching(swarm, "cab") as channels:
                await swarm.until(lambda: at_owners(swarm, channels))
                for each in channels:
                    await each.close()  # as when the settings are read: the watch goes on
                await swarm.stop("b")
                await swarm.until(lambda: "b" not in [part.owner for part in swarm.record.parts], passes=1.0)
                await swarm.until(lambda: at_owners(swarm, channels), passes=1.0)
                await swarm.start("b")
                await swarm.until(lambda: swarm.settled("abc"), passes=1.0)
                await swarm.stop("c")
                await swarm.until(lambda: "c" not in [part.owner for part in swarm.record.parts], passes=1.0)
                await swarm.until(lambda: at_owners(swarm, channels), passes=1.0)

    run_held(body())


@pytest.mark.parametrize("lie", ["nothing", "too many parts", "a bad name"])
def test_another_host_is_asked_when_one_says_nothing_or_nonsense(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")

            async def lies() -> AsyncGenerator[pb.Owners, None]:
                owner = pb.Owners.Owner(peer_id="c" if lie != "a bad name" else "../c", first_round_id=9_000_001)
                if lie == "nothing":
                    await asyncio.Event().wait()
                yield pb.Owners(parts=[owner] * (2 if lie == "too many parts" else 1))

            monkeypatch.setattr(swarm.running["c"], "owners", lies)
            async with watching(swarm, "cab") as channels:
                assert channels[0].endpoint == swarm.running["c"].listen
                await swarm.until(lambda: at_owners(swarm, channels), passes=10.0)

    run_held(body())


def test_who_was_evicted_is_told_no_more(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")
            async with swarm.channel("a", "c") as channel:
                call = council_pb2_grpc.CouncilStub(channel).WatchOwners(pb.OwnersRequest())
                first = await call.read()
                assert [owner.peer_id for owner in first.parts] == ["a"]
                swarm.running["a"].tell(ev.Evict("c", "it lies"))
                with pytest.raises(grpc.aio.AioRpcError, match="evicted: it lies"):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            async with swarm.channel("b", "x", role="observer") as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="role observer may not"):
                    await council_pb2_grpc.CouncilStub(channel).WatchOwners(pb.OwnersRequest()).read()

    run_held(body())
