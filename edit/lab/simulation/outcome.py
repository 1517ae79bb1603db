"""What a simulated run came to, as values, JSON and a table.

goodput        inner steps that counted in a commit / inner steps of the same fleet, every peer always there at its own speed
               without slowdowns, and nothing to exchange
utilisation    seconds of training / seconds alive, over all peers
participation  contributors / live peers, mean over the commits
staleness      of a contribution to one fragment: 0 when its first step was made from the newest outer parameters, n when n
               exchanges of this fragment were committed meanwhile
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from edit.lab.simulation.accounting import Accounting
from edit.lab.simulation.scenario import Scenario
from edit.view.units import bytes_text, duration_text

__all__ = ["Outcome", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The numbers of one run. Seconds are virtual."""

    peers: int
    finished: bool  # the last outer step was committed
    seconds: float
    goodput: float
    utilisation: float
    participation: float
    commits: int
    aborts: int
    contributors: float
    steps_trained: int
    steps_counted: float
    steps_ideal: float
    rejected: int
    late: int
    failures: int
    leaves: int
    returns: int
    snapshots: int
    bytes_up: int
    bytes_down: int
    staleness: dict[str, int]
    stuck: int  # peers that wait for ever after the last commit
    events: int

    @classmethod
    def of(
        cls, scenario: Scenario, accounting: Accounting, seconds: float, events: int, ideal: float, finished: bool, stuck: int
    ) -> Outcome:
        counted = accounting.fragment_steps / scenario.size.fragments
        return cls(
            peers=scenario.peers,
            finished=finished,
            seconds=seconds,
            goodput=counted / ideal if ideal else 0.0,
            utilisation=accounting.training_s / accounting.alive_s if accounting.alive_s else 0.0,
            participation=accounting.participation / accounting.commits if accounting.commits else 0.0,
            contributors=accounting.contributors / accounting.commits if accounting.commits else 0.0,
            steps_trained=accounting.trained,
            steps_counted=counted,
            steps_ideal=ideal,
            staleness={str(age): count for age, count in sorted(accounting.staleness.items())},
            stuck=stuck,
            events=events,
            commits=accounting.commits,
            aborts=accounting.aborts,
            rejected=accounting.rejected,
            late=accounting.late,
            failures=accounting.failures,
            leaves=accounting.leaves,
            returns=accounting.returns,
            snapshots=accounting.snapshots,
            bytes_up=accounting.bytes_up,
            bytes_down=accounting.bytes_down,
        )

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def table(outcome: Outcome, needed_s: float) -> Table:
    """Return the outcome as a table. needed_s: real seconds that the simulation took."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", pad_edge=False)
    made.add_column("result", no_wrap=True)
    made.add_column("value", justify="right", no_wrap=True, style="bold")
    made.add_column("how", style="dim")
    for row in _rows(outcome, needed_s):
        made.add_row(*row)
    return made


def _rows(o: Outcome, needed_s: float) -> list[tuple[str, str, str]]:
    shares = sum(o.staleness.values()) or 1
    staleness = ", ".join(f"{age}: {100 * count / shares:.3g} %" for age, count in list(o.staleness.items())[:5])
    return [
        ("goodput", f"{100 * o.goodput:.2f} %", f"{o.steps_counted:.6g} of {o.steps_ideal:.6g} ideal inner steps counted"),
        ("compute utilisation", f"{100 * o.utilisation:.2f} %", "training / alive"),
        ("participation", f"{100 * o.participation:.2f} %", f"{o.contributors:.1f} contributors per commit, {o.peers} peers"),
        ("commits", str(o.commits), f"{o.aborts} rounds aborted{'' if o.finished else '; the run did not finish'}"),
        ("sent by peers", bytes_text(o.bytes_up), f"{bytes_text(o.bytes_down)} received"),
        ("staleness", staleness or "none", "outer steps: share of the contributions"),
        ("failures", str(o.failures), f"{o.leaves} left politely, {o.returns} returned, {o.snapshots} snapshots"),
        ("not counted", str(o.late + o.rejected), f"{o.late} arrived late and went again, {o.rejected} rejected"),
        ("time", duration_text(o.seconds), f"virtual; {o.events} events in {needed_s:.1f} s"),
    ]
