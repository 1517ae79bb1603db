"""Processes as Linux shows them in /proc: descendants, environment marks, sizes. A process that ends meanwhile is left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "available",
    "children",
    "command_line",
    "cpu_s",
    "descendants",
    "forget_peak",
    "marked",
    "of_session",
    "peak_bytes",
    "resident_bytes",
]

_PROC = Path("/proc")


def available() -> bool:
    """Return whether this system has /proc."""
    return (_PROC / "self" / "task").is_dir()


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, nearest first. Those whose parent has ended are not found."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def children(pid: int) -> list[int]:
    """Return the processes that `pid` started."""
    lists = (_read(task / "children") for task in _listed(_PROC / str(pid) / "task"))
    return [int(word) for listed in lists for word in listed.split()]


def of_session(pid: int) -> list[int]:
    """Return the processes of the session that `pid` leads or led, zombies aside."""
    found = []
    for each in (int(entry.name) for entry in _listed(_PROC) if entry.name.isdigit()):
        state, *fields = _read(_PROC / str(each) / "stat").rpartition(b")")[2].split() or [b"Z"]
        if state not in (b"Z", b"X") and int(fields[2]) == pid:
            found.append(each)
    return found


def marked(mark: str) -> list[int]:
    """Return the processes, this one and zombies aside, that were started with `mark` (NAME=VALUE) in their environment."""
    own = os.getpid()
    pids = (int(entry.name) for entry in _listed(_PROC) if entry.name.isdigit())
    return [pid for pid in pids if pid != own and mark.encode() in _read(_PROC / str(pid) / "environ").split(b"\0")]


def command_line(pid: int) -> str:
    """Return the command line as text."""
    return _read(_PROC / str(pid) / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def resident_bytes(pid: int) -> int | None:
    """Return the resident size; None when there is no such process."""
    return _size(pid, "VmRSS:")


def peak_bytes(pid: int) -> int | None:
    """Return the largest resident size since the last `forget_peak`; None when there is no such process."""
    return _size(pid, "VmHWM:")


def forget_peak(pid: int) -> None:
    """Let `peak_bytes` begin anew. Raises OSError."""
    (_PROC / str(pid) / "clear_refs").write_text("5")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of a process and of those of its children that have ended; 0 for none."""
    fields = _read(_PROC / str(pid) / "stat").rpartition(b")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _size(pid: int, name: str) -> int | None:
    lines = _read(_PROC / str(pid) / "status").decode().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _listed(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
