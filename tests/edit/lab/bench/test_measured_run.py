"""Real runs for measurements: what they tell, that a peer can be killed in them, and that nothing is left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edit.lab.bench.measured_run import MeasuredRun, alone
from edit.lab.link import LinkShape
from edit.lab.processes import ChildDied, Programs
from tests.support.daemons import small

STEPS = 12
SETTINGS = small("trial", model={"width": 16, "context": 16}, sync={"every": 4, "outer_steps": STEPS})
TOKENS = 4 * 16  # of an inner step: batch_size * context


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_bytes(Path(json.__file__).read_bytes())
    return path


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_a_trial_runs_to_its_end_over_a_kill_and_tells_what_was_merged(tmp_path: Path, data: Path) -> None:
    def committed() -> list[int]:
        return [line["outer_step"] for line in real.lines() if line["kind"] == "round" and line["committed"]]

    with MeasuredRun(tmp_path / "trial", SETTINGS, data) as real:
        real.enrol("ada", LinkShape(up_bits_per_s=50e6), "--throttle", "20")
        real.start("ada")
        real.until("a commit", lambda: bool(committed()), 60.0)
        real.kill("ada")
        real.start("ada")
        real.finish(60.0)
        assert committed() == list(range(1, STEPS + 1))
        assert real.tokens() >= STEPS * TOKENS and real.tokens() % TOKENS == 0
        assert min(real.links["ada"].carried_bytes) > 0


@pytest.mark.timeout(60)
def test_a_peer_that_fails_ends_the_trial_with_its_last_words(tmp_path: Path, data: Path) -> None:
    fails = Programs(peer=(sys.executable, "-c", "import sys; sys.exit('the data folder is on fire')"))
    with MeasuredRun(tmp_path / "trial", SETTINGS, data, fails) as real:
        real.enrol("ada", LinkShape())
        real.start("ada")
        with pytest.raises(ChildDied, match="the data folder is on fire"):
            real.finish(60.0)


@pytest.mark.exhaustive
@pytest.mark.timeout(60)
def test_peers_alone_give_seconds_per_step(tmp_path: Path, data: Path) -> None:
    assert alone(tmp_path / "alone", SETTINGS, data, ("ada", "grace"), 30) > 0.0
    assert all((tmp_path / "alone" / name / "model.safetensors").exists() for name in ("ada", "grace"))
