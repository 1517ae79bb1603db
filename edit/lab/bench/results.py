"""The results of a measurement: when, where and at which commit it was made, as lines of JSON, as a table."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any, TypeAlias

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from edit import kernels
from edit.durable_files import write_atomic
from edit.errors import ConfigError
from edit.plain_text import json_text, parse_json, printable

__all__ = [
    "Row",
    "append_lines",
    "check_writable",
    "circumstances",
    "cpu_model",
    "figure_note",
    "one_line",
    "print_table",
    "read_lines",
    "results_table",
    "write_picture",
]

Row: TypeAlias = Mapping[str, Any]
"""One measurement: a line of a results file."""

_PIECE = 1 << 16
_ROW_BEGINS = b'{"'
_WIDEST = 10_000


def circumstances(label: str = "") -> dict[str, Any]:
    """Return what every row begins with: date, commit, machine, who computes (torch or numba), load (a mean over a minute)."""
    now = datetime.now(UTC)
    return {
        "date": now.date().isoformat(),
        "time": now.strftime("%H:%M:%SZ"),
        "label": label,
        "commit": _commit(),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, torch {metadata.version('torch')}",
        "kernels": _kernels(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """Return the CPU's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())


def _kernels() -> str:
    """Return "torch", or "numba" with its version."""
    return re.split(r"[,(]", kernels.load().removeprefix("kernels: "))[0].strip()


def _commit(folder: Path = Path(__file__).parent) -> str:
    """Return the commit of this checkout, with -dirty when files were changed since; nothing outside a checkout.

    What measurements have appended to benchmarks/results is no change: else each row would make those after it dirty.
    """
    others = (":(top)", ":(top,exclude)benchmarks/results")
    commit = _git(folder, "describe", "--always", "--exclude=*")
    return (
        f"{commit}-dirty" if commit and _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *others) else commit
    )


def _git(folder: Path, *words: str) -> str:
    """Return what git prints; nothing if it fails."""
    try:
        return subprocess.run(("git", *words), cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def append_lines(path: Path, rows: Sequence[Row]) -> None:
    """Append rows as lines of JSON: all, or none where the disk is full. Raises ConfigError when the file cannot be written, or
    ends with something else than a row.

    Half a row at the end, that a kill or a full disk has left, is taken away first. A pipe or a terminal takes rows, too.
    """
    data = "".join(json_text(row) + "\n" for row in rows).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            _write_all(path, data)
            return
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # against others that append; until the file is closed
            data = _end_last_line(path, file) + data
            _append_whole(file, data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _write_all(path: Path, data: bytes) -> None:
    """Write to what is no file. Nothing is not written: whoever reads a pipe would be told of its end."""
    if path.is_dir() or not os.access(path, os.W_OK):
        raise ConfigError(f"cannot write {path}: {os.strerror(errno.EISDIR if path.is_dir() else errno.EACCES)}")
    if data:
        with path.open("wb") as file:
            file.write(data)


def _append_whole(file: IO[bytes], data: bytes) -> None:
    """Append the bytes; where that fails, leave the file as it was."""
    size = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[os.write(file.fileno(), data) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def _end_last_line(path: Path, file: IO[bytes]) -> bytes:
    """Take half a row at the end away; return the line end that a whole one lacks. Raises ConfigError for anything else."""
    begins = _last_line(file)
    file.seek(begins)
    rest = file.read()
    if not rest:
        return b""
    if _row(rest) is not None:
        return b"\n"
    if not _ROW_BEGINS.startswith(rest[: len(_ROW_BEGINS)]):
        raise ConfigError(f"{path}: its last line is no row of results; take it out, or give another file")
    file.truncate(begins)
    return b""


def _last_line(file: IO[bytes]) -> int:
    """Return where what stands after the last line end begins."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _PIECE)
        file.seek(begin)
        if (place := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + place + 1
        end = begin
    return 0


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the row that a line is; None where it is none."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a results file, none where there is no file. Half a line at its end is left out.

    Raises ConfigError for a file that cannot be read, or that has something else in it.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if (row := _row(line)) is not None:
            rows.append(row)
        elif number < len(lines):
            raise ConfigError(f"{path}: line {number} is no row of results; take it out, or give another file")
    return rows


def check_writable(path: Path) -> None:
    """Make the folder of a file that is to be written whole. Raises ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: is a folder")


def write_picture(path: Path, text: str) -> None:
    """Write a file whole. Raises ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode(), shared=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def figure_note(rows: Sequence[Row]) -> str:
    """Return where and when rows were measured, for the head of a picture or a table: in one run, or in several."""
    dates, loads = sorted(row["date"] for row in rows), sorted(row["load_before"] for row in rows)
    date = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    commits = {row["commit"] for row in rows if row.get("commit")}
    commit = f", commit {commits.pop()}" if len(commits) == 1 else f", {len(commits)} commits" if commits else ""
    load = f"{loads[0]:.1f}" if loads[0] == loads[-1] else f"{loads[0]:.1f} to {loads[-1]:.1f}"
    machines = {row["machine"] + (f", kernels {row['kernels']}" if row.get("kernels") else "") for row in rows}
    machine = machines.pop() if len(machines) == 1 else f"{len(machines)} machines"
    return f"{date}{commit}. {machine}; load before each {load}."


def one_line(error: Exception) -> str:
    """Return the line of an error that says most: who was killed by a signal, else the last one of a process's last words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[0].partition("; its last lines:")[0] if "ended (killed by " in lines[0] else lines[-1]
    return printable(line).strip()


def results_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> Table:
    """Return a table for the terminal: the first column is text, the others are numbers."""
    table = Table(title=title, caption=note, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_table(table: RenderableType) -> None:
    """Print to stdout; where that is no terminal, as wide as the table is."""
    console = Console()
    if not console.is_terminal:
        wide = Console(width=_WIDEST)
        console = Console(width=max(200, wide.measure(table).maximum))
    console.print(table)
