"""When a coordinator is looked for, and what is made of what was found."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.security.authority import Authority
from edit.errors import ConfigError, RefusedError, TransportError
from editpb.identity import Identity
from editpb.invitation import MAX_ENDPOINTS, Invitation
from peers.carriers.hub.channels import Channels
from peers.identity import seeking
from peers.identity.enrolment import UntrustedServerError
from peers.identity.seeking import AGAIN_S, LOOK_S, ROUNDS, Seeking, redeem, searching
from peers.training.options import PeerOptions
from tests.support.loops import on_a_loop, pass_time, run_held

NODE = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWMeRyCUk5dyG5REHphBwiG8eP4C13hyyyzheUgS5g4B5m"
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
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert await searching(tmp_path, [])() == ((), "the search cannot be started (No such file or directory)")


def test_where_nobody_answers_that_an_invitation_names_it_is_redeemed_where_the_dht_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create(tmp_path, "run", ("localhost",), now=time.time())
    text = authority.invite("b", role="peer", enrol=["127.0.0.1:1"], lifetime_s=60.0, now=time.time()).encode()
    tried, answers = list[tuple[str, ...]](), [TransportError("no answer"), TransportError("no answer")]

    def redeem_at(invitation: str, home: Path, now: float) -> Identity:
        invited = Invitation.decode(invitation)
        assert replace(invited, enrol=("127.0.0.1:1",)).encode() == text, "nothing else is another"
        tried.append(invited.enrol)
        if answers:
            raise answers.pop()
        return invited.identity

    def search(body: str) -> None:
        (tmp_path / "search").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "search").chmod(0o700)

    monkeypatch.setattr(seeking, "join", redeem_at)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "search"))
    with pytest.raises(TransportError, match="no answer"):
        redeem(text, tmp_path)
    search('read told; echo "$told" > "$0.told"; echo "$@" > "$0.words"; echo nonsense; echo 127.0.0.1:7; echo "[::1]:7"')
    assert redeem(f" {text}\n", tmp_path, [NODE]).peer_id == "b"
    assert tried == [("127.0.0.1:1",), ("127.0.0.1:1",), ("127.0.0.1:7", "[::1]:7")]
    assert (tmp_path / "search.told").read_text() == f"{text}\n", "an invitation is in no command line"
    words = f"-m aggregator.swarm seek-enrolment {tmp_path / 'seeking'} --dht-peers={NODE}\n"
    assert (tmp_path / "search.words").read_text() == words
    answers.append(UntrustedServerError("127.0.0.1:1: another authority's"))
    assert redeem(text, tmp_path, [NODE]).peer_id == "b" and tried[-1] == tried[2], "its address is somebody else's by now"
    for body, kind, why in (
        ("echo 'aggregator.swarm: --dht-peers: needs hivemind' >&2; exit 2", ConfigError, "^--dht-peers: needs hivemind"),
        ("echo 'aggregator.swarm: the DHT does not know' >&2; exit 69", TransportError, "^the DHT does not know"),
        ("echo nonsense", TransportError, "the search in the DHT said nothing"),
    ):
        answers.append(TransportError("no answer"))
        search(body)
        with pytest.raises(kind, match=why):
            redeem(text, tmp_path, [NODE])
    answers.append(UntrustedServerError("its certificate has expired, or this machine's clock is ahead"))
    with pytest.raises(RefusedError, match="clock is ahead"):
        redeem(text, tmp_path, [NODE])
    answers.append(TransportError("no answer"))
    search("exec sleep 1000")
    monkeypatch.setattr(seeking, "SEARCH_S", 0.05)  # it always passes
    with pytest.raises(TransportError, match=r"the search took longer than 0.05 s; try again"):
        redeem(text, tmp_path, [NODE])
    answers.append(RefusedError("used already"))
    with pytest.raises(RefusedError, match="used already"):
        redeem(text, tmp_path, [NODE])


def test_what_is_no_node_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    with pytest.raises(ConfigError, match=r"^--dht-peers '127.0.0.1:4001': must be like /ip4/"):
        PeerOptions(home=tmp_path, data=tmp_path / "text", dht_peers=("127.0.0.1:4001",))
    with pytest.raises(ConfigError, match=r"^--dht-peers '127.0.0.1:4001': must be like /ip4/"):
        redeem("an invitation", tmp_path, ["127.0.0.1:4001"])
