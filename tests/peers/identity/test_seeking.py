"""When a coordinator is looked for, and what is made of what was found."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from edit.errors import ConfigError
from editpb.invitation import MAX_ENDPOINTS
from peers.carriers.hub.channels import Channels
from peers.identity import seeking
from peers.identity.seeking import AGAIN_S, LOOK_S, ROUNDS, Seeking, searching
from peers.training.options import PeerOptions
from tests.support.loops import on_a_loop, pass_time, run_held

KNOWN = ("127.0.0.1:1", "127.0.0.1:2")


class Search:
    def __init__(self, *lines: str, why: str = "") -> None:
        self.lines, self.why, self.count = lines, why, 0

    async def __call__(self) -> tuple[tuple[str, ...], str]:
        self.count += 1
        return self.lines, self.why


async def passing(seconds: float) -> None:
    pass_time(seconds)
    for _ in range(10):
        await asyncio.sleep(0)


def test_it_is_sought_when_all_addresses_failed_twice_and_not_again_at_once() -> None:
    async def body() -> None:
        channels, search = Channels(KNOWN), Search("127.0.0.1:9")
        keeping = asyncio.ensure_future(Seeking(channels, search).keep())
        for _ in range(ROUNDS * len(KNOWN) - 1):
            channels.rotate()
            await passing(LOOK_S)
        assert search.count == 0
        channels.rotate()
        await passing(LOOK_S)
        assert search.count == 1 and channels.endpoint == "127.0.0.1:9" and channels.known == 3
        for _ in range(100):
            channels.rotate()
        await passing(AGAIN_S - 1.0)
        assert search.count == 1
        await passing(1.0)
        await passing(LOOK_S)
        assert search.count == 2
        keeping.cancel()

    run_held(body())


def test_it_is_not_sought_while_it_is_there() -> None:
    async def body() -> None:
        channels, search = Channels(KNOWN), Search("127.0.0.1:9")
        keeping = asyncio.ensure_future(Seeking(channels, search).keep())
        for _ in range(100):
            channels.rotate()
            channels.welcomed(1)
            await passing(LOOK_S)
        assert search.count == 0 and channels.known == len(KNOWN)
        keeping.cancel()

    run_held(body())


def test_what_is_no_address_is_not_learnt_and_addresses_do_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    many = [f"127.0.0.1:{port}" for port in range(1000, 1100)]

    async def body() -> None:
        channels = Channels(KNOWN)
        with caplog.at_level(logging.INFO):
            await Seeking(channels, Search("nonsense", "1.2.3.4", why="the DHT is empty")).seek()
        assert channels.endpoint == KNOWN[0] and "the DHT is empty" in caplog.text
        for i in range(0, 100, 10):
            await Seeking(channels, Search(*many[i : i + 10])).seek()
        assert channels.known == MAX_ENDPOINTS and channels.endpoint == many[90]

    asyncio.run(body())


@on_a_loop
async def test_a_search_that_fails_says_why_and_one_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, why = await searching(tmp_path / "nobody", ["/ip4/127.0.0.1/tcp/1/p2p/x"])()
    assert lines == [] and "peer.pem" in why and "\n" not in why
    (tmp_path / "hangs").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "hangs").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "hangs"))
    monkeypatch.setattr(seeking, "SEARCH_S", 0.05)  # it always passes
    assert await searching(tmp_path, [])() == ((), "the search took longer than 0.05 s")


def test_what_is_no_node_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    with pytest.raises(ConfigError, match=r"^--dht-peers '127.0.0.1:4001': must be like /ip4/"):
        PeerOptions(home=tmp_path, data=tmp_path / "text", dht_peers=("127.0.0.1:4001",))
