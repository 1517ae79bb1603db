"""The demo's own work, with a script in place of the daemons: real processes, real files, a clock that runs by itself."""

import io
import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from edit.config.run import ModelConfig, RunConfig
from edit.errors import ConfigError
from edit.lab.cli import app
from edit.lab.demo.command import Dependencies, run_demo
from edit.lab.demo.evaluate import Evaluator
from edit.lab.demo.hostile import run_hostile_demo
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.demo.plan import DemoOptions
from edit.lab.processes import ChildDied, Programs, Supervisor
from edit.records import Snapshot
from edit.view.observations import Status

FAKE = str(Path(__file__).parents[1] / "fake_daemons.py")


class View:
    """The operator's connection: reads the fake coordinator's own lines."""

    def __init__(self, state: Path) -> None:
        self._metrics = state / "metrics.jsonl"

    def status(self):
        steps = self._metrics.read_text().count('"kind": "round"')
        common = {"phase": "collecting", "parameters": 1000, "deadline_s": None, "arrived": 0, "expected": 4}
        return Status(outer_step=steps, digest=f"d{steps}", memory_bytes=10**8, **common)

    def close(self):
        pass


def committed(state: Path) -> Snapshot:
    """What the fake coordinator has committed last."""
    return Snapshot((state / "metrics.jsonl").read_text().count('"kind": "round"'), "d", (torch.zeros(1),))


class Judge:
    """The evaluator: losses from a table."""

    schema = None

    def __init__(self, config, held_out):
        assert any(held_out.iterdir())

    def windows(self, batches):
        return batches

    def initial(self, batches):
        return 5.5

    def of_fragments(self, fragments, batches):
        return 1.8

    def of_file(self, path, batches):
        return 2.0

    def save(self, fragments, path):
        path.write_bytes(b"outer")

    def sample(self, fragments, length, seed):
        return "import os"


def dependencies(*peer_options: str, pause=os.sched_yield) -> Dependencies:
    programs = Programs(coordinator=(sys.executable, FAKE, "coordinator"), peer=(sys.executable, FAKE, "peer", *peer_options))
    ticks = itertools.count()
    return Dependencies(
        programs=programs, connect=View, committed=committed, evaluator=Judge, monotonic=lambda: float(next(ticks)), pause=pause
    )


def no_process_left(out: Path) -> bool:
    """Nobody runs with this demo's folder on its command line."""
    mine = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(out).encode() in _read(path)]
    return not mine


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def console() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=120), output


def test_a_demo_with_faults_from_start_to_report(tmp_path):
    out = tmp_path / "demo"
    screen, output = console()
    results = run_demo(DemoOptions(steps=600, out=out), screen, dependencies())
    assert no_process_left(out)
    assert (results.complete, results.run_id, results.committed) == (True, "demo-fake", 20)
    assert results.losses.percent_below_lone == pytest.approx(10.0)
    assert results.restart.equal
    assert (results.restart.outer_step, results.digests.unequal) == (12, ())
    assert json.loads((out / "results.json").read_text())["complete"] is True
    assert (out / "outer.safetensors").read_bytes() == b"outer"
    assert (out / "sample.txt").read_text() == "import os"
    assert "10.0 % better than one alone" in (out / "report.html").read_text()
    assert (out / "peers/peer-2/invitation").read_text() == "edit1.peer-2"
    text = output.getvalue()
    for story in (
        "SIGKILL to peer-2 (process",
        "peer-2 started again with nothing but its certificate",
        "SIGKILL to coordinator (process",
        "coordinator is back at outer step 12, digest d12 as before the kill",
        "outer step 3: peer-3 sent NaN or infinite values: weight 0, the others' are merged",
    ):
        assert text.count(story) == 1, story


def test_every_line_of_the_merged_metrics_names_its_source(tmp_path):
    run_demo(DemoOptions(steps=600, out=tmp_path / "demo", faults=True), console()[0], dependencies())
    lines = [json.loads(line) for line in (tmp_path / "demo/metrics.jsonl").read_text().splitlines()]
    kinds = {(line["source"], line["kind"]) for line in lines}
    assert {("coordinator", "round"), ("coordinator", "peer"), ("lone", "lone"), ("lab", "event")} <= kinds
    assert {("lab", "validation"), ("lone", "validation")} <= kinds


@pytest.fixture
def started(monkeypatch):
    """The command line of each process, by the name of the demo's folder and its own."""
    found, start = {}, Supervisor.start

    def noted(supervisor, name, argv):
        found[supervisor._logs.parent.name, name] = list(argv)
        start(supervisor, name, argv)

    monkeypatch.setattr(Supervisor, "start", noted)
    return found


def test_faults_and_throttle_stand_on_the_command_lines_of_their_peers(tmp_path, started):
    run_demo(DemoOptions(steps=600, out=tmp_path / "demo"), console()[0], dependencies())
    argv = {name: words for (_, name), words in started.items()}
    assert argv["peer-1"][argv["peer-1"].index("--throttle") + 1] == "2"
    assert argv["peer-3"][argv["peer-3"].index("--fault") + 1] == "nan@5,huge@6"
    assert not {"--throttle", "--fault"} & {*argv["peer-0"], *argv["peer-2"]}


RUNS = ("penalty", "robust", "masked")


@pytest.mark.exhaustive
def test_hostile_peers_attack_all_runs_alike_and_the_logs_are_verified_at_the_end(tmp_path, started):
    out = tmp_path / "demo"
    screen, output = console()
    found = run_hostile_demo(DemoOptions(peers=7, steps=120, hostile=True, out=out), screen, dependencies())
    assert no_process_left(out)
    peers = {place: words for place, words in started.items() if place[1].startswith("peer-")}
    attacks = {place: words[words.index("--fault") + 1] for place, words in peers.items() if "--fault" in words}
    expected = {"peer-4": "flip@0+", "peer-5": "reverse@0+", "peer-6": "copy@0+"}
    assert attacks == {(run, name): fault for run in RUNS for name, fault in expected.items()}
    assert len(peers) == 3 * 7 and not any("--throttle" in words for words in peers.values())
    settings = {run: RunConfig.from_toml(out / run / "run.toml") for run in RUNS}
    assert [settings[run].robust.rule for run in settings] == ["none", "geometric_median", "none"]
    assert [settings[run].secagg.enabled for run in settings] == [False, False, True]
    assert all(each.penalty.enabled and each.audit.enabled and each.rounds.quorum == 5 for each in settings.values())
    # the fake coordinator gives each of four peers a quarter of the weight, and none to peer-3 in one round of twelve
    weights = {peer.peer_id: peer.weight for peer in found.robust.peers}
    assert weights == pytest.approx(
        {"peer-0": 0.25, "peer-1": 0.25, "peer-2": 0.25, "peer-3": 0.25 * 11 / 12} | dict.fromkeys(expected, 0.0)
    )
    assert found.attackers_weight(found.robust) == 0.0
    assert (found.penalty.losses.lone, found.robust.losses.lone) == (2.0, None)
    assert found.percent_below_penalty == pytest.approx(0.0)
    assert found.log == ("run demo-fake: 21 entries, 20 commits, 80 signatures: verified",) * 2
    assert "80 signatures: verified" in output.getvalue() and "80 signatures: verified" in (out / "report.html").read_text()
    assert json.loads((out / "results.json").read_text())["attacks"] == {name: fault[:-3] for name, fault in expected.items()}


def test_ctrl_c_ends_everything_and_leaves_partial_results(tmp_path):
    looks = itertools.count()

    def interrupt():
        if next(looks) == 20:
            signal.raise_signal(signal.SIGTERM)  # ends a demo as Ctrl-C does

    screen, output = console()
    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoOptions(steps=600, out=tmp_path / "demo"), screen, dependencies(pause=interrupt))
    assert no_process_left(tmp_path / "demo")
    assert f"partial results are in {tmp_path / 'demo'}" in output.getvalue()
    assert json.loads((tmp_path / "demo/results.json").read_text())["complete"] is False
    page = (tmp_path / "demo/report.html").read_text()
    assert "Stopped after outer step" in page and "GPT of 0 parameters" not in page
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_report_of_a_demo_that_was_ended_before_the_run_began_says_how_large_the_model_is(tmp_path):
    def interrupt():
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoOptions(steps=600, out=tmp_path / "demo"), console()[0], dependencies(pause=interrupt))
    assert no_process_left(tmp_path / "demo")
    assert json.loads((tmp_path / "demo/results.json").read_text())["parameters"] > 100_000
    assert re.search(r"GPT of \d{3},\d{3} parameters", (tmp_path / "demo/report.html").read_text())


def test_a_peer_that_dies_unasked_is_named_with_its_last_words(tmp_path):
    with pytest.raises(ChildDied, match=r"peer-1 ended \(exit code 70\)(.|\n)*the data folder is on fire"):
        run_demo(DemoOptions(steps=600, out=tmp_path / "demo"), console()[0], dependencies("--dies", "peer-1"))
    assert no_process_left(tmp_path / "demo")


def left_by(command: str, path: Path) -> DemoFolder:
    """The folder of an earlier call, with a file that the user has put there."""
    folder = DemoFolder(path, command)
    with folder.claim():
        folder.run_toml.touch()
        folder.home("peer-0").mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    return folder


def names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


@pytest.mark.parametrize("command", ["demo", "chaos"])
def test_only_what_the_command_made_is_removed(tmp_path, command):
    folder = left_by(command, tmp_path / "out")
    with folder.claim():
        assert names(folder.path) == {f".edit-lab-{command}", "notes.txt"}
    precious = DemoFolder(tmp_path / "thesis", command)
    precious.path.mkdir()
    (precious.path / "logs").touch()
    with pytest.raises(ConfigError, match="nothing was changed"), precious.claim():
        pass
    assert names(precious.path) == {"logs"}
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"no folder of `edit-lab {command}`"), DemoFolder(file, command).claim():
        pass
    (tmp_path / "empty").mkdir()
    with DemoFolder(tmp_path / "empty", command).claim():
        pass


@pytest.mark.parametrize(("command", "other"), [("demo", "chaos"), ("chaos", "demo")])
def test_neither_command_takes_the_folder_of_the_other(tmp_path, command, other):
    folder = left_by(other, tmp_path / "out")
    before = names(folder.path)
    with pytest.raises(ConfigError, match="nothing was changed"), DemoFolder(folder.path, command).claim():
        pass
    assert names(folder.path) == before


def test_the_folder_of_a_demo_that_runs_is_left_alone(tmp_path):
    first = DemoFolder(tmp_path / "out")
    with first.claim():
        first.run_toml.touch()
        with pytest.raises(ConfigError, match="another `edit-lab demo` is at work there; choose another folder"):
            run_demo(DemoOptions(steps=600, out=first.path), console()[0], dependencies())
        with pytest.raises(ConfigError, match="is at work there"):
            run_hostile_demo(DemoOptions(peers=7, hostile=True, out=first.path), console()[0], dependencies())
        assert first.run_toml.exists()
    with first.claim():
        assert not first.run_toml.exists()


def test_the_present_folder_and_a_link_to_one_are_taken(tmp_path, monkeypatch):
    folder = left_by("demo", tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "dangling").symlink_to("new")
    for link in ("link", "dangling"):
        with DemoFolder(tmp_path / link).claim():
            (tmp_path / link / "run.toml").touch()
    assert (tmp_path / "new/run.toml").exists()
    folder.home("peer-0").parent.symlink_to(tmp_path / "new")  # what a link in it leads to is not the command's
    monkeypatch.chdir(folder.path)
    with DemoFolder(Path()).claim():
        assert names(folder.path) == {".edit-lab-demo", "notes.txt"}
    assert (tmp_path / "new/run.toml").exists()


@pytest.fixture
def evaluator(tmp_path):
    (tmp_path / "text.py").write_text("def f(x):\n    return x + 1\n" * 40)
    config = RunConfig(model=ModelConfig(layers=1, heads=2, width=16, context=32))
    return Evaluator(config, tmp_path)


def test_the_evaluator_gives_the_same_loss_for_the_same_parameters_however_they_come(evaluator, tmp_path):
    initial = evaluator.initial(2)
    assert 4.5 < initial < 7.5
    flat = [torch.cat([evaluator._initial[t.name].flatten() for t in f.tensors]) for f in evaluator.schema.fragments]
    assert evaluator.of_fragments(flat, 2) == initial
    assert (evaluator.windows(1), evaluator.windows(100)) == (16, 33)
    evaluator.save(flat, tmp_path / "m.safetensors")
    assert evaluator.of_file(tmp_path / "m.safetensors", 2) == initial
    assert evaluator.of_fragments([tensor * 0.5 for tensor in flat], 2) != initial
    assert evaluator.sample(flat, 20, seed=1) == evaluator.sample(flat, 20, seed=1) != evaluator.sample(flat, 20, seed=2)


def test_parameters_of_another_model_are_refused(evaluator, tmp_path):
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="another model"):
        evaluator.of_file(tmp_path / "other.safetensors", 1)


def test_help_shows_an_example():
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    assert "Example: edit-lab demo --quick --out runs/try" in result.output


@pytest.mark.parametrize("arguments", [["--peers", "0"], ["--steps", "20"], ["--seed", "-1"]])
def test_wrong_options_are_configuration_errors_before_anything_is_touched(tmp_path, arguments):
    out = tmp_path / "demo"
    result = CliRunner().invoke(app, ["demo", "--out", str(out), *arguments])
    assert isinstance(result.exception, ConfigError)
    assert arguments[0] in str(result.exception)
    assert not out.exists()
