"""Which host is asked for a part."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from edit.errors import TransportError
from editpb.council_messages import PartOwner
from editpb.transport.parts import metadata_of_owner
from peers.carriers.swarm.channels import MOST_STAYS, PartChannels
from tests.support.loops import on_a_loop

HOSTS = {"a": "127.0.0.1:1", "b": "127.0.0.1:2", "c": "127.0.0.1:3"}


def channels() -> PartChannels:
    return PartChannels("run", HOSTS, 0, grpc.ssl_channel_credentials())


def refusal(*metadata: Any) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*metadata)
    return grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), trailing, "part 0 is c's")


def test_the_owner_that_a_host_names_is_asked_next() -> None:
    part = channels()
    part.refused(refusal(*metadata_of_owner("c")))
    part.rotate()
    assert part.endpoint == HOSTS["c"]


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        metadata_of_owner("stranger"),
        metadata_of_owner("evil.example:443"),
        (*metadata_of_owner("c"), *metadata_of_owner("c")),
    ],
)
def test_else_all_hosts_are_asked_in_turn(metadata: Any) -> None:
    part, asked = channels(), []
    for _ in range(4):
        asked.append(part.endpoint)
        part.refused(refusal(*metadata))
        part.rotate()
    assert asked == [*HOSTS.values(), HOSTS["a"]]


def test_who_was_named_once_is_not_asked_for_ever() -> None:
    part = channels()
    part.refused(refusal(*metadata_of_owner("c")))
    part.rotate()
    part.rotate()
    assert part.endpoint == HOSTS["a"]


@on_a_loop
async def test_news_of_a_later_owner_ends_what_waits_for_the_one_before() -> None:
    part = channels()
    part.welcomed(1_000_001)

    async def call() -> None:
        async with part.while_here():
            await asyncio.Event().wait()

    calling, pausing = asyncio.ensure_future(call()), asyncio.ensure_future(part.pause(1e6))
    await asyncio.sleep(0)
    part.owned_by(PartOwner("c", 2_000_001))
    assert part.endpoint == HOSTS["c"]
    with pytest.raises(TransportError, match=HOSTS["c"]):
        await calling
    await pausing
    async with part.while_here():
        part.owned_by(PartOwner("c", 2_000_001))
        await asyncio.sleep(0)  # told once


@on_a_loop
async def test_old_news_and_a_name_without_an_address_move_nothing() -> None:
    part = channels()
    part.welcomed(2_000_001)
    async with part.while_here():
        for told in (PartOwner("b", 2_000_001), PartOwner("c", 1_000_001), PartOwner("stranger", 3_000_001)):
            part.owned_by(told)
            assert part.endpoint == HOSTS["a"]
        await asyncio.sleep(0)


@on_a_loop
async def test_an_owner_that_came_later_or_moved_is_followed_and_where_the_own_host_is_stays() -> None:
    part = channels()
    part.owned_by(PartOwner("d", 2_000_001, ("127.0.0.1:4", "127.0.0.1:5")))
    assert part.endpoint == "127.0.0.1:4"
    part.owned_by(PartOwner("d", 3_000_001, ("127.0.0.1:6",)))
    assert part.endpoint == "127.0.0.1:6"
    part.owned_by(PartOwner("b", 4_000_001, ("127.0.0.1:7",)))
    assert part.endpoint == "127.0.0.1:7"
    part.owned_by(PartOwner("a", 5_000_001, ("elsewhere.example:443",)))
    assert part.endpoint == HOSTS["a"] and part.hosts == {**HOSTS, "b": "127.0.0.1:7", "d": "127.0.0.1:6"}
    part.welcomed(5_000_001)
    part.refused(refusal(*metadata_of_owner("d")))
    part.rotate()
    assert part.endpoint == "127.0.0.1:6"


@on_a_loop
async def test_a_pause_ends_when_the_owner_is_there_again() -> None:
    part = channels()
    pausing = asyncio.ensure_future(part.pause(1e6))
    await asyncio.sleep(0)
    async with part.while_here():
        part.welcomed(1)
        await pausing


@on_a_loop
async def test_an_owner_that_has_not_heard_so_itself_is_asked_again_but_not_for_ever() -> None:
    """It names the one before, which was stopped: whoever connects to that one waits for a handshake."""
    part = channels()
    part.welcomed(1_000_001)
    part.owned_by(PartOwner("c", 2_000_001))
    for _ in range(MOST_STAYS):
        part.refused(refusal(*metadata_of_owner("a")))
        part.rotate()
        assert part.endpoint == HOSTS["c"]
    part.refused(refusal(*metadata_of_owner("a")))
    part.rotate()
    assert part.endpoint == HOSTS["a"]
    part.owned_by(PartOwner("b", 3_000_001))
    part.rotate()
    assert part.endpoint == HOSTS["c"], "it does not answer"
