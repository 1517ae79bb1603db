"""Real daemons over loopback and mutual TLS: a peer, then the coordinator, are killed with SIGKILL; the run ends well."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.daemons import Daemon, Site, small

STEPS = 40
SETTINGS = small("killed", sync={"every": 8, "outer_steps": STEPS}, rounds={"start_peers": 2}, storage={"checkpoint_every": 5})


@pytest.mark.timeout(240)
def test_a_killed_peer_returns_and_a_killed_coordinator_continues(tmp_path: Path) -> None:
    with Site(tmp_path, SETTINGS) as site:
        state = site.state

        def peer(name: str) -> Daemon:
            # throttled, so that the run is still going on when the killed one is back
            return site.peer(name, "--throttle", 10)

        coordinator = site.serve()
        site.enrol("a", "b")
        a, b = peer("a"), peer("b")
        b.until("outer step 3,")
        b.kill()
        assert "lost" in coordinator.until("b: lost")
        coordinator.until("committed: the only contributor in")  # nobody waits for the dead

        returned = peer("b")
        returned.until("joined at outer step")
        coordinator.until("committed: all 2 contributors in")

        coordinator.kill()
        before = outer(state)
        coordinator = site.start("aggregator", "serve", "--keep-serving", "--state", state)
        recovered = coordinator.until("recovered outer step")
        assert f"outer step {before['outer_step']}, digest {before['digest'][:12]}" in recovered
        coordinator.until("finished at outer step")
        assert (a.finish(), returned.finish()) == (0, 0)
        status = site.status()
        assert (status["phase"], status["outer_step"]) == ("finished", STEPS)
        last = f"the run has finished at outer step {STEPS}, digest {status['digest'][:12]}"
        assert last in a.lines[-1], a.lines[-3:]
        assert last in returned.lines[-1], returned.lines[-3:]
        coordinator.process.send_signal(signal.SIGTERM)
        assert coordinator.finish() == 0
    steps = [line["outer_step"] for line in rounds(state) if line["committed"]]
    # No commit is made twice, and none is lost: only the line about the one on disk when the coordinator was killed may be.
    assert steps == sorted(set(steps))
    assert set(range(1, STEPS + 1)) - set(steps) <= {before["outer_step"]}


def rounds(state: Path) -> list[dict[str, object]]:
    lines = (json.loads(line) for line in (state / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "round"]


def outer(state: Path) -> dict[str, object]:
    """What the folder of a killed coordinator holds."""
    from aggregator.storage.state_folder import StateFolder
    from aggregator.storage.store import load_outer

    state_now = load_outer(StateFolder(state))
    return {"outer_step": state_now.outer_step, "digest": state_now.digest}
