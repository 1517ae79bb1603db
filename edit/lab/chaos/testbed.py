"""The processes, links and disk of a chaos run: starts them, injects faults, repairs them, and leaves nothing behind.

Each peer connects through a link of its own. All processes have a mark in their environment, by which leftovers are found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aggregator.storage.journal import replay
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.errors import ConfigError
from edit.lab import procfs
from edit.lab.chaos.disk import BALLAST, Disk, open_disk
from edit.lab.chaos.faults import Fault, Kind
from edit.lab.chaos.history import Recovered
from edit.lab.chaos.options import SHARDED, ChaosOptions
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.hostile.home import HostileHome
from edit.lab.hostile.process import command
from edit.lab.joining import address_of, join_behind_a_link
from edit.lab.link import Link, LinkShape
from edit.lab.observer import open_observer
from edit.lab.processes import COORDINATOR, ChildDied, Exit, Programs, Supervisor
from edit.lab.run_toml import to_toml

__all__ = ["COPY", "Testbed", "marked_processes"]

COPY = "copy"  # the name of a second coordinator, which serves a copy of the folder

_MARK = "EDIT_LAB_CHAOS"
_PATIENCE_S = 20.0
_SERVE_WITHIN_S = 60.0
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "100000")


class Testbed:
    """Context manager: on exit it ends every process, link and mount. Call `found`, `start`, then `inject` and `repair`."""

    def __init__(self, options: ChaosOptions, programs: Programs | None = None) -> None:
        if not procfs.available():
            raise ConfigError("edit-lab chaos needs /proc, which this system does not have")
        self._options, self._programs = options, programs or Programs()
        self.folder = DemoFolder(options.out, "chaos")
        self._supervisor = Supervisor(self.folder.logs, patience_s=_PATIENCE_S)
        self._links: dict[str, Link] = {}
        self._open = contextlib.ExitStack()
        self._log_begins: dict[str, int] = {}  # where the log of a coordinator's present process begins
        self.disk: Disk
        self.left_behind: list[str] = []

    def __enter__(self) -> Self:
        self._open.enter_context(self.folder.claim())
        self.disk = open_disk(self.folder.state, self._options.disk_bytes)
        self._open.callback(self.disk.close)
        self.left_behind = self._open.enter_context(marked_processes())
        self._open.enter_context(self._supervisor)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    # ---- starting -------------------------------------------------------------------------------------------------------

    def found(self) -> None:
        """Create the run, serve it, enrol every peer behind its link, and the hostile members. Raises ChildDied."""
        folder, coordinator = self.folder, self._programs.coordinator
        folder.run_toml.write_text(to_toml(self._options.run()), encoding="utf-8")
        folder.data.mkdir()
        (folder.data / "text.py").write_bytes(Path(argparse.__file__).read_bytes())
        init = ("init", "--state", str(folder.state), "--config", str(folder.run_toml))
        self._supervisor.call({"init": (*coordinator, *init)})
        self.start(COORDINATOR)
        self._wait_until_served(COORDINATOR)
        for name in self._options.peer_ids:
            self._links[name] = join_behind_a_link(self._open, folder.state, name, folder.home(name), LinkShape())
        if self._options.hostile:
            operator = open_observer(folder.state)
            self._open.callback(operator.close)
            for name in self._options.hostile_ids:
                HostileHome(folder.home(name)).enrol(name, folder.state, operator)

    def fork(self) -> None:
        """Serve a copy of the coordinator's folder beside it. The coordinator must have ended. Raises ChildDied."""
        copy = self._state(COPY)
        shutil.copytree(self.folder.state, copy, ignore=shutil.ignore_patterns(BALLAST, self.folder.addresses.name))
        for name in (COORDINATOR, COPY):
            self.start(name)
            self._wait_until_served(name)

    def route(self, name: str, coordinator: str) -> None:
        """Let the link of this peer end at that coordinator, COORDINATOR or COPY, from now on."""
        self._links[name].route(address_of(self._state(coordinator)))

    def _state(self, coordinator: str) -> Path:
        return self.folder.state if coordinator == COORDINATOR else self._options.out / COPY

    def _wait_until_served(self, name: str) -> None:
        give_up = time.monotonic() + _SERVE_WITHIN_S
        while not self.served(name):
            for end in self.unexpected_ends():
                raise ChildDied(str(end))
            if time.monotonic() > give_up:
                raise ChildDied(f"the coordinator does not serve within {_SERVE_WITHIN_S:.0f} s")
            time.sleep(0.05)

    def start(self, name: str) -> None:
        """Start the process called `name`, also again after it ended."""
        if name in (COORDINATOR, COPY):
            log = self.folder.logs / f"{name}.log"
            self._log_begins[name] = log.stat().st_size if log.exists() else 0
            self._supervisor.start(
                name, (*self._programs.coordinator, "serve", "--keep-serving", "--state", str(self._state(name)))
            )
            return
        home = self.folder.home(name)
        if name in self._options.hostile_ids:
            self.attack(name, self._options.behaviours, self._options.behaviour_s)
            return
        run = ["run", "--home", str(home), "--data", str(self.folder.data / "text.py"), "--threads", "1"]
        run += ["--metrics", str(self.metrics(name)), "--throttle", str(self._options.throttle), *self._options.peer_arguments]
        program = self._programs.peer
        if name == SHARDED:
            program = (program[0], *_TORCHRUN, "--nproc-per-node", "2", *program[1:])
        self._supervisor.start(name, (*program, *run))

    def attack(self, name: str, behaviours: Sequence[str], each_s: float) -> None:
        """Start a hostile member with these behaviours (none: all), one after the other for `each_s` seconds."""
        number = self._options.hostile_ids.index(name)
        seed = self._options.seed * self._options.hostile + number
        home = HostileHome(self.folder.home(name))
        self._supervisor.start(name, command(home, seed=seed, each_s=each_s, names=behaviours))

    def metrics(self, name: str) -> Path:
        """Return the path of this process's metrics file."""
        return (self._state(name) if name in (COORDINATOR, COPY) else self.folder.home(name)) / "metrics.jsonl"

    # ---- faults ---------------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Inject the fault."""
        name = fault.target
        match fault.kind:
            case Kind.KILL_PEER | Kind.KILL_COORDINATOR:
                self._supervisor.kill(name)
            case Kind.KILL_RANK:
                _signal(procfs.children(self._supervisor.pid(name))[-1:], signal.SIGKILL)
            case Kind.STOP_PEER | Kind.STOP_COORDINATOR:
                self._supervisor.send_signal(name, signal.SIGSTOP)
            case Kind.CUT:
                self._links[name].cut()
            case Kind.SILENCE:
                self._links[name].silence()
            case Kind.SLOW:
                self._links[name].reshape(LinkShape(up_bits_per_s=fault.level, down_bits_per_s=fault.level, latency_s=0.05))
            case Kind.LOSSY:
                self._links[name].lossy(fault.level, seed=fault.number)
            case Kind.FULL_DISK:
                self.disk.fill(self._supervisor.pid(name))

    def repair(self, fault: Fault) -> None:
        """Repair the fault: restart a killed process. (A killed rank is restarted by its torchrun.)"""
        name = fault.target
        match fault.kind:
            case Kind.KILL_PEER | Kind.KILL_COORDINATOR:
                self.start(name)
            case Kind.STOP_PEER | Kind.STOP_COORDINATOR:
                self._supervisor.send_signal(name, signal.SIGCONT)
            case Kind.CUT | Kind.SILENCE | Kind.LOSSY:
                self._links[name].repair()
            case Kind.SLOW:
                self._links[name].reshape(LinkShape())
            case Kind.FULL_DISK:
                self.disk.free(self._supervisor.pid(name))

    # ---- observing ------------------------------------------------------------------------------------------------------

    def read_folder(self) -> Recovered:
        """Return what the folder of a coordinator that has ended holds. Raises StorageError when it is damaged."""
        outer = load_outer(StateFolder(self.folder.state))
        finite = all(bool(fragment.isfinite().all()) for fragment in outer.theta)
        return Recovered(time.time(), outer.outer_step, outer.digest, finite)

    def journalled(self) -> dict[int, int]:
        """Return round_id by outer step, from the journal segments that are kept. Raises StorageError when one is damaged."""
        segments = sorted((self.folder.state / "outer").glob("*.journal"))
        rounds = (replay(path, int(path.stem.removeprefix("step-"))) for path in segments)
        return {committed.outer_step: committed.round_id for segment in rounds for committed in segment}

    def resident_bytes(self) -> int | None:
        """Return the coordinator's resident memory; None while it does not run."""
        running = self._supervisor.running(COORDINATOR)
        return procfs.resident_bytes(self._supervisor.pid(COORDINATOR)) if running else None

    def log_bytes(self) -> int:
        """Return the size of the coordinator's log."""
        return (self.folder.logs / f"{COORDINATOR}.log").stat().st_size

    def state_bytes(self) -> int:
        """Return the size of the files in the coordinator's folder, without the metrics, which have a bound of their own."""
        total = 0
        for path in self.folder.state.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                counts = path.is_file() and path.name != BALLAST and not path.name.startswith("metrics.")
                total += path.stat().st_size if counts else 0
        return total

    def pid(self, name: str) -> int:
        """Return the process id of its last process."""
        return self._supervisor.pid(name)

    def running(self, name: str) -> bool:
        """Return whether this process runs."""
        return self._supervisor.running(name)

    def served(self, name: str = COORDINATOR) -> bool:
        """Return whether the coordinator has begun to serve since its last start."""
        return b" serving " in (self.folder.logs / f"{name}.log").read_bytes()[self._log_begins[name] :]

    def unexpected_ends(self) -> list[Exit]:
        """Return the processes that ended without being asked to."""
        return [end for end in self._supervisor.ended() if not end.expected]

    def finish(self, name: str) -> Exit:
        """Stop the process and return how it ended."""
        return self._supervisor.stop(name)

    def last_lines(self, name: str, count: int) -> tuple[str, ...]:
        """Return the last `count` lines of its log."""
        return self._supervisor.last_lines(name, count)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def marked_processes() -> Iterator[list[str]]:
    """Mark the processes that are started inside, one thread each; at the end kill those that are left, and note them."""
    mark, left = secrets.token_hex(8), list[str]()
    with _environment({_MARK: mark, "OMP_NUM_THREADS": "1"}):
        try:
            yield left
        finally:
            pids = procfs.marked(f"{_MARK}={mark}")
            left += [f"{pid}: {procfs.command_line(pid)}" for pid in pids]
            _signal(pids, signal.SIGKILL)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
