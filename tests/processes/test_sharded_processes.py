"""A replica of two ranks under torchrun and a plain peer in one run; a rank is killed, torchrun starts the replica again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from edit.lab.run_toml import Settings
from tests.support.daemons import Site, small

STEPS = 16


def settings(start_peers: int, outer_steps: int = STEPS) -> Settings:
    return small(
        "sharded",
        inner={"optimizer": "muon"},  # with AdamW for the embedding and norms
        sync={"every": 4, "outer_steps": outer_steps},
        outer={"optimizer": "sgd", "lr": 0.8},
        rounds={"start_peers": start_peers, "floor_s": 60.0, "ceiling_s": 60.0},
        membership={"lease_s": 10.0},
    )


@pytest.mark.timeout(240)
def test_a_killed_rank_takes_its_replica_out_of_the_round_not_the_run(tmp_path: Path) -> None:
    with Site(tmp_path, settings(2)) as site:
        coordinator = site.serve()
        site.enrol("sharded", "plain")
        sharded, plain = site.peer("sharded", ranks=2), site.peer("plain")
        coordinator.until("committed: all 2 contributors in")
        plain.until("outer step 2,")

        os.kill(sharded.children()[1], signal.SIGKILL)
        coordinator.until("sharded: l")  # left or lost, whichever its other rank could still say
        coordinator.until("committed: the only contributor in")  # nobody waits for the dead
        site.operate("pause")
        sharded.until("resuming from")
        sharded.until("joined at outer step")
        site.operate("resume")
        coordinator.until("committed: all 2 contributors in")

        coordinator.until("finished at outer step")
        assert (sharded.finish(), plain.finish()) == (0, 0)
        status = site.status()
        assert (status["phase"], status["outer_step"]) == ("finished", STEPS)
        for peer in (sharded, plain):
            assert f"outer step {STEPS}, digest {status['digest'][:12]}" in peer.last("the run has finished")


@pytest.mark.timeout(120)
def test_a_rank_that_is_asked_to_stop_ends_its_replica_politely(tmp_path: Path) -> None:
    with Site(tmp_path, settings(1, 9999)) as site:
        coordinator = site.serve()
        site.enrol("sharded")
        sharded = site.peer("sharded", ranks=2)
        sharded.until("outer step 2,")
        os.kill(sharded.children()[1], signal.SIGTERM)
        assert "the peer was asked to stop" in coordinator.until("sharded: left")
        assert sharded.finish() == 0
        assert "stopping as asked" in sharded.last("stopping")
        assert [path.name for path in (tmp_path / "sharded" / "checkpoints").glob(".partial-*")] == []
