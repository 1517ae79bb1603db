"""The results of a measurement: when, where and at which commit it was made, as lines of JSON, as a table."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from edit import kernels
from edit.durable_files import write_atomic
from edit.errors import ConfigError
from edit.plain_text import json_text, printable

__all__ = [
    "Row",
    "append_lines",
    "circumstances",
    "cpu_model",
    "figure_note",
    "one_line",
    "print_table",
    "results_table",
    "write_picture",
]

Row: TypeAlias = Mapping[str, Any]
"""One measurement: a line of a results file."""


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
    """Append rows as lines of JSON. Raises ConfigError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json_text(row) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_picture(path: Path, text: str) -> None:
    """Write a file whole. Raises ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
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
    lines = str(error).strip().splitlines()
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
    wide = None if Console().is_terminal else 200
    Console(width=wide).print(table)
