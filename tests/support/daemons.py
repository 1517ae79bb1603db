"""Real coordinators and peers as processes, for tests that kill them: started, read line by line, none left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from typer import Typer
from typer.testing import CliRunner

import aggregator.cli
import peers.cli
from aggregator.storage.state_folder import StateFolder
from edit.lab.link import Link, LinkShape
from edit.lab.run_toml import Setting, Settings, to_toml
from tests.support.fork_server import ZYGOTE, Forked
from tests.support.ports import hold_ports

SMALL: Settings = {
    "model": {"layers": 1, "width": 32, "heads": 2, "context": 32},
    "inner": {"lr": 3e-3, "warmup_steps": 5},
    "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.6},
    "rounds": {"floor_s": 30.0, "ceiling_s": 30.0},
    "membership": {"heartbeat_s": 0.5, "lease_s": 5.0},
    "server": {"listen": "127.0.0.1:0", "enrol_listen": "127.0.0.1:0"},
}


def children(pid: int) -> list[int]:
    """The processes that this one started, in whichever thread; not the one that forks its hosts."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    started = [int(pid) for of_thread in threads for pid in of_thread.read_text().split()]
    return [pid for pid in started if Path(f"/proc/{pid}/comm").read_text().strip() != ZYGOTE]


def small(name: str, **tables: dict[str, Setting]) -> Settings:
    """A small run that waits patiently for its peers. tables: what is different from SMALL, or more; an outer optimizer with
    all its settings."""
    kept: dict[str, Any] = {"name": name, **SMALL, **({"outer": {}} if "outer" in tables else {})}
    return kept | {table: {**kept.get(table, {}), **values} for table, values in tables.items()}


class Daemon:
    """One process (torchrun has more below it) whose log is read line by line."""

    def __init__(self, *arguments: object) -> None:
        self.lines: list[str] = []
        self.ended = False
        self.process = Forked(list(map(str, arguments)))

    def until(self, words: str) -> str:
        """Read on until a line has these words."""
        for line in self.process.stderr:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} was never said; rc {self.process.wait()}:\n{''.join(self.lines[-400:])}")

    def children(self) -> list[int]:
        """The processes that this one started, in whichever thread: the ranks of a torchrun, or the host beside a peer."""
        return children(self.process.pid)

    def kill(self) -> None:
        """SIGKILL, what it started included, and nobody is left."""
        ranks = self.children()
        self.process.send_signal(signal.SIGKILL)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.finish()

    def finish(self) -> int:
        """Wait for its own end; the exit code."""
        self.lines += self.process.read_to_end().splitlines(keepends=True)
        self.ended = True
        return self.process.wait()

    def last(self, words: str) -> str:
        """The last line with these words."""
        return [line for line in self.lines if words in line][-1]


def torchrun(ranks: int) -> list[object]:
    """What stands before the command of a peer of several ranks."""
    options = ["--standalone", "--local-addr", "127.0.0.1", "--max-restarts", 3, "--nproc-per-node", ranks]
    return ["torch.distributed.run", *options, "-m"]


def p2pds(path: Path) -> list[int]:
    """The libp2p daemons of the hosts in this folder, or below it: by the file of their key."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"p2pd" in words.split(b"\0")[0] and os.fsencode(path) in words:
            found.append(int(process.name))
    return found


class Site:
    """A folder with one run's coordinator and its peers. Use as a context manager: at its end no process is left."""

    def __init__(self, folder: Path, settings: Settings, *init: object) -> None:
        """init: more options of `edit-coordinator init`."""
        self.folder = folder
        self.state = folder / "state"
        self.daemons: list[Daemon] = []
        self._links = contextlib.ExitStack()
        folder.mkdir(exist_ok=True)
        (folder / "run.toml").write_text(to_toml(settings))
        (folder / "text.py").write_bytes(Path(json.__file__).read_bytes())
        call(aggregator.cli.app, "init", "--state", self.state, "--config", folder / "run.toml", *init)
        self._served = StateFolder(self.state)
        hold_ports(self._served)

    def __enter__(self) -> Site:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.kill()
            elif not daemon.ended:
                daemon.finish()
            if kind is not None:
                print(f"---- {daemon.process.args}\n{''.join(daemon.lines)}")  # what a failing test is judged by
        self._links.close()

    def start(self, *arguments: object) -> Daemon:
        self.daemons.append(Daemon(*arguments))
        return self.daemons[-1]

    def serve(self, *options: object) -> Daemon:
        """The coordinator, serving; on when the run has finished, unless it is told otherwise."""
        coordinator = self.start("aggregator", "serve", "--state", self.state, *(options or ["--keep-serving"]))
        coordinator.until(" serving ")
        return coordinator

    def enrol(self, *names: str) -> None:
        """Invite and join peers, by name."""
        for name in names:
            invitation = call(aggregator.cli.app, "invite", "--state", self.state, name).splitlines()[0]
            call(peers.cli.app, "join", invitation, "--home", self.folder / name)

    def link(self, name: str) -> Link:
        """From now on this peer dials the coordinator through a link of its own. It is enrolled, and the coordinator serves."""
        host, port = json.loads((self.state / "addresses.json").read_text())["listen"].split(":")
        link = self._links.enter_context(Link((host, int(port)), LinkShape()))
        path = self.folder / name / "identity.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "endpoints": [f"127.0.0.1:{link.port}"]}))
        return link

    def peer(self, name: str, *options: object, ranks: int = 1) -> Daemon:
        """`edit-peer run`; of several ranks under torchrun."""
        command = ["peers", "run", "--home", self.folder / name, "--data", self.folder / "text.py", "--threads", 1, *options]
        if ranks == 1:
            return self.start(*command)
        return self.start(*torchrun(ranks), *command)

    def operate(self, command: str) -> str:
        """One command of the coordinator's operator: status, pause, resume, drain."""
        arguments = ["--json"] if command == "status" else []
        return call(aggregator.cli.app, command, "--state", self.state, *arguments)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.operate("status"))
        return answer


def call(app: Typer, *arguments: object) -> str:
    """What a command prints, run in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout
