"""Calls at a host of a swarm of which only the headers come: others are answered all the same."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import pytest

from aggregator.silent_connections import SilentConnections
from aggregator.swarm import host
from editpb import council_pb2
from editpb.transport.channel_options import MAX_STREAMS
from editpb.transport.chunk_frames import council_stub
from tests.support.council.hosts import Hosts, hosts
from tests.support.loops import WAIT_S, outside, pass_time, run_held

DESCRIBE = "/editpb.Council/Describe"


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def headers_only(swarm: Hosts, stack: AsyncExitStack, peer_id: str, role: str) -> list[grpc.aio.Call]:
    """So many calls as a host serves at a time, of one caller."""
    calls = []
    for _ in range(host._MAX_CALLS // MAX_STREAMS):
        channel = await stack.enter_async_context(swarm.channel("a", peer_id, role))
        calls += [channel.stream_unary(DESCRIBE)(silence()) for _ in range(MAX_STREAMS)]
        await channel.channel_ready()
    return calls


@pytest.mark.parametrize("role", ["peer", "observer"])
def test_one_caller_does_not_fill_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setattr(host, "_MAX_CALLS", 2 * MAX_STREAMS)

    async def body() -> None:
        async with hosts(tmp_path) as swarm, AsyncExitStack() as stack:
            await swarm.grow("a", "b")
            calls = await headers_only(swarm, stack, "evil", role)
            refused = [asyncio.ensure_future(call.details()) for call in calls]
            for _, details in zip(range(MAX_STREAMS), asyncio.as_completed(refused), strict=False):
                assert "evil has 32 calls under way here already" in (await details or "")
            good = await stack.enter_async_context(swarm.channel("a", "b", own=True))
            assert await council_stub(good).Describe(council_pb2.DescribeRequest())
            for call in calls:
                call.cancel()
            await asyncio.gather(*refused, return_exceptions=True)

    run_held(body())


def test_a_host_waits_for_no_request_of_who_is_not_enrolled(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm, AsyncExitStack() as stack:
            swarm.closed = True
            await swarm.grow("a")
            channel = await stack.enter_async_context(swarm.channel("a", "evil"))
            call = channel.stream_unary(DESCRIBE)(silence())
            assert "evil is not enrolled" in (await call.details() or "")

    run_held(body())


def test_a_host_keeps_files_back_from_strangers_and_outlives_that_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 48))  # 24 connections, 3 of one address that say nothing
    cuts, cut = list[bool](), SilentConnections.cut

    def without_files(self: SilentConnections, most: dict[int, int]) -> None:
        cuts.append(True)
        if len(cuts) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        cut(self, most)

    monkeypatch.setattr(SilentConnections, "cut", without_files)

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a")
            address, _, port = swarm.running["a"].listen.rpartition(":")
            opened = [await asyncio.open_connection(address, int(port)) for _ in range(8)]
            ended = [asyncio.ensure_future(_until_closed(reader)) for reader, _ in opened]
            for _ in range(int(WAIT_S / 0.05)):
                if sum(each.done() for each in ended) >= 5:
                    break
                await outside(0.05)
                pass_time(0.1)
            assert sum(each.done() for each in ended) == 5
            assert swarm.running["a"].failure is None
            for task, (_, writer) in zip(ended, opened, strict=True):
                task.cancel()
                writer.transport.abort()

    run_held(body())


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read()
