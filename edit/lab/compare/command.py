"""`edit-lab compare`: make the trials that are missing, each in a process of its own; print the table, draw the pictures."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from edit.config.presets import PRESETS
from edit.errors import ConfigError
from edit.lab.bench.apart import make_apart
from edit.lab.bench.results import (
    Row,
    append_lines,
    check_writable,
    one_line,
    print_table,
    read_lines,
    results_table,
    write_picture,
)
from edit.lab.compare.corpus import TextOptions
from edit.lab.compare.method import Length, Method, read_method, trial_length
from edit.lab.compare.table import comparison_table, curves, grid_table, loss_against_bytes
from edit.lab.compare.trial import Trial
from edit.plain_text import json_text
from edit.view.units import duration_text
from peers.training.trainer import choose_device

__all__ = ["Cell", "CompareOptions", "Outputs", "print_presets", "recorded", "run_comparison", "trials"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The methods, ready for one number of peers and one H."""

    length: Length
    methods: tuple[Method, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What is compared."""

    # The same methods in the same order in each; one for each pair of --peers and --every.
    cells: tuple[Cell, ...]
    seeds: int
    # The method that gaps are to; "": none.
    base: str
    text: TextOptions = field(default_factory=TextOptions)
    slow: float = 1.0
    points: int = 12
    device: str = "cpu"

    @classmethod
    def of(
        cls,
        *,
        methods: Sequence[str],
        peers: Sequence[int],
        steps: int,
        every: Sequence[int],
        seeds: int,
        base: str | None,
        settings: Sequence[str],
        domains: bool,
        random_bytes: str | None,
        label_noise: float,
        small: float,
        slow: float,
        points: int,
        device: str,
    ) -> CompareOptions:
        """Read the command line's options. Raises ConfigError, which names the option and what is wrong with it."""
        for option, values in (("--method", methods), ("--peers", peers), ("--every", every)):
            if twice := next((value for value in values if list(values).count(value) > 1), None):
                raise ConfigError(f"{option} {twice}: is there twice")
        cells = []
        for count in peers:
            for h in every:
                length = Length(peers=count, steps=steps, every=h)
                cells.append(Cell(length=length, methods=tuple(read_method(text, length, settings) for text in methods)))
        if base is not None and base not in methods:
            raise ConfigError(f"--base {base}: must be one of the methods: {', '.join(methods)}")
        found = next((method.name for method in cells[0].methods if method.trains == "data-parallel"), "")
        begin, end = _stretch(random_bytes)
        text = TextOptions(domains=domains, random_from=begin, random_to=end, label_noise=label_noise, small=small)
        return cls(
            cells=tuple(cells),
            seeds=seeds,
            base=base if base is not None else found,
            text=text,
            slow=slow,
            points=points,
            device=device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where results go, beside the terminal."""

    results: Path
    plot: Path | None = None
    curves: Path | None = None
    as_json: bool = False
    print_only: bool = False


def _stretch(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 0.0
    begin, colon, end = text.partition(":")
    try:
        return float(begin), float(end if colon else "")
    except ValueError as error:
        raise ConfigError(f"--random-bytes {text}: must be FROM:TO, as 0.5:0.55") from error


def trials(options: CompareOptions, cell: Cell) -> list[Trial]:
    """Return every trial of a cell, seed by seed, so that a comparison that is stopped has whole seeds."""
    return [
        Trial(
            method=method,
            length=trial_length(method, cell.length),
            seed=seed,
            text=options.text,
            slow=options.slow,
            points=options.points,
            device=options.device,
        )
        for seed in range(options.seeds)
        for method in cell.methods
    ]


def recorded(file: Path, wanted: Mapping[str, Trial] | None = None) -> dict[str, Row]:
    """Return the finished trials of a results file by key; of equal ones the last. Half a line at its end is ignored.

    wanted: only these, by key, and only as trained on the text that is here.
    Raises ConfigError for a file that cannot be read, or that has something else in it.
    """
    try:
        rows = read_lines(file)
    except ConfigError as error:
        raise ConfigError(f"--results {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("key"), str):
            raise ConfigError(f"--results {file}: line {number} is no trial; give another file")
    if wanted is not None:
        rows = [row for row in rows if row["key"] in wanted and wanted[row["key"]].has(row)]
    return {row["key"]: row for row in rows}


def run_comparison(options: CompareOptions, outputs: Outputs, processes: int | None, console: Console) -> None:
    """Make the missing trials and show all. Raises ConfigError, before them where the device is not there or a file cannot be
    written; at the end also when a trial failed.
    """
    if outputs.curves is not None and len(options.cells) > 1:
        raise ConfigError(f"--curves {outputs.curves}: shows one --peers and one --every; give one of each")
    cells = [(cell.length, trials(options, cell)) for cell in options.cells]
    wanted = {trial.key: trial for _, those in cells for trial in those}  # cells share what does not depend on --every
    done = recorded(outputs.results, wanted)
    if elsewhere := wanted.keys() & recorded(outputs.results).keys() - done.keys():
        of = "trained on another text, the standard library of another Python"
        console.print(f"{len(elsewhere)} of these trials were {of}: they do not count", highlight=False)
    missing = [] if outputs.print_only else [trial for key, trial in wanted.items() if key not in done]
    missing.sort(key=lambda trial: trial.seed)
    for picture in (outputs.plot, outputs.curves):
        if picture is not None:
            check_writable(picture)
    if missing:
        choose_device(options.device)
        append_lines(outputs.results, [])
    failed = _make(missing, outputs.results, processes or os.cpu_count() or 1, console)
    done = recorded(outputs.results, wanted)
    names = [method.name for method in options.cells[0].methods]
    shown = [
        (length, [{**done[trial.key], "method": trial.method.name} for trial in those if trial.key in done])
        for length, those in cells
    ]
    rows = [row for _, those in shown for row in those]
    if outputs.as_json:
        print(json_text(list({row["key"]: row for row in rows}.values())))  # noqa: T201
    elif rows:
        one = len(shown) == 1
        print_table(
            comparison_table(rows, names, options.base) if one else grid_table(shown, names, options.base, options.seeds)
        )
    if rows and outputs.plot is not None:
        write_picture(outputs.plot, loss_against_bytes(shown, names, options.base))
    if rows and outputs.curves is not None:
        write_picture(outputs.curves, curves(rows, names))
    if failed:
        raise ConfigError(f"{len(failed)} of {len(missing)} trials failed; the first: {failed[0]}")
    if not rows:
        raise ConfigError(f"--results {outputs.results}: has none of these trials yet; leave --print out to make them")


def _make(missing: Sequence[Trial], results: Path, processes: int, console: Console) -> list[str]:
    """Make these trials and append each to the results as it ends; return what went wrong."""
    failed: list[str] = []
    ended = itertools.count(1)
    several = len({trial.length for trial in missing}) > 1

    def command(trial: Trial) -> tuple[Sequence[str], str]:
        return (sys.executable, "-m", "edit.lab.compare.one_trial"), trial.to_json()

    def each(trial: Trial, row: Row | Exception) -> None:
        where = f"{trial.length.peers} peers, H {trial.length.every}, " if several else ""
        who = f"{trial.method.name}, {where}seed {trial.seed}"
        what = f"{next(ended)} of {len(missing)}: {who}"
        if isinstance(row, Exception):
            failed.append(f"{who}: {one_line(row)}")
            console.print(f"{what}: failed: {one_line(row)}", markup=False, highlight=False)
            return
        append_lines(results, [row])
        loss = "diverged" if row["loss"] is None else f"loss {row['loss']:.4f}"
        console.print(f"{what}: {loss}, {duration_text(row['wall_s'])}", markup=False, highlight=False)

    make_apart(missing, command, processes, each)
    return failed


def print_presets() -> None:
    """Print every preset with its source and what it leaves out."""
    rows = [(name, one.summary, one.source) for name, one in PRESETS.items()]
    notes = [f"{name}: {one.note}" for name, one in PRESETS.items() if one.note]
    harness = [name for name, one in PRESETS.items() if one.only_harness]
    note = "\n".join([f"only `edit-lab compare` has {', '.join(harness)}", *notes])
    table = results_table("presets of edit-coordinator init --preset and edit-lab compare --method", _HEAD, rows, note)
    for column in table.columns:
        column.justify = "left"
    print_table(table)


_HEAD = ("preset", "what it does", "source")
