"""An owner that collects contributions and offers nothing, at hosts with real connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from aggregator.swarm.host_folder import Settings
from edit.errors import EditError, RefusedError, RemoteProtocolError
from editpb import council_pb2 as pb
from editpb.council_messages import waiting_to_pb
from editpb.transport.chunk_frames import council_stub
from editpb.transport.status import from_rpc
from tests.aggregator.swarm.test_verification import config, contribute, grown, honest, take_step
from tests.support.council.hosts import Hosts, hosts
from tests.support.loops import run_held


async def waiting(swarm: Hosts, stack: AsyncExitStack, peer_id: str) -> Callable[[], Awaitable[Any]]:
    """Return what says at a host, as the peer beside it, that it waits for the next update of part 0."""
    council = council_stub(await stack.enter_async_context(swarm.channel(peer_id, peer_id, own=True)))
    return lambda: council.Waiting(waiting_to_pb({0: swarm.steps()[peer_id]}))


def test_the_part_of_an_owner_that_offers_nothing_goes_to_another_and_status_names_it(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=config(0)) as swarm, AsyncExitStack() as stack:
            await grown(swarm, 0)
            await take_step(swarm, 1)
            await swarm.until(lambda: swarm.owner() is not None)
            owner = swarm.record.parts[0].owner
            others = sorted({*"abc"} - {owner})

            async def withhold(*arguments: Any) -> None:
                """It has merged what it got, keeps its lease, and says nothing of it."""

            swarm.running[owner]._propose = withhold  # type: ignore[assignment,method-assign]
            await contribute(swarm, 2)
            says = [await waiting(swarm, stack, peer_id) for peer_id in others]
            until = swarm.now() + 12.0
            await swarm.until_said(says[0], lambda: swarm.now() > until)
            assert swarm.record.parts[0].owner == owner, "one of three takes nothing from it"

            async def all_say() -> None:
                for say in says:
                    await say()

            await swarm.until_said(all_say, lambda: swarm.record.parts[0].owner != owner)
            for peer_id in others:
                notices = swarm.running[peer_id].standing().notices
                assert any(f"part 0 is taken from {owner}: " in text and f"{owner} stalls" in text for text in notices), notices
            await take_step(swarm, 2)
            assert swarm.taken[0, 2] == {honest(config(0), 2, anew=2)}

    run_held(body())


def test_only_the_peer_of_a_host_says_there_that_it_waits_and_nonsense_is_refused(tmp_path: Path) -> None:
    async def refusal(swarm: Hosts, peer_id: str, request: pb.WaitingRequest) -> EditError:
        async with swarm.channel("a", peer_id, own=True) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await council_stub(channel).Waiting(request)
            return from_rpc(raised.value)

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b")
            error = await refusal(swarm, "b", waiting_to_pb({0: 0}))
            assert isinstance(error, RefusedError) and "only a itself says here that it waits" in str(error)
            many = pb.WaitingRequest(parts=[pb.WaitingRequest.Waiting()] * 2000)
            for nonsense in (many, waiting_to_pb({5000: 0}), waiting_to_pb({0: 2**63})):
                assert isinstance(await refusal(swarm, "a", nonsense), RemoteProtocolError)
            async with swarm.channel("a", "a", own=True) as channel:
                await council_stub(channel).Waiting(waiting_to_pb({900: 0, 0: 7}))
            assert not swarm.running["a"].council._wanted, "it has one part, at another outer step"

    run_held(body())


def test_how_long_an_owner_has_follows_the_rounds() -> None:
    toml = b"[swarm]\n[rounds]\nceiling_s = 40\nquorum = 3\nstart_peers = 3\n"
    timing = Settings(toml).timing(Settings(toml).config())
    assert (timing.stall_s, timing.stall_peers) == (120.0, 2)
