"""`edit-lab chaos`: prints the schedule, what happens, and the result. Owns: the terminal. Decides nothing."""

from __future__ import annotations

import json
import time

import torch
from rich.console import Console

from edit.lab.chaos.harness import Broken, Chaos, Report
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.outcome import as_json, tables
from edit.lab.processes import terminated_as_interrupt

__all__ = ["run_chaos"]


def run_chaos(options: ChaosOptions, json_only: bool, console: Console) -> Report:
    """Run it; the narration goes to `console`, the result to stdout. Raises Broken (exit code 1) when a rule was broken.

    However it ends, every process it started has ended before it returns or raises. The folder stays.
    """
    torch.set_num_threads(1)
    narrator = _Narrator(console)
    with terminated_as_interrupt():
        chaos = Chaos(options, narrator.say)
        for fault in chaos.report.schedule:
            narrator.say(f"planned {fault}")
        report = chaos.run()
    (options.out / "chaos.json").write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
    if json_only:
        print(json.dumps(as_json(report)))  # noqa: T201
    else:
        Console().print(tables(report))
    if report.violation is not None:
        raise Broken(_words(report))
    return report


class _Narrator:
    """Lines with the seconds since the beginning."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:7.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)


def _words(report: Report) -> str:
    """Everything one needs to find and repeat it."""
    violation, history = report.violation, report.history
    assert violation is not None
    when = time.strftime("%H:%M:%S", time.localtime(violation.t))
    last = [str(blow) for blow in history.blows if blow.began <= violation.t][-3:]
    lines = [
        f"broken: {violation}",
        f"  seed {report.options.seed}, at {when}; replay: edit-lab chaos --seed {report.options.seed} with the same options",
        *(f"  before it: fault {fault}" for fault in last or ["none"]),
        f"  everything is in {report.options.out}",
    ]
    for name, evidence in report.evidence.items():
        lines += [f"  last lines of {name}:", *(f"    {line}" for line in evidence)]
    return "\n".join(lines)
