"""The network between peers and coordinator is cut: the side with the quorum goes on, the other commits nothing and rejoins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.daemons import Daemon, Site, small

PEERS = ("a", "b", "c")


def site_of(folder: Path, kept: int) -> Site:
    """kept: published updates; a peer that has missed more takes a snapshot."""
    settings = small(
        "partition",
        sync={"every": 4, "outer_steps": 100_000},
        rounds={"start_peers": 3, "quorum": 2, "floor_s": 3.0, "ceiling_s": 6.0},
        membership={"heartbeat_s": 0.3, "lease_s": 3.0},
        storage={"keep_updates": kept},
    )
    return Site(folder, settings)


def train(site: Site) -> dict[str, Daemon]:
    return {name: site.peer(name, "--throttle", 5) for name in PEERS}


def committed(site: Site) -> list[int]:
    """The outer steps that rounds led to, in the order in which they were committed."""
    lines = [json.loads(line) for line in (site.state / "metrics.jsonl").read_text().splitlines()]
    return [line["outer_step"] for line in lines if line["kind"] == "round" and line["committed"]]


def took_a_snapshot(peer: Daemon) -> bool:
    """It says why: `the update to outer step 1 is not kept`, or `is no longer kept`."""
    return any(" kept" in line for line in peer.lines)


def end(site: Site, coordinator: Daemon, peers: dict[str, Daemon]) -> None:
    """Drain the run: everybody ends at the same outer step with the same digest, and each step was committed once."""
    site.operate("drain")
    coordinator.until("finished at outer step")
    for peer in peers.values():
        assert peer.finish() == 0
    status = site.status()
    assert status["phase"] == "finished"
    steps = committed(site)
    assert steps == list(range(1, status["outer_step"] + 1))
    for peer in peers.values():
        assert f"outer step {steps[-1]}, digest {status['digest'][:12]}" in peer.last("the run has finished")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kept", "silent"), [(1000, False), (1, True)], ids=["by updates", "by a snapshot"])
def test_two_of_three_go_on_and_the_third_rejoins(tmp_path: Path, kept: int, silent: bool) -> None:
    """silent: no connection breaks, every packet is lost."""
    with site_of(tmp_path, kept) as site:
        coordinator = site.serve()
        site.enrol(*PEERS)
        link = site.link("c")
        peers = train(site)
        coordinator.until("committed: all 3 contributors in")
        (link.silence if silent else link.cut)()
        coordinator.until("c: lost")
        for _ in range(4):
            coordinator.until("committed: all 2 contributors in")
        link.repair()
        coordinator.until("committed: all 3 contributors in")
        end(site, coordinator, peers)
    assert took_a_snapshot(peers["c"]) == (kept == 1)


@pytest.mark.timeout(120)
def test_one_of_three_commits_nothing_while_the_others_are_cut_off(tmp_path: Path) -> None:
    with site_of(tmp_path, 1000) as site:
        coordinator = site.serve()
        site.enrol(*PEERS)
        links = [site.link(name) for name in ("b", "c")]
        peers = train(site)
        coordinator.until("committed: all 3 contributors in")
        for link in links:
            link.cut()
        coordinator.until("aborted: too few: 1 of quorum 2")
        alone = site.status()
        coordinator.until("aborted: too few: 1 of quorum 2")
        still = site.status()
        assert (still["outer_step"], still["digest"]) == (alone["outer_step"], alone["digest"])
        for link in links:
            link.repair()
        coordinator.until("committed: all 3 contributors in")
        end(site, coordinator, peers)
    assert not any(took_a_snapshot(peer) for peer in peers.values())  # who comes back later than the other takes updates
