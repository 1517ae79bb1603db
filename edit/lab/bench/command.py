"""`edit-lab bench`: measure, print a table, write lines of JSON and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType

from aggregator.control.schemas import physical_memory_bytes
from edit.errors import ConfigError
from edit.lab.bench import codecs, exchange, links
from edit.lab.bench.codecs import CodecOptions
from edit.lab.bench.exchange import ExchangeOptions
from edit.lab.bench.links import LinkOptions
from edit.lab.bench.results import Row, append_lines, check_writable, print_table, write_picture
from edit.lab.bench.rivals import contest
from edit.lab.bench.rivals.contest import RivalOptions
from edit.lab.processes import terminated_as_interrupt
from edit.plain_text import json_text

__all__ = ["Outputs", "run_codecs", "run_exchange", "run_links", "run_rivals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where results go. results: lines are appended; plot: an SVG file; as_json: print JSON instead of the table."""

    results: Path | None = None
    plot: Path | None = None
    as_json: bool = False


def run_exchange(options: ExchangeOptions, outputs: Outputs, console: Console) -> None:
    """Measure exchanges. console: for the progress. Raises ConfigError, ChildDied."""

    def progress(row: Row) -> None:
        console.print(f"{row['codec']}, {row['peers']} peers: {row['round_s']} s, {row['cpu_s']} CPU s", highlight=False)
        _append(outputs, [row])

    _checked(outputs)
    _check_memory("--parameters", options.parameters, 8 * (1 + max(options.peers)))
    with terminated_as_interrupt():
        rows = exchange.measure_exchange(options, progress)
    _show(rows, outputs, exchange.table, exchange.picture)


def run_codecs(options: CodecOptions, outputs: Outputs, console: Console) -> None:
    """Measure codecs. console: for the progress. Raises ConfigError."""
    _checked(outputs)
    _check_memory("--numel", options.numel, 8)
    console.print(f"{len(options.codecs)} codecs, {options.repeat} times", highlight=False)
    with terminated_as_interrupt():
        rows = codecs.measure_codecs(options)
    try:
        _append(outputs, rows)
    finally:
        _show(rows, outputs, codecs.table, codecs.picture)


def run_links(options: LinkOptions, outputs: Outputs, console: Console) -> None:
    """Measure links. console: for the progress. Raises ConfigError, TransportError, ChildDied."""

    def progress(row: Row) -> None:
        console.print(f"{row['mbit']:g} Mbit/s, {1e3 * row['rtt_s']:g} ms: measured", highlight=False)
        _append(outputs, [row])

    _checked(outputs)
    _check_memory("--megabytes", options.payload_bytes / 1e6, 4e6)
    with terminated_as_interrupt():
        rows = links.measure_links(options, progress)
    _show(rows, outputs, links.table, links.picture)


def run_rivals(options: RivalOptions, outputs: Outputs, console: Console) -> None:
    """Measure this project and other systems; installs what is missing. console: for the progress. Raises ConfigError."""

    def progress(row: Row) -> None:
        found = f"failed: {row['error']}" if "error" in row else f"{row['round_s']} s, {row['cpu_s']} CPU s"
        bound = f", bound {row['bound_s']} s" if "bound_s" in row else ""
        link = f"{row['mbit']:g} Mbit/s, " if "mbit" in row else ""
        console.print(
            f"{row['system']}, {link}{row['peers']} peers: {found}{bound}", highlight=False, markup=False, soft_wrap=True
        )
        _append(outputs, [row])

    _checked(outputs)
    _check_memory("--parameters", options.parameters, 8 * (1 + max(options.peers)))
    console.print(f"other systems are installed in {options.folder}, once", highlight=False, markup=False, soft_wrap=True)
    with terminated_as_interrupt():
        rows = contest.measure_rivals(options, progress)
    _show(rows, outputs, contest.table, contest.picture)


def _checked(outputs: Outputs) -> None:
    """Raise ConfigError for a picture that is not named .svg, and for a file that cannot be written: before minutes of work,
    not after them.
    """
    if outputs.plot is not None:
        if outputs.plot.suffix != ".svg":
            raise ConfigError(f"--plot {outputs.plot}: the file is an SVG, so its name must end in .svg")
        check_writable(outputs.plot)
    _append(outputs, ())


def _check_memory(option: str, value: float, bytes_each: float) -> None:
    """Raise ConfigError where this machine cannot hold what is measured. bytes_each: the least that one of `value` takes."""
    if (needed := value * bytes_each) > (there := physical_memory_bytes()):
        raise ConfigError(
            f"{option} {value}: needs at least {needed / 1e9:.3g} GB of memory, and {there / 1e9:.3g} GB are here"
        )


def _append(outputs: Outputs, rows: Sequence[Row]) -> None:
    if outputs.results is not None:
        append_lines(outputs.results, rows)


def _show(
    rows: Sequence[Row],
    outputs: Outputs,
    table: Callable[[Sequence[Row]], RenderableType],
    picture: Callable[[Sequence[Row]], str],
) -> None:
    if outputs.as_json:
        print(json_text(list(rows)))  # noqa: T201
    else:
        print_table(table(rows))
    if outputs.plot is not None:
        write_picture(outputs.plot, picture(rows))
