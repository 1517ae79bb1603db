"""A peer tells its own host that it waits for an owner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from editpb.identity import Identity
from peers.carriers.swarm.channels import PartChannels
from peers.carriers.swarm.waiting import EACH_S, WaitingNews
from tests.support.council.hosts import hosts
from tests.support.loops import pass_time, run_held


def test_it_says_so_while_it_waits_and_again_when_its_host_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with hosts(tmp_path, parts=2) as swarm:
            await swarm.grow("a", "b")
            own = grpc.ssl_channel_credentials(swarm.ca, *swarm.own("b"))
            known = {peer_id: swarm.running[peer_id].listen for peer_id in "ba"}
            channels = PartChannels(swarm.run_id, known, 0, own)
            awaited: list[int | None] = [None, None]
            heard: list[Mapping[int, int]] = []
            asked = 0

            def look() -> list[int | None]:
                nonlocal asked
                asked += 1
                return awaited

            def watch() -> None:
                monkeypatch.setattr(swarm.running["b"], "wanted", heard.append)
                monkeypatch.setattr(swarm.running["a"], "wanted", lambda waiting: pytest.fail("it is another's host"))

            watch()
            news = WaitingNews(Identity(swarm.run_id, "peer", "b"), channels, look)
            task = asyncio.ensure_future(news.run())
            await asyncio.sleep(0)
            pass_time(EACH_S)
            await swarm.until(lambda: asked)
            assert not heard and not channels._open, "it waits for nobody"
            awaited[1] = 7
            await swarm.until(lambda: heard, passes=EACH_S)
            assert heard[0] == {1: 7}
            await swarm.stop("b")
            await swarm.until(lambda: not channels._open, passes=EACH_S)
            await swarm.start("b")
            watch()
            heard.clear()
            await swarm.until(lambda: heard, passes=EACH_S)
            news.stop()
            await asyncio.wait([task])
            assert task.cancelled() and not channels._open

    run_held(body())
