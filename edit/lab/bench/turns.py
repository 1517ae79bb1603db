"""Processes that exchange when they are told to, timed from outside: wall seconds, and CPU seconds of each with its children.

A process under measurement connects to 127.0.0.1 of its host, at the port of its last argument, and speaks lines of text:

    it says   ready                     it has prepared the next exchange
    it hears  go                        or the end of the connection: no further exchange
    it says   {"began": t, "ended": t}  seconds of time.monotonic(), the same clock for all processes;
                                        "result": text that must be the same from all that give one

`Exchanger` is this protocol for our own processes; those of other systems cannot import this package and write it out.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self

from edit.errors import RemoteProtocolError
from edit.lab import procfs
from edit.lab.network import LOOPBACK, Network
from edit.lab.processes import ChildDied, Supervisor

__all__ = ["Exchanger", "Timing", "Turns", "best", "median"]

_LOOK_EVERY_S = 0.2
_ENDS_WITHIN_S = 5.0
_IDLE_LOOK_S, _IDLE_CPU_S = 0.5, 0.05  # processes are idle that need no more CPU seconds than that, all together, in this time


@dataclass(frozen=True, slots=True)
class Timing:
    """One exchange.

    wall_s: from the first to begin to the last to end; cpu_s: user + system by process, with children; link_bytes: through each
    direction of each link.
    """

    wall_s: float
    cpu_s: Mapping[str, float]
    link_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


def median(timings: Sequence[Timing]) -> Timing:
    """Return the median of each figure; of bytes one that was counted."""
    return Timing(
        statistics.median(timing.wall_s for timing in timings),
        {name: statistics.median(timing.cpu_s[name] for timing in timings) for name in timings[0].cpu_s},
        {way: statistics.median_low(timing.link_bytes[way] for timing in timings) for way in timings[0].link_bytes},
    )


def best(timings: Sequence[Timing]) -> tuple[float, float]:
    """Return the least wall seconds, and the least CPU seconds of all processes together."""
    return min(timing.wall_s for timing in timings), min(timing.total_cpu_s for timing in timings)


class Turns:
    """Context manager: processes of a supervisor that exchange together, turn by turn.

    limit_s: how long any of them may take to connect, to prepare or to exchange; network: has a host of each process's name;
    None: all are on loopback.
    """

    def __init__(self, supervisor: Supervisor, limit_s: float, network: Network | None = None) -> None:
        self._supervisor, self._limit_s, self._network = supervisor, limit_s, network
        self._listeners: dict[str, socket.socket] = {}
        self._calls: dict[str, _Call] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for opened in (*(call.socket for call in self._calls.values()), *self._listeners.values()):
            opened.close()

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a process that takes part. argv: without the port, which becomes its last argument."""
        host = self._network.hosts[name] if self._network else LOOPBACK
        self._listeners[name] = host.listen()
        self._supervisor.start(name, host.command((*argv, str(self._listeners[name].getsockname()[1]))))

    def measure(self, repeat: int, beside: Sequence[str] = (), *, settle: bool = False) -> list[Timing]:
        """Return the timings of `repeat` exchanges, after one that warms up and is not counted.

        beside: names of processes that take part without being told to, such as a server. settle: count the CPU seconds that
        they still need of an exchange after all others have reported. Raises ChildDied when a process fails or takes too long,
        RemoteProtocolError when the processes ended with different results.
        """
        for name, listener in self._listeners.items():
            if name not in self._calls:
                self._wait(listener, f"{name} has not connected")
                self._calls[name] = _Call(listener.accept()[0])
        pids = {name: self._supervisor.pid(name) for name in (*beside, *self._listeners)}
        self._all_ready()
        busy = [pids[name] for name in beside] if settle else []
        return [self._turn(pids, busy) for _ in range(repeat + 1)][1:]

    def _all_ready(self) -> None:
        for name in self._calls:
            self._hear(name, "is not ready")

    def _turn(self, pids: Mapping[str, int], busy: Sequence[int]) -> Timing:
        """Let all exchange, and wait until all are ready again: until then they may look at what they have, and fail.

        busy: processes that are waited for until they are idle.
        """
        bytes_before = self._link_bytes()
        before = {name: _cpu_s(pid) for name, pid in pids.items()}
        for call in self._calls.values():
            call.say("go")
        ends = {name: json.loads(self._hear(name, "has not exchanged")) for name in self._calls}
        self._settle(busy)
        after = {name: _cpu_s(pid) for name, pid in pids.items()}
        moved = {way: count - bytes_before[way] for way, count in self._link_bytes().items()}
        self._all_ready()
        results = {name: end["result"] for name, end in ends.items() if "result" in end}
        if len(set(results.values())) > 1:
            raise RemoteProtocolError(f"different results: {results}")
        wall_s = max(end["ended"] for end in ends.values()) - min(end["began"] for end in ends.values())
        return Timing(wall_s, {name: after[name] - before[name] for name in pids}, moved)

    def _settle(self, busy: Sequence[int]) -> None:
        """Wait until these processes are idle: they use next to no CPU any more."""
        give_up, before, now = time.monotonic() + self._limit_s, -math.inf, sum(map(_cpu_s, busy))
        while busy and now - before > _IDLE_CPU_S:
            self._look()
            if time.monotonic() > give_up:
                raise ChildDied(f"the processes beside are not idle after {self._limit_s:g} s")
            time.sleep(_IDLE_LOOK_S)
            before, now = now, sum(map(_cpu_s, busy))

    def _link_bytes(self) -> Mapping[str, int]:
        return self._network.traffic() if self._network else {}

    def _hear(self, name: str, otherwise: str) -> str:
        call = self._calls[name]
        while (line := call.line()) is None:
            self._wait(call.socket, f"{name} {otherwise}")
            if not call.receive():
                raise self._closed(name)
        return line

    def _wait(self, source: socket.socket, otherwise: str) -> None:
        give_up = time.monotonic() + self._limit_s
        while not select.select([source], [], [], _LOOK_EVERY_S)[0]:
            self._look()
            if time.monotonic() > give_up:
                raise ChildDied(f"{otherwise} after {self._limit_s:g} s")

    def _closed(self, name: str) -> ChildDied:
        """Return what to say of a process that closed its connection: mostly it ends."""
        give_up = time.monotonic() + _ENDS_WITHIN_S
        while self._supervisor.running(name) and time.monotonic() < give_up:
            time.sleep(_LOOK_EVERY_S)
        self._look()
        return ChildDied("\n".join((f"{name} closed its connection; its last lines:", *self._supervisor.last_lines(name))))

    def _look(self) -> None:
        for end in self._supervisor.ended():
            if not end.expected:
                raise ChildDied(str(end))


class _Call:
    """The connection to one process. Lines that arrived with an earlier one are kept."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._bytes = b""

    def line(self) -> str | None:
        """Return the next line when all of it has arrived."""
        line, end, rest = self._bytes.partition(b"\n")
        if not end:
            return None
        self._bytes = rest
        return line.decode()

    def receive(self) -> bool:
        """Receive what is there. Returns False at the end of the connection."""
        try:
            more = self.socket.recv(65536)
        except ConnectionError:  # it ended with a line of ours unread
            return False
        self._bytes += more
        return bool(more)

    def say(self, line: str) -> None:
        """Send a line. When nobody is there to hear it, the next `receive` tells."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(f"{line}\n".encode())


class Exchanger:
    """The side of one process that takes part.

    while exchanger.go():  # prepared; exchanges; then
        exchanger.report(digest)
    """

    def __init__(self, port: int) -> None:
        self._lines: IO[Any] = socket.create_connection(("127.0.0.1", port)).makefile("rw", encoding="utf-8", newline="\n")
        self._began = 0.0

    def go(self) -> bool:
        """Say that the next exchange is prepared, and wait until it begins. Returns False when there is no further one."""
        self._say("ready")
        told = bool(self._lines.readline())
        self._began = time.monotonic()
        return told

    def report(self, result: str) -> None:
        """Say that the exchange has ended. result: must be the same at all processes."""
        self._say(json.dumps({"began": self._began, "ended": time.monotonic(), "result": result}))

    def _say(self, line: str) -> None:
        self._lines.write(f"{line}\n")
        self._lines.flush()


def _cpu_s(pid: int) -> float:
    return sum(procfs.cpu_s(each) for each in (pid, *procfs.descendants(pid)))
