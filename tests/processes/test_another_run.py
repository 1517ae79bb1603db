"""A peer of one run comes to another one: a line that says so, and neither run is touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.daemons import Site, small


@pytest.mark.timeout(120)
def test_a_returning_peer_of_another_run_is_told_so_and_touches_nothing(tmp_path: Path) -> None:
    def site(name: str) -> Site:
        return Site(tmp_path / name, small(name, sync={"every": 2, "outer_steps": 3}))

    with site("old") as old, site("new") as new:
        old.serve()
        old.enrol("a")
        assert old.peer("a").finish() == 0
        finished = old.status()
        coordinator = new.serve()
        new.enrol("b")
        home, identity = old.folder / "a", old.folder / "a" / "identity.json"

        # It dials where its coordinator was, and finds the other one there.
        there = json.loads((new.state / "addresses.json").read_text())["listen"]
        mine = identity.read_text()
        identity.write_text(json.dumps({**json.loads(mine), "endpoints": [there]}))
        lost = old.peer("a")
        assert lost.finish() == 3
        words = f"edit-peer: {there}: its certificate is not from this run's authority (is another run served there?)"
        assert lost.lines == [words + "\n"]
        identity.write_text(mine)

        # It is a member of the other one, and its folder holds checkpoints of the old one.
        shutil.copytree(home / "checkpoints", new.folder / "b" / "checkpoints")
        member = new.peer("b")
        assert member.finish() == 2
        assert "another run" in member.lines[-1] and "--fresh" in member.lines[-1], member.lines
        assert new.status()["outer_step"] == 0
        fresh = new.peer("b", "--fresh")
        assert fresh.finish() == 0
        coordinator.until("finished at outer step 3")
        assert old.status()["digest"] == finished["digest"]
