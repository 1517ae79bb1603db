"""The command line of a peer: help with examples, exit codes, one-line errors."""

from __future__ import annotations

import json
import logging
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edit.durable_files import write_json
from edit.errors import EvictedError, RefusedError, TransportError
from editpb.run_status import RunStatus
from peers import cli
from peers.identity.peer_folder import FORMAT, PeerFolder
from tests.support.statuses import busy_run


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["edit-peer", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.startswith("edit-peer: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("command", ["join", "run", "alone"])
def test_every_help_shows_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert f"edit-peer {command}" in " ".join(capsys.readouterr().out.split())


def test_the_help_of_run_shows_how_to_use_several_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "run", "--help") == 0
    assert "torchrun --nproc-per-node 8" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("rank", "line"), [(0, "I told"), (1, "rank 1: careful")])
def test_only_rank_0_logs_lines_the_others_warn(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, rank: int, line: str
) -> None:
    def talk(options: object) -> None:
        logging.getLogger("peers").info("told")
        logging.getLogger("peers").warning("careful")

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "h", "MASTER_PORT": 1}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("peers.daemon.run_peer", talk)
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a process of its own
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    run(monkeypatch, "run", "--data", str(tmp_path))
    logging.root.handlers[0].flush()
    said = capfd.readouterr().err
    assert line in said
    assert ("told" in said) == (rank == 0)


def test_python_m_peers_is_the_same_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("peers", run_name="__main__")
    assert not caught.value.code
    assert "alone" in capsys.readouterr().out


def observe_a_swarm(home: Path) -> None:
    """Write what says whose folder it is."""
    values = {"run_id": "run-12345678", "peer_id": "eve", "role": "observer", "endpoints": []}
    write_json(home / "identity.json", values, version=FORMAT)


WITH_X_AND_Y = ("--beside", "x", "--beside", "y")


@pytest.mark.parametrize(
    ("arguments", "becomes"),
    [
        (("status",), ("status", "HOME")),
        (("status", "--json"), ("status", "HOME", "--json")),
        (("status", "--watch"), ("status", "HOME", "--watch")),
        (("swarm", "status", "--json", "--watch", "--at", "b"), ("status", "HOME", "--json", "--watch", "--at", "b")),
        (("watch",), ("watch", "HOME")),
        (("report", "--out", "r.html"), ("report", "HOME", "--out", "r.html")),
        (("report", "--beside", "x", "--beside", "y"), ("report", "HOME", "--out", "report.html", *WITH_X_AND_Y)),
        (("web", "--beside", "x", "--beside", "y"), ("web", "HOME", "--listen", "127.0.0.1:0", *WITH_X_AND_Y)),
        (("web", "--listen", "127.0.0.1:7"), ("web", "HOME", "--listen", "127.0.0.1:7")),
        (
            ("web", "--certificate", "c.pem", "--key", "k.pem"),
            ("web", "HOME", "--listen", "127.0.0.1:0", "--certificate", "c.pem", "--key", "k.pem"),
        ),
    ],
)
def test_who_looks_on_at_a_swarm_uses_the_same_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], becomes: tuple[str, ...]
) -> None:
    class Became(Exception):
        """What `os.execve` would have made of this process."""

    def become(path: str, line: list[str], environment: dict[str, str]) -> None:
        raise Became(*line)

    observe_a_swarm(tmp_path)
    monkeypatch.setattr("os.execve", become)
    with pytest.raises(Became) as became:
        cli.app([*arguments, "--home", str(tmp_path)], standalone_mode=False)
    assert became.value.args[1:] == ("-m", "aggregator.swarm", *(str(tmp_path) if word == "HOME" else word for word in becomes))


def test_the_status_of_a_swarm_has_no_rounds_to_choose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    observe_a_swarm(tmp_path)
    assert run(monkeypatch, "status", "--home", str(tmp_path), "--rounds", "3") == 2
    assert "--rounds: the status of a swarm shows no rounds" in one_line(capsys)


def test_a_member_sees_the_status_anew_until_the_run_has_ended_with_its_coordinator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    last = replace(busy_run(), outer_step=busy_run().outer_steps)
    coming = iter((busy_run(), None, last, None))

    async def told(folder: PeerFolder) -> RunStatus:
        if (said := next(coming)) is None:
            raise TransportError("the coordinator does not answer")
        return said

    monkeypatch.setattr("peers.watching.read_status", told)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert run(monkeypatch, "status", "--home", str(tmp_path), "--watch", "--json") == 0
    said = capsys.readouterr()
    assert said.err == "the coordinator does not answer; trying again\n"
    *_, before, ended = map(json.loads, said.out.splitlines())
    assert (before["phase"], ended["phase"]) == (busy_run().phase, "finished")
    assert ended["reason"] == f"the run has ended at outer step {last.outer_steps}" and not ended["waiting_for"]


def test_a_report_is_the_runs_page_as_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def told(folder: PeerFolder) -> RunStatus:
        return busy_run()

    monkeypatch.setattr("peers.watching.read_status", told)
    home, out = tmp_path / "home", tmp_path / "report.html"
    assert run(monkeypatch, "report", "--home", str(home), "--out", str(out)) == 0
    assert (
        capsys.readouterr().out
        == f"{out}: {busy_run().phase}, outer step {busy_run().outer_step} of {busy_run().outer_steps}\n"
    )
    assert busy_run().run_id in out.read_text()
    assert run(monkeypatch, "report", "--home", str(home), "--out", str(tmp_path)) == 2
    assert "cannot be written (Is a directory)" in one_line(capsys)
    assert run(monkeypatch, "report", "--home", str(home), "--out", str(home / "peer.key")) == 2
    assert f"peer.key: lies in {home}, where it could replace a file of the run" in one_line(capsys)


def test_user_mistakes_are_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home, there = str(tmp_path / "home"), str(tmp_path)
    cases = {
        ("run", "--data", str(tmp_path / "none"), "--home", home): "--data",
        ("run", "--data", there, "--home", home): "edit-peer join",
        ("run", "--data", there, "--home", home, "--fault", "zero@1"): "--fault",
        ("run", "--data", there, "--home", home, "--throttle", "0"): "--throttle",
        ("run", "--data", there, "--home", home, "--serve-snapshots", "0.0.0.0:0"): "--advertise",
        ("join", "nonsense", "--home", home): "invitation",
        ("alone", "--run", str(tmp_path / "run.toml"), "--data", there, "--steps", "1", "--out", there): "run.toml",
    }
    for arguments, word in cases.items():
        assert run(monkeypatch, *arguments) == 2
        assert word in one_line(capsys)


@pytest.mark.parametrize(
    ("error", "code"),
    [(RefusedError("another model"), 3), (EvictedError("key lost"), 4), (TransportError("no answer from host:7701"), 69)],
)
def test_refusal_eviction_and_no_answer_have_their_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: Exception, code: int
) -> None:
    def refuse(options: object) -> None:
        raise error

    monkeypatch.setattr("peers.daemon.run_peer", refuse)
    assert run(monkeypatch, "run", "--data", str(tmp_path)) == code
    line = one_line(capsys)
    assert str(error) in line and line.startswith("edit-peer: evicted from the run: ") == (code == 4)


def test_a_bug_is_a_traceback_and_exit_code_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def break_down(options: object) -> None:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr("peers.daemon.run_peer", break_down)
    assert run(monkeypatch, "run", "--data", str(tmp_path)) == 70
    assert "Traceback" in capsys.readouterr().err


def test_options_reach_the_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr("peers.daemon.run_peer", seen.append)
    arguments = ["--data", str(tmp_path), "--home", "h", "--device", "cpu", "--threads", "3", "--metrics", "m.jsonl"]
    arguments += ["--tensor-parallel", "2", "--checkpoints", "c", "--checkpoint-every", "5", "--keep-checkpoints", "7"]
    arguments += ["--serve-snapshots", "0.0.0.0:7801", "--advertise", "peer.example"]
    run(monkeypatch, "run", *arguments, "--throttle", "2", "--fault", "nan@3", "--allow", "x", "--allow-model", "y")
    options = seen[0]
    assert (options.home, options.threads, options.throttle) == (Path("h"), 3, 2.0)
    assert [fault.kind for fault in options.faults] == ["nan"]
    assert options.allowed == {"x", "y"}
    assert (options.tensor_parallel, options.checkpoint_every, options.keep_checkpoints, options.fresh) == (2, 5, 7, False)
    assert options.checkpoint_folder == Path("c")
    assert (options.serve_snapshots, options.advertise) == ("0.0.0.0:7801", "peer.example")
    run(monkeypatch, "run", "--data", str(tmp_path), "--home", "h", "--fresh")
    assert seen[1].fresh and seen[1].checkpoint_folder == Path("h/checkpoints")


def test_alone_trains_and_leaves_its_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    toml, text, out = tmp_path / "run.toml", tmp_path / "text.txt", tmp_path / "out"
    toml.write_text("[model]\nlayers = 1\nheads = 1\nwidth = 8\ncontext = 16\n[inner]\nbatch_size = 2\n")
    text.write_text("to be or not to be. " * 40)
    arguments = ["--run", str(toml), "--data", str(text), "--steps", "10", "--out", str(out), "--validation", str(text)]
    assert run(monkeypatch, "alone", *arguments, "--device", "cpu") == 0
    assert "validation loss" in capsys.readouterr().out
    assert (out / "model.safetensors").exists()
    kinds = [json.loads(line)["kind"] for line in (out / "alone.jsonl").read_text().splitlines()]
    assert set(kinds) == {"alone"}


@pytest.mark.parametrize(("before", "after"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_leave_the_cpu_to_others_unless_the_environment_says_otherwise(before: str, after: str) -> None:
    """It is read when torch is imported, which no command has done when its program begins."""
    program = """
import atexit, os, sys
from peers.cli import main
atexit.register(lambda: print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules))
sys.argv = ["edit-peer", "--version"]
main()
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": before} if before else {}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == f"{after} False", done.stderr
