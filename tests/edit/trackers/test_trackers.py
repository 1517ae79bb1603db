"""A tracker that fails, hangs or is slow costs values, never a step; after a restart it goes on with its run."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
        "--tracker r: did not end in time; it may lack the last values",
    ]
    go_on.set()
    tracker.close(FOREVER_S)
    assert [step for step, _ in recorder.said] == [0, 1, 2, 3] and recorder.closed
    assert warnings(caplog)[2:] == ["--tracker r: lacks 96 lines of values"]


class Flaky:
    """Makes trackers, at a clock that it has; `failing` says what the next calls raise: None, nothing."""

    def __init__(self, *failing: BaseException | None) -> None:
        self.now, self.failing, self.made = 0.0, list(failing), list[tuple[float, int]]()
        self.recorders: list[Recorder] = []
        self._called = threading.Semaphore(0)
        self.tracker = BackgroundTracker("r", self._make, clock=lambda: self.now)

    def _call(self) -> None:
        self._called.release()
        if self.failing and (error := self.failing.pop(0)) is not None:
            raise error

    def _make(self, step: int) -> Recorder:
        self.made.append((self.now, step))
        self._call()
        self.recorders.append(Recorder(self._call))
        return self.recorders[-1]

    def log(self, step: int, calls: int, at: float | None = None) -> None:
        """Hand over values, at a time, and wait for so many calls of make and log."""
        self.now = self.now if at is None else at
        self.tracker.log(step, {})
        for _ in range(calls):
            assert self._called.acquire(timeout=FOREVER_S)

    def end(self) -> list[list[int]]:
        self.tracker.close(FOREVER_S)
        assert all(recorder.closed for recorder in self.recorders)
        return [[step for step, _ in recorder.said] for recorder in self.recorders]


@pytest.mark.parametrize("error", [OSError("no\nroom"), SystemExit("no\nroom")])
def test_one_that_cannot_be_made_is_tried_again_with_growing_pauses(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    flaky = Flaky(error, error, None)
    flaky.log(0, calls=1)
    flaky.log(1, calls=0, at=59)
    flaky.log(2, calls=1, at=61)
    flaky.log(3, calls=0, at=180)
    flaky.log(4, calls=6, at=182)  # made, and told of all five
    assert flaky.made == [(0, 0), (61, 0), (182, 0)] and flaky.end() == [[0, 1, 2, 3, 4]]
    assert warnings(caplog) == [f"--tracker r: {type(error).__name__}: no room; tried again in 60 s, the training goes on"]


def test_one_that_raises_is_closed_and_made_again(caplog: pytest.LogCaptureFixture) -> None:
    flaky = Flaky(None, None, OSError("full"), None, None, OSError("full"))
    flaky.log(0, calls=2)
    flaky.log(1, calls=1)
    flaky.log(2, calls=2, at=60)
    flaky.log(3, calls=1, at=60 + 3601)  # it worked for more than an hour: a new trouble
    flaky.log(4, calls=2, at=60 + 3601 + 60)
    assert [step for _, step in flaky.made] == [0, 2, 4] and flaky.end() == [[0], [2], [4]]
    said = "--tracker r: OSError: full; tried again in 60 s, the training goes on"
    assert warnings(caplog) == [said, said, "--tracker r: lacks 2 lines of values"]


def test_at_the_end_one_that_failed_is_tried_once_more_at_once(caplog: pytest.LogCaptureFixture) -> None:
    flaky, away = Flaky(OSError("away")), Flaky(*[OSError("away")] * 9)
    for each in (flaky, away):
        each.log(0, calls=1)
        each.log(1, calls=0)
    assert flaky.end() == [[0, 1]] and away.end() == []
    assert warnings(caplog)[2:] == ["--tracker r: lacks 2 lines of values"]


@pytest.mark.parametrize("error", [ConfigError("no such mode"), ImportError("no such mode")])
def test_what_would_be_raised_again_is_final(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    flaky = Flaky(error)
    flaky.log(0, calls=1)
    flaky.tracker._thread.join(FOREVER_S)
    flaky.log(1, calls=0, at=7200)
    assert flaky.end() == [] and len(flaky.made) == 1
    assert warnings(caplog) == [f"--tracker r: {type(error).__name__}: no such mode; not tried again, the training goes on"]


def test_one_that_cannot_be_closed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Unclosable(Recorder):
        def close(self) -> None:
            raise ValueError("in close")

    with Trackers([BackgroundTracker("a", lambda step: Unclosable())]) as trackers:
        trackers.log(0, {})
    assert warnings(caplog) == ["--tracker a: ValueError: in close; the training goes on"]


def test_all_trackers_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Hanging:
        def begin_close(self) -> None: ...

        def close(self, within_s: float) -> None:
            waits.append(within_s)

    monkeypatch.setattr("edit.trackers.background.time", SimpleNamespace(monotonic=lambda: 100.0 + sum(waits)))
    Trackers([Hanging(), Hanging()]).close(5.0)  # type: ignore[list-item]
    assert waits == [5.0, 0.0]


def opened(choice: TrackerChoice, folder: Path) -> Trackers:
    return choice.open("run-1", "tiny", "a", folder, {"sync": {"every": 10}, "seed": 3})


def test_a_plugin_is_one_once_it_is_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"an option uses entry:mine .edit.trackers., code of another package: add `--allow"):
        TrackerChoice.of(["entry:mine"], [], frozenset())
    runs: list[TrackedRun] = []
    recorder = Recorder()
    plugins.register("trackers", "mine", lambda run: runs.append(run) or recorder)  # type: ignore[func-returns-value]
    plugins.register("trackers", "none", lambda run: None)
    plugins.register("trackers", "away", lambda run: 1 / 0)
    choice = TrackerChoice.of(["entry:mine", "entry:none", "entry:away"], ["mine.level=2"], frozenset())
    trackers = opened(choice, tmp_path)
    trackers.log(5, {"loss": 0.5})
    trackers.close(FOREVER_S)
    assert recorder.said == [(5, {"loss": 0.5})] and recorder.closed
    assert (runs[0].folder, runs[0].first_step, runs[0].options) == (tmp_path / "mine", 5, {"level": 2})
    away, none = (one for one in sorted(warnings(caplog)) if "Error" in one)
    assert none.startswith("--tracker entry:none: PluginError: entry:none (edit.trackers): gave a NoneType without a method")
    assert away.startswith("--tracker entry:away: EditError: entry:away (edit.trackers): ZeroDivisionError: division by zero (")
    assert "; not tried again, " in none and "; tried again in 60 s, " in away


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
        module.Settings = type("Settings", (dict,), {"model_fields": {"x_transaction_log_flush_interval": None}})  # type: ignore[attr-defined]
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
    assert first["settings"]["x_transaction_log_flush_interval"] == 1.0


@pytest.mark.parametrize(
    ("tracker", "package", "variable", "value"),
    [
        ("wandb", "wandb", "WANDB_ERROR_REPORTING", "false"),
        ("mlflow", "mlflow.entities", "MLFLOW_DISABLE_TELEMETRY", "true"),
    ],
)
@pytest.mark.parametrize("said", [None, "other"])
def test_what_a_package_tells_its_makers_is_off_before_it_is_imported(
    tracker: str, package: str, variable: str, value: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, said or "")
    if said is None:
        monkeypatch.delenv(variable)
    seen: list[str | None] = []

    class Import:
        def find_spec(self, name: str, *_: object) -> None:
            if name == package:
                seen.append(os.environ.get(variable))
                raise ImportError(name)

    for name in [name for name in sys.modules if name.split(".")[0] == tracker or name == f"edit.trackers.{tracker}"]:
        monkeypatch.delitem(sys.modules, name)
    if "." in package:
        monkeypatch.setitem(sys.modules, tracker, ModuleType(tracker))
        sys.modules[tracker].__path__ = []
    monkeypatch.setattr(sys, "meta_path", [Import(), *sys.meta_path])
    with pytest.raises(ImportError, match=package):
        importlib.import_module(f"edit.trackers.{tracker}")
    assert seen == [said or value]


def test_wandb_never_asks_who_one_is(
    tmp_path: Path, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logged_in = [False, True]

    def login(*, prompt: bool = True, verify: bool = True) -> bool:
        assert not prompt and not verify
        return logged_in.pop(0)

    monkeypatch.setattr(sys.modules["wandb"], "login", login, raising=False)
    for _ in range(2):
        trackers = opened(TrackerChoice.of(["wandb"], ["wandb.mode=online"], frozenset()), tmp_path)
        trackers.log(10, {"loss": 1.0})
        trackers.close(FOREVER_S)
    assert [kind for kind, _ in calls] == ["init", "log", "finish"] and calls[0][1]["mode"] == "online"
    (warning,) = warnings(caplog)
    assert "ConfigError: wandb.mode=online, but nobody is logged in: run `wandb login`" in warning and "not tried" in warning


def test_wandb_begins_with_a_process_of_its_own_after_the_last_one_has_died(
    tmp_path: Path, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package keeps its connection to that one, and each later run fails with it, unless it is told to forget it."""
    dead: list[str] = ["wandb-core"]

    def refuse(*_: object, **__: object) -> None:
        if dead:
            raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(FakeRun, "finish", refuse)
    monkeypatch.setattr(sys.modules["wandb"], "teardown", lambda exit_code: dead.clear(), raising=False)
    run = TrackedRun(run_id="run-1", run_name="n", member="a", folder=tmp_path, first_step=0)
    with pytest.raises(ConnectionResetError):
        importlib.import_module("edit.trackers.wandb").make(run).close()
    assert not dead


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
    (warning,) = warnings(caplog)
    assert "ConfigError: --tracker-option mode: unknown; there is project, space; not tried again, " in warning
    assert calls == []
