"""`edit-lab chaos`: print the schedule, the progress and the result."""

from __future__ import annotations

import time

import torch
from rich.console import Console

from edit.lab.chaos import swarm
from edit.lab.chaos.harness import Chaos, Report, RuleBroken
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.outcome import as_json, swarm_tables, tables
from edit.lab.processes import terminated_as_interrupt
from edit.plain_text import json_text

__all__ = ["run_chaos"]


def run_chaos(options: ChaosOptions, json_only: bool, console: Console) -> Report | swarm.SwarmReport:
    """Run it, with progress on `console` and the result on stdout. Raises RuleBroken (exit code 1) when a rule was broken.

    Before it returns or raises, every process has ended. The folder is kept.
    """
    torch.set_num_threads(1)
    log = _Log(console)
    with terminated_as_interrupt():
        chaos = swarm.SwarmChaos(options, log.line) if options.swarm else Chaos(options, log.line)
        for fault in chaos.report.schedule:
            log.line(f"planned {fault}")
        report = chaos.run()
    values = swarm.as_json(report) if isinstance(report, swarm.SwarmReport) else as_json(report)
    (options.out / "chaos.json").write_text(json_text(values, indent=1) + "\n", encoding="utf-8")
    if json_only:
        print(json_text(values))  # noqa: T201
    else:
        Console().print(swarm_tables(report) if isinstance(report, swarm.SwarmReport) else tables(report))
    if report.violation is not None:
        raise RuleBroken(_explanation(report))
    return report


class _Log:
    """Print lines with the seconds since the beginning."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.monotonic()

    def line(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:7.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)


def _explanation(report: Report | swarm.SwarmReport) -> str:
    """Return what is needed to find and repeat the violation."""
    violation = report.violation
    assert violation is not None
    when = time.strftime("%H:%M:%S", time.localtime(violation.t))
    if isinstance(report, swarm.SwarmReport):
        last = report.incidents[-3:]
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
