"""`edit-lab demo --hostile`: the same peers three times, three of them hostile: the penalty alone, a robust rule, masks.

The attackers know what a member knows, send what has the norm of an honest pseudo-gradient, and never stop. In the third run
the coordinator sees the sum of all contributions only, so nothing but the penalty can be set against them, and one peer is
killed: the others open the sum without it. At the end the audit logs of the second and the third run are verified from their
files, when no process of the runs is left.
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

_PENALTY, _ROBUST, _MASKED = "the penalty alone", "geometric median", "masked"
_TITLES = {
    "penalty": f"1 of 3: {_PENALTY}, as of a run that trusts its members",
    "robust": f'2 of 3: robust.rule = "geometric_median", robust.hostile = {HOSTILE}',
    "masked": "3 of 3: secagg.enabled = true, and a peer is killed",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the runs came to. log: the lines that `edit-coordinator audit verify` printed, of the second and the third run."""

    penalty: Results
    robust: Results
    masked: Results
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
            "masked": self.masked.as_json(),
            "attacks": dict(self.attacks),
            "percent_below_penalty": self.percent_below_penalty,
            "log": list(self.log),
        }


def run_hostile_demo(options: DemoOptions, console: Console, dependencies: Dependencies | None = None) -> Comparison:
    """Run all three, compare them, verify the logs; print and write the results. Raises as `run_demo` does."""
    folder = DemoFolder(options.out)
    with folder.claim():
        return _run(options, folder, console, dependencies or Dependencies())


def _run(options: DemoOptions, folder: DemoFolder, console: Console, dependencies: Dependencies) -> Comparison:
    """See `run_hostile_demo`."""
    runs = {
        "penalty": replace(options, out=folder.path / "penalty"),
        "robust": replace(options, out=folder.path / "robust", robust=True, alone=False),
        "masked": replace(options, out=folder.path / "masked", masked=True, alone=False),
    }
    results = {}
    for name, each in runs.items():
        console.print(Rule(_TITLES[name], style="dim"))
        results[name] = run_demo(each, console, dependencies)
    verify, logs = (*dependencies.programs.coordinator, "audit", "verify", "--state"), []
    with Supervisor(folder.logs) as supervisor:
        for name in ("robust", "masked"):
            command = (*verify, str(DemoFolder(runs[name].out).state))
            logs += supervisor.call({f"audit-verify-{name}": command})[f"audit-verify-{name}"].strip().splitlines()
    found = Comparison(**results, attacks=plan_faults(options).attacks, log=tuple(logs))
    curves = {name: _curve(DemoFolder(each.out)) for name, each in runs.items()}
    try:
        folder.results.write_text(json_text(found.as_json(), indent=2) + "\n", encoding="utf-8")
        folder.report.write_text(_page(found, curves), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder.path}: cannot be written ({error.strerror})") from error
    console.print(Rule("all three", style="dim"))
    console.print(_printed(found))
    console.print("\nthe audit logs:", style="dim")
    for line in found.log:
        console.print(Text(line), soft_wrap=True)
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
        "each as long as an honest one, so that no norm gives it away. The same peers, text and seed three times, "
        f"{found.robust.steps} inner steps each; the robust rule is told that {HOSTILE} may be hostile, and not which. "
        "Masked, the coordinator sees no contribution, only the sum of all: what hides honest peers hides the attackers, too. "
        "A peer is killed there, and the others open the sum without it."
    )


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return (name, with the penalty, with the robust rule, masked)."""
    runs = (found.penalty, found.robust, found.masked)
    rows: list[tuple[str, ...]] = []
    losses = [each.losses for each in runs]
    if any(each is not None for each in losses):
        shown = (f"{each.outer:.4f}" if each is not None else "" for each in losses)
        rows.append(("held-out loss, nats per byte", *shown))
    if found.penalty.losses is not None and found.penalty.losses.lone is not None:
        rows.append(("peer-0 alone, as many steps", f"{found.penalty.losses.lone:.4f}", "", ""))
    rows.append(("weight of the three attackers", *(f"{100 * found.attackers_weight(each):.1f} %" for each in runs)))
    for peers in zip(*(each.peers for each in runs), strict=True):
        peer_id = peers[0].peer_id
        name = f"  {peer_id}{f', {ATTACKS[found.attacks[peer_id]]}' if peer_id in found.attacks else ''}"
        rows.append((name, *(f"{100 * each.weight:.1f} %" for each in peers)))
    return [*rows, ("rounds committed / aborted", *(f"{each.committed} / {each.aborted}" for each in runs))]


def _printed(found: Comparison) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", pad_edge=False)
    table.add_column("", overflow="fold")
    for name in (_PENALTY, _ROBUST, _MASKED):
        table.add_column(name, justify="right", no_wrap=True, style="bold")
    for row in _rows(found):
        table.add_row(*row)
    return Group(Text(_headline(found), style="bold green"), table)


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
    if found.masked.losses is not None:
        tiles.append((f"{found.masked.losses.outer:.3f}", "held-out loss, masked"))
    for each, words in ((found.penalty, f"with {_PENALTY}"), (found.robust, "with the robust rule")):
        tiles.append((f"{100 * found.attackers_weight(each):.0f} %", f"weight of the three attackers {words}"))
    series = [
        Series("penalty", "s4", curves["penalty"]),
        Series("robust rule", "s2", curves["robust"]),
        Series("masked", "s3", curves["masked"]),
    ]
    rows = [
        (
            peer.peer_id,
            ATTACKS[found.attacks[peer.peer_id]] if peer.peer_id in found.attacks else "honest",
            f"{100 * peer.weight:.1f} %",
            _verdicts(found.penalty, peer.peer_id),
            f"{100 * other.weight:.1f} %",
            _verdicts(found.robust, peer.peer_id),
            f"{100 * masked.weight:.1f} %",
            _verdicts(found.masked, peer.peer_id),
        )
        for peer, other, masked in zip(found.penalty.peers, found.robust.peers, found.masked.peers, strict=True)
    ]
    head = ("peer", "does", *(word for run in ("penalty", "robust", "masked") for word in (f"weight, {run}", "verdicts")))
    links = (
        ("penalty/report.html", f"The run with {_PENALTY}"),
        ("robust/report.html", "The run with the robust rule"),
        ("masked/report.html", "The masked run"),
    )
    return page(
        "hostile.html",
        headline=escape(_headline(found)),
        summary=escape(_summary(found)),
        tiles="".join(f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in tiles),
        note="Files of every peer's packages, also the attackers', that no peer has trained on.",
        chart=line_chart(series, (), float(found.robust.steps), "inner steps", height=340),
        peers=html_table(head, rows),
        command="edit-coordinator audit verify --state robust/coordinator; and of masked/coordinator",
        log=escape("\n".join(found.log)),
        links=" · ".join(f'<a href="{path}">{escape(text)}</a>' for path, text in links),
    )
