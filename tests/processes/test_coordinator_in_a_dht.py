"""A coordinator that moved is found in a DHT by the run's id. A node that is of another run, and keeps nothing, is enough."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

import aggregator.cli
import peers.cli
from tests.support.council.announced import Run
from tests.support.daemons import Site, call, p2pds, small

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("hivemind") is None, reason="hivemind is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed <StreamWriter:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*StreamWriter.__del__:pytest.PytestUnraisableExceptionWarning"),
]
STARTS_S = 120.0


@contextmanager
def node(path: Path) -> Iterator[str]:
    """A libp2p node of somebody; its multiaddress."""
    from aggregator.swarm.discovery import Discovery, NodePlace

    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        somebody = Run(path / "of", "another")
        discovery = Discovery("another", "x", NodePlace(path, "127.0.0.1", "127.0.0.1"), somebody.credentials("x"))
        discovery.start(lambda found: None, lambda maddr: ready.set_result((maddr, loop, stop)))
        await stop.wait()
        await discovery.close()

    path.mkdir()
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    maddr, loop, stop = ready.result(STARTS_S)
    try:
        yield maddr
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(STARTS_S)


def test_a_peer_finds_a_coordinator_that_moved_and_takes_an_outer_step_and_another_joins_there(tmp_path: Path) -> None:
    settings = small("moves", sync={"every": 2, "outer_steps": 3})
    with Site(tmp_path / "site", settings) as site, node(tmp_path / "node") as maddr:
        first = site.serve()
        site.enrol("a")
        invitation = call(aggregator.cli.app, "invite", "--state", site.state, "b").splitlines()[0]
        first.kill()
        addresses = site.state / "addresses.json"
        before = int(addresses.read_text().split('"listen": "127.0.0.1:')[1].split('"')[0])
        addresses.unlink()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", before))  # nobody listens there any more
            coordinator = site.start("aggregator", "serve", "--keep-serving", "--state", site.state, "--dht-peers", maddr)
            coordinator.until("the DHT: this member's node is")
            call(peers.cli.app, "join", invitation, "--home", site.folder / "b", "--dht-peers", maddr)
            peer = site.peer("a", "--dht-peers", maddr)
            found = peer.until("the DHT says that it is at ")
            assert not found.rstrip().endswith(f":{before}")
            assert peer.finish() == 0
        assert site.status()["outer_step"] == 3
        coordinator.kill()
        assert not p2pds(tmp_path / "site")
