"""`edit-lab chaos`: print the schedule, the progress and the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console, RenderableType

from edit.errors import ConfigError
from edit.lab.chaos.exact import ExactChaos, ExactReport
from edit.lab.chaos.exact import as_json as exact_json
from edit.lab.chaos.exact import tables as exact_tables
from edit.lab.chaos.harness import Chaos, Report, RuleBroken
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.outcome import as_json, swarm_tables, tables
from edit.lab.chaos.swarm import SwarmChaos, SwarmReport
from edit.lab.chaos.swarm import as_json as swarm_json
from edit.lab.processes import terminated_as_interrupt
from edit.plain_text import json_text

__all__ = ["run_chaos", "run_exact_chaos", "run_swarm_chaos"]

_Reported = TypeVar("_Reported", Report, SwarmReport, ExactReport)


class _Runs(Protocol[_Reported]):
    """A chaos run."""

    report: _Reported

    def run(self) -> _Reported: ...


def run_chaos(options: ChaosOptions, json_only: bool, console: Console) -> Report:
    """Run it, with progress on `console` and the result on stdout. Raises RuleBroken (exit code 1) when a rule was broken.

    Before it returns or raises, every process has ended. The folder is kept.
    """
    report = _run(Chaos, options, console)
    _show(report, as_json(report), tables(report), json_only)
    return report


def run_swarm_chaos(options: ChaosOptions, json_only: bool, console: Console) -> SwarmReport:
    """Run that of a swarm likewise."""
    report = _run(SwarmChaos, options, console)
    _show(report, swarm_json(report), swarm_tables(report), json_only)
    return report


def run_exact_chaos(options: ChaosOptions, json_only: bool, console: Console) -> ExactReport:
    """Make one run twice likewise, and compare."""
    report = _run(ExactChaos, options, console)
    _show(report, exact_json(report), exact_tables(report), json_only)
    return report


def _run(
    kind: Callable[[ChaosOptions, Callable[[str], None]], _Runs[_Reported]], options: ChaosOptions, console: Console
) -> _Reported:
    torch.set_num_threads(1)
    log = _Log(console)
    with terminated_as_interrupt():
        chaos = kind(options, log.line)
        for fault in chaos.report.schedule:
            log.line(f"planned {fault}")
        return chaos.run()


def _show(report: Report | SwarmReport | ExactReport, values: dict[str, Any], shown: RenderableType, json_only: bool) -> None:
    """Print and write the result. Raises RuleBroken, also where the file cannot be written; else ConfigError then."""
    if json_only:
        print(json_text(values))  # noqa: T201
    else:
        Console().print(shown)
    file, unwritten = report.options.out / "chaos.json", None
    try:
        file.write_text(json_text(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        unwritten = ConfigError(f"cannot write {file}: {error.strerror}")
    if report.violation is not None:
        raise RuleBroken(_explanation(report))
    if unwritten is not None:
        raise unwritten


class _Log:
    """Print lines with the seconds since the beginning."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.monotonic()

    def line(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:7.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)


def _explanation(report: Report | SwarmReport | ExactReport) -> str:
    """Return what is needed to find and repeat the violation."""
    violation = report.violation
    assert violation is not None
    when = time.strftime("%H:%M:%S", time.localtime(violation.t))
    if isinstance(report, SwarmReport):
        last = report.incidents[-3:]
    elif isinstance(report, ExactReport):
        last = [str(fault) for fault in report.incidents[-3:]]
    else:
        last = [str(incident) for incident in report.history.incidents if incident.began <= violation.t][-3:]
    lines = [
        f"rule broken: {violation}",
        f"  seed {report.options.seed}, at {when}; replay: edit-lab chaos --seed {report.options.seed} with the same options",
        *(f"  before it: fault {fault}" for fault in last or ["none"]),
        f"  everything is in {report.options.out}",
    ]
    for name, evidence in report.evidence.items():
        lines += [f"  last lines of {name}:", *(f"    {line}" for line in evidence)]
    return "\n".join(lines)
