"""Child processes: started in groups of their own, watched, killed, and ended for certain.

Owns: every process the lab starts, its output file, and the promise that none outlives the lab: closing sends SIGTERM to every
group at once, waits `patience_s`, then sends SIGKILL. Must not know: what the processes do, or what a run is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from edit.errors import EditError, LocalProtocolError

__all__ = ["ChildDied", "Exit", "Supervisor", "terminated_as_interrupt"]

_TAIL_BYTES = 16_384


class ChildDied(EditError):
    """A process that should be running, or should have succeeded, ended: which one, its exit code, the end of its output."""


@dataclass(frozen=True, slots=True)
class Exit:
    """One process's end. returncode as subprocess gives it (negative: the signal); expected: it was told to end."""

    name: str
    returncode: int
    expected: bool
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        how = f"killed by {signal.Signals(-self.returncode).name}" if self.returncode < 0 else f"exit code {self.returncode}"
        output = "\n".join(f"    {line}" for line in self.last_lines) or "    (no output)"
        return f"{self.name} ended ({how}); its last lines:\n{output}"


class _Child:
    """One name's current process and where its output goes. A restart appends to the same file."""

    def __init__(self, name: str, argv: Sequence[str], log: Path) -> None:
        self.name, self.argv, self.log = name, tuple(argv), log
        self.told_to_end = False
        self.reported = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = _spawn(self.argv, output)

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the whole group; the group may outlive its leader, and may be gone."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):  # PermissionError: macOS, for a group of zombies
            return

    def end(self) -> Exit:
        return Exit(self.name, self.process.returncode, self.told_to_end, self.last_lines(8))

    def last_lines(self, count: int) -> tuple[str, ...]:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return tuple(text.splitlines()[-count:])


def _spawn(argv: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


class Supervisor:
    """Context manager over child processes by name; on leaving it, however it is left, none of them lives.

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
        """Start a process, or start one again after it ended. Raises LocalProtocolError while it runs or after close."""
        if self._closed:
            raise LocalProtocolError(f"{name}: started after the supervisor was closed")
        if self.running(name):
            raise LocalProtocolError(f"{name}: is already running")
        with _Deaf(redeliver=True):
            self._children[name] = _Child(name, argv, self._logs / f"{name}.log")

    def kill(self, name: str) -> None:
        """SIGKILL, as a power cut would; returns when the process is gone."""
        child = self._children[name]
        child.told_to_end = True
        child.signal_group(signal.SIGKILL)
        child.process.wait()

    def stop(self, name: str) -> Exit:
        """SIGTERM, then SIGKILL after the patience; returns how it ended."""
        child = self._children[name]
        child.told_to_end = True
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
        """Processes that ended since the last call, each reported once; told to or not."""
        news = [child for child in self._children.values() if not child.reported and child.process.poll() is not None]
        for child in news:
            child.reported = True
        return tuple(child.end() for child in news)

    def call(self, commands: Mapping[str, Sequence[str]], timeout_s: float = 60.0) -> dict[str, str]:
        """Run short commands side by side to their ends and return their output by name.

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
        """End every process within `patience_s` and a moment. Interrupts are held off meanwhile; may be called again."""
        self._closed = True
        for child in self._children.values():
            child.told_to_end = child.told_to_end or child.process.poll() is None
        with _Deaf(redeliver=False):
            self._end(list(self._children.values()))

    def _end(self, children: Sequence[_Child]) -> None:
        for child in children:
            child.signal_group(signal.SIGTERM)
        deadline = self._now() + self._patience_s
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - self._now()))
            except subprocess.TimeoutExpired:
                continue
        for child in children:  # also where the leader is gone but a grandchild stayed in its group
            child.signal_group(signal.SIGKILL)
            child.process.wait()


class _Deaf:
    """Hold off SIGINT and SIGTERM, so that an impatient second Ctrl-C, or one in the middle of a start, orphans nobody.

    Handlers are swapped rather than signals blocked: children would inherit a blocked signal. `redeliver` raises what came
    meanwhile once the handlers are back.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, redeliver: bool) -> None:
        self._redeliver = redeliver
        self._heard: list[int] = []

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, lambda heard, _: self._heard.append(heard)) for number in self._SIGNALS}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._redeliver and self._heard:
            signal.raise_signal(self._heard[0])


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is inside as Ctrl-C does: with every process ended."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
