"""A peer whose hours end leaves the run politely and goes on where it was in the next ones."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import torch

from edit.errors import ConfigError
from editpb.hours import Hours, keep_hours
from editpb.messages import RunPhase
from peers.command_options import in_hours
from tests.peers.test_daemon import coordinator, train
from tests.support.fake_coordinator import FakeCoordinator

OUTSIDE, INSIDE = datetime(2026, 11, 22, 12), datetime(2026, 11, 22, 23)


def test_a_peer_leaves_when_its_hours_end_and_goes_on_in_the_next_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    restarts: list[int] = []
    with coordinator(1000) as fake:
        fake.script = FakeCoordinator.commit

        def local(_: float) -> datetime:
            return OUTSIDE if fake.view.outer_step >= 3 else INSIDE

        def work() -> None:
            train(fake, tmp_path)

        night = Hours.parse("22:00-06:00")
        keep_hours(night, work, local=local, look_s=0.001, restart=lambda: restarts.append(fake.view.outer_step))
        fake.await_(lambda f: f.goodbyes)
        assert fake.goodbyes == ["the peer was asked to stop"] and len(restarts) == 1 and restarts[0] >= 3
        fake.script = lambda one: commit_until(one, restarts[0] + 3)
        keep_hours(night, work, local=lambda _: INSIDE, look_s=0.001, restart=lambda: restarts.append(0))
        fake.await_(lambda f: len(f.goodbyes) == 2)
        assert fake.goodbyes[-1] == "the run has finished" and len(restarts) == 1
        assert fake.state is not None and fake.state.outer_step == restarts[0] + 3


def commit_until(fake: FakeCoordinator, outer_step: int) -> None:
    fake.commit()
    if fake.view.outer_step >= outer_step:
        fake.change_view(phase=RunPhase.FINISHED, round_id=0)


def test_hours_are_not_for_the_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="not with torchrun"):
        in_hours("22:00-06:00", lambda: pytest.fail("it worked"))
