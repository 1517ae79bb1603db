"""`edit-lab bench rivals`: table and picture from rows, and what becomes of a system that fails. Nothing is installed here."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from edit.errors import ConfigError
from edit.lab.bench import exchange
from edit.lab.bench.exchange_swarm import ours_in_a_swarm
from edit.lab.bench.rivals import contest, environments
from edit.lab.bench.rivals.contest import DEFAULT_CODECS, RIVALS, Rival, RivalOptions, measure_rivals
from edit.lab.bench.rivals.environments import GLOO, Environments, Needs, foreign_python
from edit.lab.bench.turns import Timing
from edit.lab.processes import ChildDied, Supervisor

SCRIPTS = Path(contest.__file__).parent
BEGINS = {"date": "2026-11-22", "label": "", "commit": "0123abc", "machine": "a machine", "load_before": 0.25}


def row(system: str, peers: int, wall_s: float, **more: Any) -> dict[str, Any]:
    figures = {"round_s": wall_s, "best_round_s": wall_s - 0.1, "cpu_s": 2 * wall_s, "best_cpu_s": 1.9 * wall_s}
    return {**BEGINS, "parameters": 50331648, "peers": peers, "system": system, "how": "plaintext", **figures, **more}


FAILED = {**BEGINS, "parameters": 50331648, "peers": 4, "system": "hivemind", "how": "", "error": "no matching distribution"}
LINK = {"mbit": 1000.0, "queue_ms": 20, "tcp": "cubic"}
ROWS = [
    row("this project, int8", 4, 1.02),
    row("torchft", 4, 1.2, failed_before=["a wrong mean"]),
    FAILED,
    row("gloo", 2, 0.15),
]


def test_the_table_has_every_figure_and_every_failure() -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(contest.table(ROWS))
    lines = console.export_text().splitlines()
    (ours,) = (line for line in lines if line.startswith("this project"))
    assert ours.split() == ["this", "project,", "int8", "4", "0.2", "1.02", "0.92", "2.04", "1.94", "plaintext"]
    assert any(line.startswith("hivemind") and "failed: no matching distribution" in line for line in lines)
    assert any(line.startswith("torchft") and "plaintext; failed once: a wrong mean" in line for line in lines)


def test_the_picture_orders_by_speed_and_shows_failures() -> None:
    picture = ElementTree.fromstring(contest.picture(ROWS))
    texts = [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "failed: no matching distribution" in texts
    places = [texts.index(text) for text in ("2 peers", "gloo", "4 peers", "this project, int8", "torchft", "hivemind")]
    assert places == sorted(places)


MOVED = {"link_bytes": 214_400_000, "bound_s": 1.715, "busiest_link": "coordinator up"}
LIMITED = [
    row("this project, int8", 4, 5.38, **LINK, **MOVED),
    {**FAILED, **LINK},
    row("gloo", 2, 17.7, **{**LINK, **MOVED, "mbit": 100.0}),
]


def test_over_links_the_table_has_what_they_carried_and_the_bound() -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(contest.table(LIMITED))
    text = console.export_text()
    (ours,) = (line for line in text.splitlines() if line.startswith("this project"))
    figures = ["5.38", "5.28", "10.76", "10.22", "214.4", "1.72", "coordinator", "up", "plaintext"]
    assert ours.split() == ["this", "project,", "int8", "1000", "4", "0.2", *figures]
    assert any(line.startswith("hivemind") and "failed: no matching distribution" in line for line in text.splitlines())
    assert "TCP with cubic." in text


def test_over_links_the_picture_has_the_fast_ones_first_and_diamonds_at_the_bound() -> None:
    picture = ElementTree.fromstring(contest.picture(LIMITED))
    texts = [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    places = [texts.index(text) for text in ("1000 Mbit/s, 4 peers", "this project, int8", "100 Mbit/s, 2 peers", "gloo")]
    assert places == sorted(places)
    assert "5.38 s, bound 1.72 s" in texts
    assert any("the bound" in text for text in texts)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Measure these scripts, two peers, with this Python in place of an environment's."""

    def measure(*rivals: Rival, limit_s: float = 60.0, mbit: float = 0.0, swarm: bool = False) -> list[Any]:
        monkeypatch.setattr(contest, "ours", lambda *_: [Timing(1.0, {"coordinator": 0.5, "peer": 0.25})])
        monkeypatch.setattr(contest, "ours_in_a_swarm", lambda *_: [Timing(2.0, {"host-0": 0.5, "peer-0": 0.5})])
        monkeypatch.setattr(Environments, "python", lambda *_: Path(sys.executable))
        seen: list[Any] = []
        options = RivalOptions(
            parameters=12_000,
            peers=[2],
            folder=tmp_path,
            repeat=2,
            limit_s=limit_s,
            mbit=[mbit] if mbit else (),
            swarm=swarm,
        )
        rows = measure_rivals(options, seen.append, rivals)
        assert rows == seen
        return rows

    return measure


def rival(script: Path | str, **more: Any) -> Rival:
    return Rival(name="another", how="plaintext", needs=GLOO, script=str(script), **more)


@pytest.mark.timeout(120)
def test_gloo_needs_nothing_but_torch_and_is_measured(measured: Any) -> None:
    int8, int4, fp32, gloo = measured(rival("gloo_all_reduce.py"))
    assert (int8["system"], int8["round_s"], int8["cpu_s"]) == ("this project, int8", 1.0, 0.75)
    assert (int4["system"], fp32["how"]) == ("this project, int4", "fp32, mutual TLS, penalty, journal")
    assert (gloo["system"], gloo["repeat"], "error" in gloo) == ("another", 2, False)
    assert gloo["round_s"] > 0
    assert not {"mbit", "bound_s"} & set(gloo)


def test_a_swarm_stands_beside_the_coordinator_and_each_process_is_in_the_row(measured: Any) -> None:
    _, int8, _, int4, _, fp32 = measured(swarm=True)
    assert [row["system"] for row in (int8, int4, fp32)] == [f"this project in a swarm, {name}" for name in DEFAULT_CODECS]
    assert (int8["round_s"], int8["cpu_s"], int8["cpu_s_of"]) == (2.0, 1.0, {"host-0": 0.5, "peer-0": 0.5})


@pytest.mark.usefixtures("limited_links")
@pytest.mark.timeout(120)
def test_over_links_each_peer_is_a_host_and_the_bound_is_that_of_the_bytes(measured: Any) -> None:
    *_, gloo = measured(rival("gloo_all_reduce.py"), mbit=1000.0)
    assert gloo.get("error") is None
    assert (gloo["mbit"], gloo["queue_ms"], gloo["peers"]) == (1000.0, 20, 2)
    assert 4 * 12_000 < gloo["link_bytes"] < 2 * 4 * 12_000
    assert gloo["bound_s"] == round(8e-9 * gloo["link_bytes"], 3)
    assert gloo["busiest_link"].split()[0] in ("peer-0", "peer-1")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("limited_links")
@pytest.mark.timeout(300)  # a coordinator and two peers
def test_this_projects_coordinator_and_peers_are_hosts_too() -> None:
    (timing,) = exchange.ours(2, 120_000, "int8", 1, 100.0, mbit=1000.0)
    assert set(timing.cpu_s) == {"coordinator", "peer-0", "peer-1"}
    up = timing.link_bytes["coordinator up"], timing.link_bytes["peer-0 up"] + timing.link_bytes["peer-1 up"]
    assert all(2 * 120_000 < count < 2 * 240_000 for count in up)  # one update for each peer; one contribution of each


@pytest.mark.exhaustive
@pytest.mark.usefixtures("limited_links")
@pytest.mark.timeout(300)  # two peers and two hosts
def test_in_a_swarm_a_peer_and_its_host_have_one_link() -> None:
    (timing,) = ours_in_a_swarm(2, 240_000, "int8", 1, 100.0, mbit=1000.0)
    assert set(timing.cpu_s) == {"host-0", "host-1", "peer-0", "peer-1"}
    assert set(timing.link_bytes) == {"peer-0 up", "peer-0 down", "peer-1 up", "peer-1 down"}
    # half of a contribution in int8, half of the model in bf16 for the other host, which its peer has it from; and the half in
    # bf16 once more where the part had to change hands, as on a machine that is slower than a lease
    assert all(360_000 < count < 480_000 + 240_000 for count in timing.link_bytes.values()), timing.link_bytes
    assert timing.link_bytes["peer-0 up"] == pytest.approx(timing.link_bytes["peer-1 down"], rel=0.05)
    assert timing.link_bytes["peer-1 up"] == pytest.approx(timing.link_bytes["peer-0 down"], rel=0.05)


HANGS = """
import os, pathlib, signal, sys
rank, peers, parameters, folder, address, port = sys.argv[1:]
pathlib.Path({seen!r}, rank).write_text(os.readlink("/proc/self/ns/net"))
held = open({fifo!r}, "wb", buffering=0)
held.write(b"r")
while True: signal.pause()
"""
MEASURE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background of a shell ignores it
import pathlib, sys
from functools import partial
from rich.console import Console
from edit.command_line import run_command
from edit.lab.bench import command
from edit.lab.bench.rivals import contest
from edit.lab.bench.rivals.environments import GLOO, Environments
Environments.python = lambda *_: pathlib.Path(sys.executable)
rivals = (contest.Rival(name="hangs", how="", needs=GLOO, script=sys.argv[1]),)
contest.measure_rivals = partial(contest.measure_rivals, rivals=rivals)
options = contest.RivalOptions(parameters=12, peers=[2], folder=pathlib.Path("."), mbit=[1000.0], codecs=())
run_command("measure", lambda: command.run_rivals(options, command.Outputs(), Console(stderr=True)))
"""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("limited_links")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_processes_and_with_them_the_namespaces(tmp_path: Path, number: signal.Signals) -> None:
    script, fifo, seen = tmp_path / "hangs.py", tmp_path / "fifo", tmp_path / "seen"
    script.write_text(HANGS.format(seen=str(seen), fifo=str(fifo)))
    seen.mkdir()
    os.mkfifo(fifo)
    measuring = subprocess.Popen((sys.executable, "-c", MEASURE, str(script)))
    try:
        with fifo.open("rb", buffering=0) as ready:
            assert [ready.read(1) for _ in range(2)] == [b"r", b"r"]
            measuring.send_signal(number)
            assert measuring.wait(60) == 130
            assert ready.read(1) == b""  # nobody has it open: all have ended
    finally:
        measuring.terminate()
    namespaces = {file.read_text() for file in seen.iterdir()}
    assert len(namespaces) == 2 and not namespaces & set(used_namespaces())


def used_namespaces() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            yield str((process / "ns" / "net").readlink())


def test_a_system_that_fails_twice_is_a_row_with_its_error(measured: Any, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit('no lighthouse')")
    *_, failed = measured(rival(script))
    assert failed["error"] == "no lighthouse"
    assert "round_s" not in failed


def test_who_was_killed_is_the_error_and_not_what_it_said_last(measured: Any, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\nif sys.argv[1] == '0': print('all is well', flush=1); os.kill(os.getpid(), 9)\nsignal.pause()"
    )
    *_, failed = measured(rival(script))
    assert failed["error"] == "peer-0 ended (killed by SIGKILL)"


def test_an_error_is_text_that_a_terminal_shows_as_it_stands(measured: Any, tmp_path: Path) -> None:
    script = tmp_path / "colours.py"
    script.write_text("import sys; sys.exit('\\x1b[91mno\\x1b[0m lighthouse')")
    *_, failed = measured(rival(script))
    assert failed["error"] == "[91mno [0m lighthouse"


def test_a_system_that_fails_once_has_figures_and_its_error(measured: Any, tmp_path: Path) -> None:
    script, mark = tmp_path / "fails_once.py", tmp_path / "failed"
    body = (SCRIPTS / "gloo_all_reduce.py").read_text()
    script.write_text(
        f"import pathlib, sys\nif sys.argv[1] == '0' and not pathlib.Path({str(mark)!r}).exists():\n"
        f"    pathlib.Path({str(mark)!r}).touch()\n    sys.exit('a wrong mean')\n{body}"
    )
    *_, row = measured(rival(script))
    assert row["failed_before"] == ["a wrong mean"]
    assert row["round_s"] > 0


def test_a_server_beside_the_peers_is_the_only_one_that_is_told(measured: Any, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "import json, pathlib, socket, sys, time\n"
        "rank, peers, parameters, folder, address, *port = sys.argv[1:]\n"
        "pathlib.Path(folder, rank).touch()\n"
        "while not port: time.sleep(1)\n"
        "while len(list(pathlib.Path(folder).glob('[0-9]'))) < 3: time.sleep(0.01)\n"
        "lines = socket.create_connection(('127.0.0.1', int(port[0]))).makefile('rw')\n"
        "print('ready', file=lines, flush=True)\n"
        "while lines.readline():\n"
        "    print(json.dumps({'began': 1.0, 'ended': 3.5}), 'ready', sep='\\n', file=lines, flush=True)\n"
    )
    *_, row = measured(rival(script, server=True))
    assert row["round_s"] == 2.5


# ---- environments ------------------------------------------------------------------------------------------------------------


class Calls:
    """In place of the supervisor that would run pip."""

    def __init__(self, home: Path, error: str = "") -> None:
        self.home, self.error, self.commands = home, error, []

    def call(self, commands: dict[str, tuple[str, ...]], timeout_s: float) -> None:
        (command,) = commands.values()
        self.commands.append(command)
        if "venv" in command:
            (self.home / "bin").mkdir(parents=True)
            (self.home / "bin" / "python").touch()
        elif self.error:
            raise ChildDied(self.error)


NEEDS = Needs("torch", ("torchft==0.2.0",))


def test_what_is_missing_is_installed_once_with_the_torch_of_this_project(tmp_path: Path) -> None:
    calls = Calls(tmp_path / "torch")
    made = Environments(tmp_path, calls, "https://example.org/cpu")  # type: ignore[arg-type]
    assert made.python(NEEDS) == tmp_path / "torch" / "bin" / "python"
    venv, pip = calls.commands
    assert venv[1:3] == ("-m", "venv")
    assert pip[-5:] == ("--extra-index-url", "https://example.org/cpu", f"torch=={metadata.version('torch')}", *pip[-2:])
    assert "torchft==0.2.0" in pip
    Environments(tmp_path, calls).python(NEEDS)  # type: ignore[arg-type]
    assert len(calls.commands) == 2
    Environments(tmp_path, calls).python(GLOO)  # type: ignore[arg-type]
    assert len(calls.commands) == 3


def test_what_pip_says_is_the_error_and_the_next_run_tries_again(tmp_path: Path) -> None:
    calls = Calls(
        tmp_path / "torch", "pip ended (exit code 1); its last lines:\n    ERROR: No matching distribution\n    notice"
    )
    made = Environments(tmp_path, calls)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ChildDied, match=r"^not installed: ERROR: No matching distribution$"):
            made.python(NEEDS)
    assert len(calls.commands) == 3


def test_without_room_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_FREE_BYTES", 1 << 60)
    calls = Calls(tmp_path / "torch")
    with pytest.raises(ConfigError, match="MiB are free"):
        Environments(tmp_path, calls).python(NEEDS)  # type: ignore[arg-type]
    assert calls.commands == []


def test_the_python_of_an_environment_does_not_see_our_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    show = "import json, os; print(json.dumps([os.environ.get('PYTHONPATH'), os.environ['OMP_NUM_THREADS']]))"
    with Supervisor(tmp_path / "logs") as supervisor:
        said = supervisor.call({"show": (*foreign_python(Path(sys.executable)), "-c", show)})["show"]
    assert json.loads(said) == [None, "1"]


def test_the_scripts_import_nothing_of_this_project_and_all_exist() -> None:
    scripts = {SCRIPTS / each.script for each in RIVALS} | {SCRIPTS / "hivemind_compressors.py"}
    assert len(scripts) == 6
    for script in scripts:
        tree = ast.parse(script.read_text(encoding="utf-8"))
        named = [each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
        named += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not {name.split(".")[0] for name in named} & {"edit", "aggregator", "peers", "editpb"}
