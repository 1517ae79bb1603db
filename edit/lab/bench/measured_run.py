"""A real run for a measurement: a coordinator and its peers as processes, each peer behind a link of its own (`MeasuredRun`);
and the baseline: the same peers at the same time, without any exchange (`alone`)."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aggregator.storage.state_folder import StateFolder
from edit.errors import TransportError
from edit.lab.joining import join_behind_a_link
from edit.lab.link import Link, LinkShape
from edit.lab.observer import open_observer
from edit.lab.processes import COORDINATOR, ChildDied, Programs, Supervisor
from edit.lab.procfs import cpu_s
from edit.lab.run_toml import Settings, to_toml
from edit.lab.tail import JsonLines

__all__ = ["MeasuredRun", "alone"]

_SERVE_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.05
_ONE_THREAD = ("--threads", "1")


def alone(
    folder: Path, settings: Settings, data: Path, names: Sequence[str], steps: int, programs: Programs | None = None
) -> float:
    """Return the mean seconds per inner step while these peers train at the same time without any exchange.

    Raises ChildDied when one of them fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    toml = folder / "run.toml"
    toml.write_text(to_toml(settings), encoding="utf-8")
    peer = (programs or Programs()).peer
    command = (*peer, "alone", "--run", str(toml), "--data", str(data), "--steps", str(steps), *_ONE_THREAD)
    with Supervisor(folder / "logs") as supervisor:
        supervisor.call({name: (*command, "--out", str(folder / name)) for name in names}, timeout_s=3600.0)
    return statistics.fmean(_seconds_per_step(folder / name / "alone.jsonl") for name in names)


def _seconds_per_step(metrics: Path) -> float:
    lines = [line for line in JsonLines(metrics).read() if "t" in line]
    return float((lines[-1]["t"] - lines[0]["t"]) / (lines[-1]["step"] - lines[0]["step"]))


class MeasuredRun:
    """Context manager: inside it the coordinator serves a run with these settings; on exit every process and link is ended.

    folder: empty, or not there yet; settings: of run.toml, without [server]; data: what every peer trains on; threads: that the
    coordinator merges with.
    """

    def __init__(
        self, folder: Path, settings: Settings, data: Path, programs: Programs | None = None, *, threads: int = 1
    ) -> None:
        self.folder, self.state = folder, folder / "coordinator"
        self._threads = threads
        self._settings, self._data, self._programs = settings, data, programs or Programs()
        self._supervisor = Supervisor(folder / "logs")
        self._open = contextlib.ExitStack()
        self._peers: dict[str, tuple[str, ...]] = {}
        self.links: dict[str, Link] = {}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        toml = self.folder / "run.toml"
        server = {"listen": "127.0.0.1:0", "enrol_listen": "127.0.0.1:0"}
        toml.write_text(to_toml({**self._settings, "server": server}), encoding="utf-8")
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._supervisor)
            init = ("init", "--state", str(self.state), "--config", str(toml))
            self._supervisor.call({"init": (*self._programs.coordinator, *init)})
            serve = ("serve", "--keep-serving", "--threads", str(self._threads), "--state", str(self.state))
            self._supervisor.start(COORDINATOR, (*self._programs.coordinator, *serve))
            self.until("the coordinator serves", (self.state / "addresses.json").exists, _SERVE_WITHIN_S)
            self._open = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    @property
    def port(self) -> int:
        """The coordinator's, for control and data."""
        return int(StateFolder(self.state).bound()["listen"].rpartition(":")[2])

    def enrol(self, name: str, shape: LinkShape, *arguments: str) -> None:
        """Enrol a peer that connects through a link of this shape. arguments: more options of `edit-peer run`."""
        home = self.folder / name
        self.links[name] = join_behind_a_link(self._open, self.state, name, home, shape)
        run = ("run", "--home", str(home), "--data", str(self._data), "--metrics", str(home / "metrics.jsonl"))
        self._peers[name] = (*self._programs.peer, *run, *_ONE_THREAD, *arguments)

    def options(self, name: str, *arguments: str) -> None:
        """Start this peer with more options of `edit-peer run` from now on."""
        self._peers[name] = (*self._peers[name], *arguments)

    def start(self, *names: str) -> None:
        """Start these peers, also again after they ended."""
        for name in names:
            self._supervisor.start(name, self._peers[name])

    def kill(self, name: str) -> None:
        """Send SIGKILL; return when the process is gone."""
        self._supervisor.kill(name)

    def lines(self, name: str = COORDINATOR) -> list[dict[str, Any]]:
        """Return all lines of this process's metrics file."""
        folder = self.state if name == COORDINATOR else self.folder / name
        return JsonLines(folder / "metrics.jsonl").read()

    def cpu_s(self, name: str = COORDINATOR) -> float:
        """Return the CPU seconds, user and system, that a process has used so far."""
        return cpu_s(self._supervisor.pid(name))

    def tokens(self) -> int:
        """Return the tokens merged so far, from the coordinator's status. Raises TransportError when it does not answer."""
        observer = open_observer(self.state)
        try:
            status = observer.status()
        finally:
            observer.close()
        if status is None:
            raise TransportError("the coordinator does not answer; see logs/coordinator.log")
        return status.tokens

    def until(self, what: str, done: Callable[[], bool], bound_s: float) -> None:
        """Wait until `done()`. Raises ChildDied when a process fails meanwhile, or after bound_s seconds."""
        give_up = time.monotonic() + bound_s
        while True:
            reached = done()
            for end in self._supervisor.ended():  # after done(), which the end of a process may have made true
                if not end.expected and end.returncode != 0:
                    raise ChildDied(str(end))
            if reached:
                return
            if time.monotonic() > give_up:
                raise ChildDied(f"{what}: not within {bound_s:.0f} s; see {self.folder / 'logs'}")
            time.sleep(_LOOK_EVERY_S)

    def finish(self, bound_s: float) -> None:
        """Wait until all peers have ended. Raises as `until`."""
        self.until("the run ends", lambda: not any(self._supervisor.running(name) for name in self._peers), bound_s)
