"""When a peer saves: after enough outer steps, never two at once, before anything else at the start, and when asked to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edit.config.run import CodecConfig, RoundsConfig, RunConfig, SyncConfig
from edit.errors import ConfigError
from edit.replica.ranks import ALONE
from peers.training.checkpoint import PeriodicCheckpoints, needs_no_snapshot
from peers.training.checkpoint_files import Checkpoints, Owner, Saved


class FakeCheckpoints:
    """Writes when told to."""

    def __init__(self, saved: Saved | None = None) -> None:
        self.saved = saved
        self.idle = True
        self.seconds = 0.0
        self.events: list[str] = []

    def newest(self) -> Saved | None:
        return self.saved

    def wait(self) -> None:
        self.events.append("wait")
        self.idle = True


class FakeTraining:
    """What a `Resumable` is asked for."""

    ranks = ALONE

    class trainer:
        steps = 7

    def save(self, checkpoints: Any) -> None:
        assert checkpoints.idle
        checkpoints.idle = False
        checkpoints.events.append("save")

    def load(self, checkpoints: Any, saved: Saved, run_step: int) -> None:
        checkpoints.events.append(f"load {saved.path}")


SAVED = Saved(Path("folder/checkpoint-1"), 1, {})


def autosave(checkpoints: FakeCheckpoints | None, every: int = 1, strict: bool = False) -> PeriodicCheckpoints:
    return PeriodicCheckpoints(FakeTraining(), checkpoints, every, strict=strict)  # type: ignore[arg-type]


def test_the_first_checkpoint_is_whole_before_training_begins() -> None:
    checkpoints = FakeCheckpoints()
    subject = autosave(checkpoints)
    subject.resume()
    subject.begin(3)
    assert checkpoints.events == ["wait", "save", "wait"]


def test_going_on_from_a_checkpoint_makes_none_at_once() -> None:
    checkpoints = FakeCheckpoints(SAVED)
    subject = autosave(checkpoints)
    subject.resume()
    subject.begin(3)
    subject.after_step(3)
    assert checkpoints.events == ["load folder/checkpoint-1"]


def test_every_so_many_outer_steps() -> None:
    checkpoints = FakeCheckpoints(SAVED)
    subject = autosave(checkpoints, every=3)
    subject.resume()
    subject.begin(10)
    counts = []
    for outer_step in (10, 11, 12, 13, 13, 15, 17, 19):
        subject.after_step(outer_step)
        counts.append(checkpoints.events.count("save"))
        checkpoints.idle = True
    assert counts == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_run_that_was_taken_back_has_one_at_once_and_goes_on_counting_from_there() -> None:
    checkpoints = FakeCheckpoints(SAVED)
    subject = autosave(checkpoints, every=3)
    subject.resume()
    subject.begin(40)
    counts = []
    for outer_step in (40, 12, 13, 14, 15):
        subject.after_step(outer_step)
        counts.append(checkpoints.events.count("save"))
        checkpoints.idle = True
    assert counts == [0, 1, 1, 1, 2]


def test_while_one_is_being_written_the_next_has_to_wait() -> None:
    checkpoints = FakeCheckpoints()
    subject = autosave(checkpoints)
    subject.after_step(1)
    subject.after_step(2)
    assert checkpoints.events.count("save") == 1
    checkpoints.idle = True
    subject.after_step(2)
    assert checkpoints.events.count("save") == 2


def test_it_takes_a_tenth_of_the_time_at_most() -> None:
    now = 100.0
    checkpoints = FakeCheckpoints()
    subject = PeriodicCheckpoints(FakeTraining(), checkpoints, clock=lambda: now)  # type: ignore[arg-type]
    saves = []
    for outer_step in range(1, 8):
        subject.after_step(outer_step)
        saves.append(checkpoints.events.count("save"))
        checkpoints.idle, checkpoints.seconds = True, 3.0
        now += 10.0
    assert saves == [1, 1, 1, 2, 2, 2, 3]


def test_a_strict_one_skips_none_and_contributes_only_on_a_whole_one() -> None:
    checkpoints = FakeCheckpoints()
    subject = autosave(checkpoints, strict=True)
    for outer_step in (1, 2):
        subject.after_step(outer_step)
    assert checkpoints.events == ["wait", "save", "wait", "save"]
    subject.before_contribution()
    assert checkpoints.idle


def test_another_one_contributes_at_once() -> None:
    checkpoints = FakeCheckpoints()
    subject = autosave(checkpoints)
    subject.after_step(1)
    subject.before_contribution()
    assert not checkpoints.idle


def test_a_stop_saves_and_waits() -> None:
    checkpoints = FakeCheckpoints()
    subject = autosave(checkpoints)
    subject.after_step(1)
    subject.save_last()
    assert checkpoints.events.count("save") == 2 and checkpoints.idle


def test_without_a_folder_nothing_is_kept_or_taken() -> None:
    subject = autosave(None)
    subject.resume()
    subject.begin(1)
    subject.after_step(2)
    subject.before_contribution()
    subject.save_last()
    assert str(subject.explain(ConfigError("why"))) == "why"


def test_what_went_wrong_on_entering_names_the_checkpoint() -> None:
    subject = autosave(FakeCheckpoints(SAVED))
    with pytest.raises(ConfigError, match="folder/checkpoint-1: too new; --fresh moves it aside"):
        subject.resume()
        raise subject.explain(ConfigError("too new"))


@pytest.mark.parametrize(
    ("worker", "exact"),
    [
        ({"outer_step": 3}, (True, True, True, False)),
        ({"outer_step": 3, "pending": {"applied": []}}, (True, True, True, False)),
        ({"outer_step": 3, "pending": {"applied": [0]}}, (True, True, False, False)),
        ({"outer_step": 3, "pending": 7}, (False, False, False, False)),
        ({"shares": [{"outer_step": 3}, {"outer_step": 3}]}, (True, True, True, False)),
        ({"shares": [{"outer_step": 2}, {"outer_step": 3}]}, (True, True, False, False)),
        ({"shares": []}, (False, False, False, False)),
        ({"outer_step": "x"}, (False, False, False, False)),
        ([], (False, False, False, False)),
    ],
)
def test_the_newest_checkpoint_tells_whether_a_snapshot_will_be_needed(tmp_path: Path, worker: Any, exact: Any) -> None:
    checkpoints = Checkpoints(tmp_path, Owner(run_id="run", peer_id="a", schema_hash="5c"), 3)
    for saved in ({"outer_step": 1}, worker):
        checkpoints.save({}, {"worker": saved})
        checkpoints.wait()
    # Of the four int8 updates that are kept, three are fewer bytes than the parameters.
    config = RunConfig(codec=CodecConfig(down="int8"))
    assert tuple(needs_no_snapshot(tmp_path, config, run_step) for run_step in (2, 3, 6, 7)) == exact


def test_with_strict_or_stale_contributions_a_checkpoint_is_exact_of_any_step_and_without_one_nothing_is(
    tmp_path: Path,
) -> None:
    assert not needs_no_snapshot(tmp_path, RunConfig(), 1) and not needs_no_snapshot(tmp_path / "none", RunConfig(), 1)
    (tmp_path / "checkpoint-00000007").mkdir()
    assert not needs_no_snapshot(tmp_path, RunConfig(), 1)
    checkpoints = Checkpoints(tmp_path, Owner(run_id="run", peer_id="a", schema_hash="5c"), 3)
    checkpoints.save({}, {"worker": {"outer_step": 1}})
    checkpoints.wait()
    strict, stale = RunConfig(sync=SyncConfig(every=2, strict=True)), RunConfig(rounds=RoundsConfig(max_staleness=1))
    assert [needs_no_snapshot(tmp_path, each, 5) for each in (RunConfig(), strict, stale)] == [False, True, True]
