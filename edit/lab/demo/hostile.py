"""`edit-lab demo --hostile`: the same peers twice, three of them hostile: with the penalty alone, then with a robust rule.

The attackers know what a member knows, send what has the norm of an honest pseudo-gradient, and never stop. At the end the
audit log of the second run is verified from its files, when no process of the run is left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from edit.errors import ConfigError
from edit.lab.demo.command import Dependencies, run_demo
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.demo.plan import ATTACKS, HOSTILE, DemoOptions, plan_faults
from edit.lab.demo.report import html_table, page
from edit.lab.demo.results import Results
from edit.lab.processes import Supervisor
from edit.plain_text import json_text
from edit.view.charts import Series, line_chart

__all__ = ["Comparison", "run_hostile_demo"]

_PENALTY, _ROBUST = "the penalty alone", "geometric median"
_TITLES = {
    "penalty": f"1 of 2: {_PENALTY}, as of a run that trusts its members",
    "robust": f'2 of 2: robust.rule = "geometric_median", robust.hostile = {HOSTILE}',
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What both runs came to. log: the lines that `edit-coordinator audit verify` printed."""

    penalty: Results
    robust: Results
    attacks: Mapping[str, str]
    log: tuple[str, ...]

    @property
    def percent_below_penalty(self) -> float | None:
        """How far the robust rule's held-out loss is below that of the penalty alone, in percent."""
        if self.penalty.losses is None or self.robust.losses is None:
            return None
        return 100.0 * (self.penalty.losses.outer - self.robust.losses.outer) / self.penalty.losses.outer

    def attackers_weight(self, results: Results) -> float:
        """Return the share of the merged pseudo-gradient that was the attackers', the mean over the committed rounds."""
        return sum(peer.weight for peer in results.peers if peer.peer_id in self.attacks)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "penalty": self.penalty.as_json(),
            "robust": self.robust.as_json(),
            "attacks": dict(self.attacks),
            "percent_below_penalty": self.percent_below_penalty,
            "log": list(self.log),
        }


def run_hostile_demo(options: DemoOptions, console: Console, dependencies: Dependencies | None = None) -> Comparison:
    """Run both, compare them, verify the log; print and write the results. Raises as `run_demo` does."""
    dependencies = dependencies or Dependencies()
    folder = DemoFolder(options.out)
    folder.claim()
    runs = {
        "penalty": replace(options, out=folder.path / "penalty"),
        "robust": replace(options, out=folder.path / "robust", robust=True, alone=False),
    }
    results = {}
    for name, each in runs.items():
        console.print(Rule(_TITLES[name], style="dim"))
        results[name] = run_demo(each, console, dependencies)
    state = DemoFolder(runs["robust"].out).state
    with Supervisor(folder.logs) as supervisor:
        command = (*dependencies.programs.coordinator, "audit", "verify", "--state", str(state))
        log = supervisor.call({"audit-verify": command})["audit-verify"]
    found = Comparison(results["penalty"], results["robust"], plan_faults(options).attacks, tuple(log.strip().splitlines()))
    curves = {name: _curve(DemoFolder(each.out)) for name, each in runs.items()}
    try:
        folder.results.write_text(json_text(found.as_json(), indent=2) + "\n", encoding="utf-8")
        folder.report.write_text(_page(found, curves), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder.path}: cannot be written ({error.strerror})") from error
    console.print(Rule("both", style="dim"))
    console.print(_printed(found))
    console.print(f"\n{folder.report}\n{folder.results}", soft_wrap=True, highlight=False)
    return found


def _curve(folder: DemoFolder) -> list[tuple[float, float]]:
    """Return inner steps and held-out losses of the outer parameters."""
    lines = map(json.loads, folder.metrics.read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "validation" and line["who"] == "outer"]


def _headline(found: Comparison) -> str:
    percent = found.percent_below_penalty
    which = f"{len(found.attacks)} of {len(found.robust.peers)} peers attack"
    if percent is None:
        return which
    return f"{which}: with the robust rule the model is {abs(percent):.1f} % {'better' if percent >= 0 else 'worse'}"


def _summary(found: Comparison) -> str:
    return (
        "One peer sends its pseudo-gradient with the sign flipped, one the last update reversed, one repeats the last update; "
        "each as long as an honest one, so that no norm gives it away. The same peers, text and seed twice, "
        f"{found.robust.steps} inner steps each; the robust rule is told that {HOSTILE} may be hostile, and not which."
    )


def _rows(found: Comparison) -> list[tuple[str, str, str]]:
    """Return (name, with the penalty, with the robust rule)."""
    rows: list[tuple[str, str, str]] = []
    if found.penalty.losses is not None and found.robust.losses is not None:
        rows.append(("held-out loss, nats per byte", f"{found.penalty.losses.outer:.4f}", f"{found.robust.losses.outer:.4f}"))
        if found.penalty.losses.lone is not None:
            rows.append(("peer-0 alone, as many steps", f"{found.penalty.losses.lone:.4f}", ""))
    before, after = (f"{100 * found.attackers_weight(each):.1f} %" for each in (found.penalty, found.robust))
    rows.append(("weight of the three attackers", before, after))
    for mine, other in zip(found.penalty.peers, found.robust.peers, strict=True):
        name = f"  {mine.peer_id}{f', {ATTACKS[found.attacks[mine.peer_id]]}' if mine.peer_id in found.attacks else ''}"
        rows.append((name, f"{100 * mine.weight:.1f} %", f"{100 * other.weight:.1f} %"))
    before, after = (f"{each.committed} / {each.aborted}" for each in (found.penalty, found.robust))
    return [*rows, ("rounds committed / aborted", before, after)]


def _printed(found: Comparison) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", pad_edge=False)
    table.add_column("", overflow="fold")
    for name in (_PENALTY, _ROBUST):
        table.add_column(name, justify="right", no_wrap=True, style="bold")
    for row in _rows(found):
        table.add_row(*row)
    return Group(
        Text(_headline(found), style="bold green"), table, Text("\nthe audit log:", style="dim"), *map(Text, found.log)
    )


def _verdicts(results: Results, peer_id: str) -> str:
    peer = next(each for each in results.peers if each.peer_id == peer_id)
    return ", ".join(f"{verdict} {count}" for verdict, count in sorted(peer.verdicts.items()))


def _page(found: Comparison, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    tiles = []
    if found.penalty.losses is not None and found.robust.losses is not None:
        tiles += [
            (f"{found.penalty.losses.outer:.3f}", f"held-out loss with {_PENALTY}"),
            (f"{found.robust.losses.outer:.3f}", "held-out loss with the robust rule"),
        ]
        if found.penalty.losses.lone is not None:
            tiles.append((f"{found.penalty.losses.lone:.3f}", "held-out loss of peer-0 alone, as many steps"))
    for each, words in ((found.penalty, f"with {_PENALTY}"), (found.robust, "with the robust rule")):
        tiles.append((f"{100 * found.attackers_weight(each):.0f} %", f"weight of the three attackers {words}"))
    series = [Series("penalty", "s4", curves["penalty"]), Series("robust rule", "s2", curves["robust"])]
    rows = [
        (
            peer.peer_id,
            ATTACKS[found.attacks[peer.peer_id]] if peer.peer_id in found.attacks else "honest",
            f"{100 * peer.weight:.1f} %",
            _verdicts(found.penalty, peer.peer_id),
            f"{100 * other.weight:.1f} %",
            _verdicts(found.robust, peer.peer_id),
        )
        for peer, other in zip(found.penalty.peers, found.robust.peers, strict=True)
    ]
    head = ("peer", "does", f"weight, {_PENALTY}", "verdicts", "weight, robust rule", "verdicts")
    links = (("penalty/report.html", f"The run with {_PENALTY}"), ("robust/report.html", "The run with the robust rule"))
    return page(
        "hostile.html",
        headline=escape(_headline(found)),
        summary=escape(_summary(found)),
        tiles="".join(f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in tiles),
        note="Files of every peer's packages, also the attackers', that no peer has trained on.",
        chart=line_chart(series, (), float(found.robust.steps), "inner steps", height=340),
        peers=html_table(head, rows),
        command="edit-coordinator audit verify --state robust/coordinator",
        log=escape("\n".join(found.log)),
        links=" · ".join(f'<a href="{path}">{escape(text)}</a>' for path, text in links),
    )
