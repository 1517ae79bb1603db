"""A tracker that fails, hangs or is slow costs values, never a step; after a restart it goes on with its run."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edit import plugins
from edit.errors import ConfigError
from edit.trackers import TrackedRun, TrackerChoice, Trackers
from edit.trackers.background import BackgroundTracker

FOREVER_S = 60.0  # for what comes at once


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_admitted", {})


class Recorder:
    """Keeps what it is told; before each call it does `first`."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        self.first, self.said, self.closed = first, list[tuple[int, Mapping[str, object]]](), False

    def log(self, step: int, values: Mapping[str, object]) -> None:
        self.first()
        self.said.append((step, values))

    def close(self) -> None:
        self.closed = True


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_it_is_made_with_the_first_step_and_closed_after_the_last(caplog: pytest.LogCaptureFixture) -> None:
    made, recorder = [], Recorder()
    tracker = BackgroundTracker("r", lambda step: made.append(step) or recorder)  # type: ignore[func-returns-value]
    values = {"loss": 1.0}
    tracker.log(7, values)
    values["loss"] = 2.0  # what was handed over stays as it was
    tracker.log(8, values)
    tracker.close(FOREVER_S)
    tracker.log(9, values)
    assert (made, recorder.said, recorder.closed) == ([7], [(7, {"loss": 1.0}), (8, {"loss": 2.0})], True)
    assert warnings(caplog) == []


def test_one_that_nothing_was_said_to_is_never_made() -> None:
    made: list[int] = []
    BackgroundTracker("r", made.append).close(FOREVER_S)  # type: ignore[arg-type]
    assert made == []


def test_one_that_hangs_keeps_nobody_and_what_waits_for_it_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait()

    recorder = Recorder(hang)
    tracker = BackgroundTracker("r", lambda step: recorder, most_waiting=3)
    tracker.log(0, {})
    assert begun.wait(FOREVER_S)
    for step in range(1, 100):
        tracker.log(step, {})
    tracker.close(within_s=0)
    assert warnings(caplog) == [
        "--tracker r: does not keep up; values are lost, the training goes on",
        "--tracker r: did not end within 0 s; it may lack the last values",
    ]
    go_on.set()
    tracker.close(FOREVER_S)
    assert [step for step, _ in recorder.said] == [0, 1, 2, 3] and recorder.closed
    assert warnings(caplog)[2:] == ["--tracker r: did not keep up; it lacks 96 lines of values"]


@pytest.mark.parametrize("error", [OSError("no\nroom"), SystemExit("no\nroom")])
def test_one_that_raises_is_said_once_and_told_on(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    failing = [error, error]

    def fail() -> None:
        if failing:
            raise failing.pop()

    recorder = Recorder(fail)
    tracker = BackgroundTracker("r", lambda step: recorder)
    for step in range(3):
        tracker.log(step, {})
    tracker.close(FOREVER_S)
    assert [step for step, _ in recorder.said] == [2] and recorder.closed
    assert warnings(caplog) == [f"--tracker r: {type(error).__name__}: no room; the training goes on"]


def test_one_that_cannot_be_made_or_closed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Unclosable(Recorder):
        def close(self) -> None:
            raise ValueError("in close")

    def broken(step: int) -> Recorder:
        raise ValueError("in make")

    with Trackers([BackgroundTracker("a", broken), BackgroundTracker("b", lambda step: Unclosable())]) as trackers:
        for step in range(3):
            trackers.log(step, {})
    assert sorted(warnings(caplog)) == [
        f"--tracker {name}: ValueError: in {where}; the training goes on" for name, where in (("a", "make"), ("b", "close"))
    ]


def opened(choice: TrackerChoice, folder: Path) -> Trackers:
    return choice.open("run-1", "tiny", "a", folder, {"sync": {"every": 10}, "seed": 3})


def test_a_plugin_is_one_once_it_is_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"an option uses entry:mine .edit.trackers., code of another package: add `--allow"):
        TrackerChoice.of(["entry:mine"], [], frozenset())
    runs: list[TrackedRun] = []
    recorder = Recorder()
    plugins.register("trackers", "mine", lambda run: runs.append(run) or recorder)  # type: ignore[func-returns-value]
    plugins.register("trackers", "none", lambda run: None)
    choice = TrackerChoice.of(["entry:mine", "entry:none"], ["mine.level=2"], frozenset())
    trackers = opened(choice, tmp_path)
    trackers.log(5, {"loss": 0.5})
    trackers.close(FOREVER_S)
    assert recorder.said == [(5, {"loss": 0.5})] and recorder.closed
    assert (runs[0].folder, runs[0].first_step, runs[0].options) == (tmp_path / "mine", 5, {"level": 2})
    (warning,) = warnings(caplog)
    assert warning.startswith("--tracker entry:none: PluginError: entry:none (edit.trackers): gave a NoneType without a method")


@pytest.mark.parametrize(
    ("names", "options", "says"),
    [
        (["tensorbord"], [], "--tracker tensorbord: must be one of tensorboard, wandb, mlflow, trackio, or entry:NAME"),
        (["tensorboard"], ["wandb.mode=online"], "--tracker-option wandb.mode=online: must be NAME.KEY=VALUE, where --tracker"),
        (["tensorboard"], ["mode=online"], "--tracker-option mode=online: must be NAME.KEY=VALUE"),
        (["tensorboard"], ["tensorboard.mode"], "--tracker-option tensorboard: mode: must be KEY=VALUE"),
    ],
)
def test_a_wrong_option_is_named(names: list[str], options: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TrackerChoice.of(names, options, frozenset())


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--tracker wandb needs the package wandb: pip install 'edit-localsgd\[wandb\]'"):
        TrackerChoice.of(["wandb"], [], frozenset())


def test_tensorboard_goes_on_after_a_restart_and_supersedes_what_is_trained_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    choice = TrackerChoice.of(["tensorboard"], [], frozenset())
    for first in (10, 30):  # was at 40 when it was killed, and goes on from a checkpoint at 20
        trackers = opened(choice, tmp_path)
        for step in (first, first + 10, first + 20, first + 30):
            trackers.log(step, {"loss": first + step / 100, "edit/verdict": "ok"})
        trackers.close(FOREVER_S)
    (folder,) = tmp_path.glob("tensorboard/run-1/a")
    events = accumulator.EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    assert [event.step for event in events.Scalars("loss")] == [10, 20, 30, 40, 50, 60]
    assert [round(event.value, 1) for event in events.Scalars("loss")] == [10.1, 10.2, 30.3, 30.4, 30.5, 30.6]
    assert {"settings/text_summary", "edit/verdict/text_summary"} <= set(events.Tags()["tensors"])


class FakeRun:
    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self.calls = calls

    def log(self, values: object, step: int) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", ()))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Stands in for wandb and trackio, which are large: benchmarks/trackers.py tries the real ones."""
    calls: list[tuple[str, Any]] = []
    for name in ("wandb", "trackio"):
        module = ModuleType(name)
        module.__spec__ = sys.__spec__
        module.init = lambda **given: calls.append(("init", given)) or FakeRun(calls)  # type: ignore[attr-defined,func-returns-value]
        module.Settings = dict  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, f"edit.trackers.{name}", raising=False)
    return calls


def test_wandb_is_offline_and_has_one_id_for_a_member_of_a_run(tmp_path: Path, calls: list[tuple[str, Any]]) -> None:
    for names in (["wandb"], ["wandb"]):
        trackers = opened(TrackerChoice.of(names, ["wandb.project=mine"], frozenset()), tmp_path)
        trackers.log(10, {"loss": 1.0})
        trackers.close(FOREVER_S)
    assert [kind for kind, _ in calls] == ["init", "log", "finish"] * 2 and calls[1] == ("log", (10, {"loss": 1.0}))
    first, second = calls[0][1], calls[3][1]
    assert (first["mode"], first["project"], first["resume"]) == ("offline", "mine", "allow")
    assert first["id"] == second["id"] and first["id"].startswith("run-1-a-") and first["config"]["seed"] == 3
    assert first["settings"]["console"] == "off" and first["settings"]["save_code"] is False


def test_trackio_goes_on_with_the_run_of_the_same_name(tmp_path: Path, calls: list[tuple[str, Any]]) -> None:
    trackers = opened(TrackerChoice.of(["trackio"], [], frozenset()), tmp_path)
    trackers.log(10, {"loss": 1.0})
    trackers.close(FOREVER_S)
    assert [kind for kind, _ in calls] == ["init", "log", "finish"]
    init = calls[0][1]
    assert (init["project"], init["name"], init["resume"], init["space_id"]) == ("tiny", "run-1 a", "allow", None)


def test_an_unknown_option_of_a_tracker_is_named(
    tmp_path: Path, calls: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    trackers = opened(TrackerChoice.of(["trackio"], ["trackio.mode=offline"], frozenset()), tmp_path)
    trackers.log(10, {"loss": 1.0})
    trackers.close(FOREVER_S)
    assert warnings(caplog) == [
        "--tracker trackio: ConfigError: --tracker-option mode: unknown; there is project, space; the training goes on"
    ]
    assert calls == []
