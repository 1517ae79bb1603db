"""Real daemons at two levels: two sites, each with its own coordinator and peers, are the two peers of a run above them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import aggregator.cli
import peers.cli
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.lab.run_toml import Settings
from tests.support.daemons import Daemon, Site, call, small

STEPS = 8


def settings(name: str, every: int, start_peers: int, outer_steps: int = STEPS) -> Settings:
    return small(
        name,
        sync={"every": every, "outer_steps": outer_steps},
        outer={"optimizer": "sgd", "lr": 1.0},
        rounds={"start_peers": start_peers},
        membership={"lease_s": 10.0},
    )


def lower_site(folder: Path, name: str, names: list[str]) -> Site:
    """A site with its peers and its region enrolled; nothing runs."""
    return Site(folder / name, settings(name, 8, len(names), 100_000))


def open_site(site: Site, names: list[str]) -> Daemon:
    coordinator = site.serve()
    site.enrol(*names)
    invitation = call(aggregator.cli.app, "invite", "--state", site.state, "region", "--role", "region").splitlines()[0]
    said = call(peers.cli.app, "join", invitation, "--home", site.folder / "region")
    assert "next: edit-peer region --home" in said
    for name in names:
        site.peer(name, "--throttle", 5)
    return coordinator


def injected(site: Site) -> int:
    """The outer step of the run above that the folder of a run below holds."""
    found = load_outer(StateFolder(site.state)).injected
    return -1 if found is None else found.upper_step


@pytest.mark.timeout(240)
def test_two_sites_train_one_model_and_go_on_after_kills_at_both_levels(tmp_path: Path) -> None:
    above = Site(tmp_path / "above", settings("above", 16, 2))
    east, west = lower_site(tmp_path, "east", ["p", "q"]), lower_site(tmp_path, "west", ["r"])

    def region(site: Site, name: str) -> Daemon:
        return above.start("peers", "region", "--home", above.folder / name, "--below", site.folder / "region")

    with above, east, west:
        top = above.serve()
        above.enrol("east", "west")
        open_site(east, ["p", "q"])
        west_coordinator = open_site(west, ["r"])
        first, second = region(east, "east"), region(west, "west")
        first.until("outer step 2 above")
        first.kill()
        again = region(east, "east")
        again.until("joined run above-")

        second.until("outer step 4 above")
        west_coordinator.kill()
        west.start("aggregator", "serve", "--keep-serving", "--state", west.state).until("recovered outer step")

        top.until(f"finished at outer step {STEPS}")
        assert (again.finish(), second.finish()) == (0, 0)
        assert f"the run above has finished, at outer step {STEPS} above" in again.lines[-1]
        status = above.status()
        assert (status["phase"], status["outer_step"]) == ("finished", STEPS)
        assert {row["peer_id"]: row["contributions"] > 0 for row in status["members"] if row["role"] == "peer"} == {
            "east": True,
            "west": True,
        }
        for site, names in ((east, ["p", "q"]), (west, ["r"])):
            site.operate("drain")
            assert [daemon.finish() for daemon in site.daemons if "run" in daemon.process.args] == [0] * len(names)
            assert injected(site) >= STEPS - 1  # the last one comes in with the next commit, if there is one
        top.process.send_signal(signal.SIGTERM)
        assert top.finish() == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_region_masks_what_it_sends_above_and_its_peers_what_they_send_to_it(tmp_path: Path) -> None:
    masks: Settings = {
        "secagg": {"enabled": True},
        "rounds": {"start_peers": 3, "quorum": 3},
        "audit": {"enabled": True},
        "penalty": {"enabled": False},  # no round has too few sound ones for a sum
    }
    above = Site(tmp_path / "above", settings("above", 16, 3, 6) | masks)
    below = Site(tmp_path / "below", settings("below", 8, 3, 100_000) | masks)
    with above, below:
        top = above.serve()
        above.enrol("east", "x", "y")
        lines = [call(peers.cli.app, "fingerprint", "--home", above.folder / name) for name in ("east", "x", "y")]
        members = tmp_path / "members.txt"
        members.write_text("".join(lines))
        open_site(below, ["p", "q", "r"])
        command = ["peers", "region", "--home", above.folder / "east", "--below", below.folder / "region"]
        region = above.start(*command, "--members", members)
        for name in ("x", "y"):
            above.peer(name, "--members", members)
        region.until("masks with east, x, y; roster ")
        region.until("outer step 2 above")
        region.kill()
        again = above.start(*command, "--members", members)
        top.until("finished at outer step 6")
        assert again.finish() == 0
        log = json.loads(call(aggregator.cli.app, "audit", "verify", "--state", above.state, "--json"))
        assert log["masked"] == {"confirmed": 6, "unconfirmed": 0}
        status = above.status()
        contributed = {row["peer_id"]: row["contributions"] for row in status["members"] if row["role"] == "peer"}
        assert all(count >= 5 for count in contributed.values()), contributed
        assert injected(below) >= 2
        below.operate("drain")
        assert [daemon.finish() for daemon in below.daemons if "run" in daemon.process.args] == [0] * 3
        log = json.loads(call(aggregator.cli.app, "audit", "verify", "--state", below.state, "--json"))
        assert log["masked"]["confirmed"] > 6 and not log["masked"]["unconfirmed"]


@pytest.mark.timeout(120)
def test_a_region_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    above = Site(tmp_path / "above", settings("above", 12, 1))
    below = lower_site(tmp_path, "below", ["p"])
    with above, below:
        above.serve()
        above.enrol("east")
        open_site(below, ["p"])
        swapped = above.start("peers", "region", "--home", below.folder / "region", "--below", above.folder / "east")
        assert swapped.finish() == 2
        assert "enrolled as region; the run above must invite with --role peer" in swapped.lines[-1]
        uneven = above.start("peers", "region", "--home", above.folder / "east", "--below", below.folder / "region")
        assert uneven.finish() == 2
        assert "exchanges every 12 inner steps, the run below every 8" in uneven.lines[-1]
        (above.folder / "east" / "policy.toml").write_text("[require]\nsecagg = true\n")
        unmasked = above.start("peers", "region", "--home", above.folder / "east", "--below", below.folder / "region")
        assert unmasked.finish() == 2
        assert "require.secagg = true: the run has secagg.enabled = false" in unmasked.lines[-1]
        trainer = below.start("peers", "run", "--home", below.folder / "region", "--data", below.folder / "text.py")
        assert trainer.finish() == 2
        assert "enrolled as region" in trainer.lines[-1]
