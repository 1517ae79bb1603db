"""Real daemons: a peer that waits for others says so; the coordinator ends with its run, after its peers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.daemons import Site, small

SETTINGS = small("ends", sync={"every": 4, "outer_steps": 3}, rounds={"start_peers": 2})


@pytest.mark.timeout(120)
def test_a_waiting_peer_says_for_whom_and_serve_ends_with_the_run(tmp_path: Path) -> None:
    with Site(tmp_path, SETTINGS) as site:
        coordinator = site.serve("--threads", 1)
        site.enrol("a", "b")
        a = site.peer("a")
        a.until("waiting for 1 of 2 peers (rounds.start_peers = 2)")
        assert site.status()["waiting_for"] == "1 of 2 peers (rounds.start_peers = 2)"
        b = site.peer("b")
        assert coordinator.finish() == 0
        assert "the run has finished; every peer has left" in coordinator.last("the run has finished")
        assert (a.finish(), b.finish()) == (0, 0)
        ends = {peer.last("the run has finished").partition("digest")[2] for peer in (a, b)}
        assert len(ends) == 1, "both have the last update"
        again = site.serve("--keep-serving")  # of a finished run: for peers that come late
        late = site.peer("a")
        late.until("the run has finished at outer step 3")
        again.process.send_signal(signal.SIGTERM)
        assert (late.finish(), again.finish()) == (0, 0)
