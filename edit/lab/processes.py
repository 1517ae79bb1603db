"""Child processes of the lab: started in sessions of their own, watched, killed, and ended when the lab ends.

No process outlives the lab: the supervisor sends SIGTERM to every group on exit, waits `patience_s`, then sends SIGKILL to
whatever is left of the sessions: also to what a child has started in another group, as a peer its host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from edit.errors import EditError, LocalProtocolError
from edit.lab import procfs

__all__ = ["COORDINATOR", "ChildDied", "Exit", "Programs", "Supervisor", "terminated_as_interrupt"]

COORDINATOR = "coordinator"
"""The name of the coordinator's process; a peer's process is called by its peer_id."""

_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The command lines of `edit-coordinator` and `edit-peer`; tests replace them."""

    coordinator: tuple[str, ...] = field(default_factory=lambda: (sys.executable, "-m", "aggregator"))
    peer: tuple[str, ...] = field(default_factory=lambda: (sys.executable, "-m", "peers"))


class ChildDied(EditError):
    """A process ended that should be running, or failed: the message has its name, exit code and last lines."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended."""

    name: str
    returncode: int  # as subprocess gives it; negative: the signal
    expected: bool  # whether the lab asked it to end
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        how = f"killed by {signal.Signals(-self.returncode).name}" if self.returncode < 0 else f"exit code {self.returncode}"
        output = "\n".join(f"    {line}" for line in self.last_lines) or "    (no output)"
        return f"{self.name} ended ({how}); its last lines:\n{output}"


class _Child:
    """One name's current process and where its output goes. A restart appends to the same file."""

    def __init__(self, name: str, argv: Sequence[str], log: Path) -> None:
        self.name, self.argv, self.log = name, tuple(argv), log
        self.stop_requested = False
        self.reported = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = _spawn(self.argv, output)

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the whole group. The group may outlive its leader, or may have ended."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):  # PermissionError: macOS, for a group of zombies
            return

    def processes(self) -> list[int]:
        """Return it, if it runs, and all that it has started that runs."""
        session = procfs.of_session(self.process.pid)
        return [*dict.fromkeys([*session, *(below for pid in session for below in procfs.descendants(pid))])]

    def signal_all(self, number: signal.Signals) -> None:
        """Signal all of them, and the group."""
        processes = self.processes()
        self.signal_group(number)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> Exit:
        return Exit(self.name, self.process.returncode, self.stop_requested, self.last_lines(8))

    def last_lines(self, count: int) -> tuple[str, ...]:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return tuple(text.splitlines()[-count:])


def _spawn(argv: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


class Supervisor:
    """Context manager over child processes by name; on exit, also by an exception, it ends all of them.

    logs: folder of the output files NAME.log; patience_s: seconds between SIGTERM and SIGKILL; now: a monotonic clock.
    """

    def __init__(self, logs: Path, patience_s: float = 3.0, now: Callable[[], float] = time.monotonic) -> None:
        self._logs, self._patience_s, self._now = logs, patience_s, now
        self._children: dict[str, _Child] = {}
        self._closed = False

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a process, also again after it ended. Raises LocalProtocolError while it runs, or after close."""
        if self._closed:
            raise LocalProtocolError(f"{name}: started after the supervisor was closed")
        if self.running(name):
            raise LocalProtocolError(f"{name}: is already running")
        with _HeldSignals(redeliver=True):
            self._children[name] = _Child(name, argv, self._logs / f"{name}.log")

    def kill(self, name: str) -> None:
        """Send SIGKILL, to all that it has started, too, and return when the process is gone."""
        child = self._children[name]
        child.stop_requested = True
        child.signal_all(signal.SIGKILL)
        child.process.wait()

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process and to all that it has started."""
        self._children[name].signal_all(number)

    def signal_leader(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process's own group only, which tells the others itself. Its end is expected."""
        child = self._children[name]
        child.stop_requested = True
        child.signal_group(number)

    def processes(self, name: str) -> list[int]:
        """Return the process, if it runs, and all that it has started that runs."""
        return self._children[name].processes() if name in self._children else []

    def stop(self, name: str) -> Exit:
        """Send SIGTERM, and SIGKILL after `patience_s`; return how it ended."""
        child = self._children[name]
        child.stop_requested = True
        self._end([child])
        return child.end()

    def running(self, name: str) -> bool:
        child = self._children.get(name)
        return child is not None and child.process.poll() is None

    def pid(self, name: str) -> int:
        return self._children[name].process.pid

    def last_lines(self, name: str, count: int = 8) -> tuple[str, ...]:
        return self._children[name].last_lines(count)

    def ended(self) -> tuple[Exit, ...]:
        """Return the processes that ended since the last call, each once, expected or not."""
        news = [child for child in self._children.values() if not child.reported and child.process.poll() is not None]
        for child in news:
            child.reported = True
        return tuple(child.end() for child in news)

    def call(self, commands: Mapping[str, Sequence[str]], timeout_s: float = 60.0) -> dict[str, str]:
        """Run short commands in parallel and return their output by name.

        Raises ChildDied for the first that fails or takes too long.
        """
        logs = {name: self._logs / f"{name}.log" for name in commands}
        starts = {name: log.stat().st_size if log.exists() else 0 for name, log in logs.items()}
        for name, argv in commands.items():
            self.start(name, argv)
            self._children[name].reported = True
        deadline = self._now() + timeout_s
        for name in commands:
            self._wait_for_success(self._children[name], deadline)
        return {name: log.read_bytes()[starts[name] :].decode(errors="replace") for name, log in logs.items()}

    def _wait_for_success(self, child: _Child, deadline: float) -> None:
        try:
            child.process.wait(max(0.0, deadline - self._now()))
        except subprocess.TimeoutExpired:
            self.stop(child.name)
        if child.process.returncode != 0:
            raise ChildDied(str(child.end()))

    def close(self) -> None:
        """End every process within about `patience_s`. Interrupts are deferred meanwhile; may be called again."""
        self._closed = True
        for child in self._children.values():
            child.stop_requested = child.stop_requested or child.process.poll() is None
        with _HeldSignals(redeliver=False):
            self._end(list(self._children.values()))

    def _end(self, children: Sequence[_Child]) -> None:
        for child in children:
            child.signal_group(signal.SIGTERM)
            child.signal_all(signal.SIGCONT)  # one that is stopped does not hear it
        deadline = self._now() + self._patience_s
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - self._now()))
            except subprocess.TimeoutExpired:
                continue
        for child in children:  # also where the leader is gone but a grandchild stayed in its session
            child.signal_all(signal.SIGKILL)
            child.process.wait()


class _HeldSignals:
    """Context manager: defer SIGINT and SIGTERM, so that a second Ctrl-C, or one during a start, leaves no process behind.

    Handlers are replaced and signals not blocked, because children would inherit a blocked signal. redeliver: raise the first
    signal that came meanwhile once the handlers are back.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, redeliver: bool) -> None:
        self._redeliver = redeliver
        self._received: list[int] = []

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._receive) for number in self._SIGNALS}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._redeliver and self._received:
            signal.raise_signal(self._received[0])


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt inside, as Ctrl-C does, so that every process is ended."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
