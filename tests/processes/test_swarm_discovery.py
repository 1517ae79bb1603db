"""Hosts as processes find each other in a DHT, and their libp2p daemons end with them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes.test_swarm_hosts import ONES, _contribute, swarm
from tests.support.daemons import p2pds
from tests.support.loops import WAIT_S, on_a_loop

pytestmark = pytest.mark.timeout(300)
NODE = "the DHT: this member's node is "


def _ended(path: Path) -> None:
    """Wait until no p2pd of these folders is left."""
    begun = time.monotonic()
    while found := p2pds(path):
        assert time.monotonic() - begun < WAIT_S, found


@pytest.mark.skipif(find_spec("hivemind") is None, reason="hivemind is not installed")
@on_a_loop
async def test_a_host_joins_by_the_dht_training_does_not_notice_the_end_of_p2pd_and_none_is_left(tmp_path: Path) -> None:
    with swarm(tmp_path, members="ab") as members:
        members.start("a", discovery="dht")
        maddr = members.processes["a"].until(NODE).split()[-1]
        members.start("b", discovery="auto", seeds={}, dht_peers=(maddr,))
        members.processes["b"].until(NODE)
        members.until("a", "2 vote, of 2 members")
        for outer_step in (0, 1):
            async with members.owner(outer_step) as (owner, peer, view):
                (p2pd,) = p2pds(tmp_path / owner)
                await _contribute(peer, view, len(ONES) - 1)
                os.kill(p2pd, signal.SIGKILL)
                await asyncio.to_thread(members.processes[owner].until, NODE)
                await _contribute(peer, view)
                await peer.view(lambda view, taken=outer_step + 1: view.outer_step == taken)
        assert all(p2pds(tmp_path / each) for each in "ab")
        members.processes["b"].kill()
        _ended(tmp_path / "b")
        members.processes.pop("b")
        members.end()
        assert not p2pds(tmp_path)


def test_with_addresses_alone_hivemind_is_never_imported(tmp_path: Path) -> None:
    with swarm(tmp_path, members="a") as members:
        members.start("a", discovery="addresses")
        members.until("a", "listens on")
        members.until("a", "owns part 0")
        host = members.processes["a"]
        assert "msgpack" not in Path(f"/proc/{host.process.pid}/maps").read_text() and not p2pds(tmp_path)
        members.end()
        assert not any("DHT" in line for line in host.lines)
