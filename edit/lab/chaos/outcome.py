"""The result of a chaos run: as one JSON object, and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from edit.lab.chaos.faults import Kind
from edit.lab.chaos.harness import Report
from edit.lab.chaos.history import History, Incident
from edit.lab.chaos.swarm import SwarmReport

__all__ = ["as_json", "swarm_tables", "tables"]


def as_json(report: Report) -> dict[str, Any]:
    """Return flat, stable names for scripts; times in seconds; None where there was nothing to measure."""
    history = report.history
    made, counted = history.inner_steps_made, history.inner_steps_counted
    sizes = [sample.bytes for sample in history.memory]
    return {
        "seed": report.options.seed,
        "seconds": round(report.seconds, 1),
        "peers": report.options.peers,
        "hostile": report.options.hostile,
        "disk": report.disk,
        "violation": str(report.violation) if report.violation is not None else None,
        "faults": {kind.name.lower(): _of_kind(history, kind) for kind in Kind if history.incidents_of(kind)},
        "schedule": [str(fault) for fault in report.schedule],
        "commits": len(history.commits),
        "aborted": history.aborted,
        "outer_step": history.commits[-1].outer_step if history.commits else 0,
        "digests_compared": len(history.claims),
        "participation": round(history.participation, 3),
        "contributes_again_s": _spread([_again(history, one) for one in history.incidents if one.fault.kind.kills]),
        "inner_steps_made": made,
        "inner_steps_counted": counted,
        "goodput": round(min(1.0, counted / made), 4) if made and not history.hostile else None,  # their tokens are lies
        "log_bytes": history.files[-1].log_bytes if history.files else None,
        "state_bytes": max((sample.state_bytes for sample in history.files), default=None),
        "coordinator_bytes": {"median": statistics.median(sizes), "max": max(sizes)} if sizes else None,
        "fork": asdict(report.fork) if report.fork is not None else None,
        "exit_codes": report.ended,
    }


def _of_kind(history: History, kind: Kind) -> dict[str, Any]:
    incidents = history.incidents_of(kind)
    return {
        "count": len(incidents),
        "next_commit_s": _spread([_since(history, incident, incident.began) for incident in incidents]),
        "next_commit_after_repair_s": _spread([_since(history, incident, incident.ended) for incident in incidents]),
        "contributes_again_s": _spread([_again(history, incident) for incident in incidents]),
    }


def _since(history: History, incident: Incident, t: float | None) -> float | None:
    commit = history.commit_after(t) if t is not None else None
    return commit.t - t if commit is not None and t is not None else None


def _again(history: History, incident: Incident) -> float | None:
    """Return the seconds from the repair to the first commit with the target."""
    if incident.fault.kind.of_coordinator or incident.ended is None:
        return None
    commit = history.returned(incident)
    return commit.t - incident.ended if commit is not None else None


def _spread(seconds: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in seconds if value is not None]
    return {"median": round(statistics.median(known), 2), "max": round(max(known), 2)} if known else None


def tables(report: Report) -> RenderableType:
    """Return the same as `as_json`, as tables."""
    values = as_json(report)
    columns = ("fault", "count", "next commit s", "after the repair s", "target counts again s")
    faults = Table(*columns, box=None, header_style="dim", title_justify="left")
    for kind in Kind:
        if (row := values["faults"].get(kind.name.lower())) is not None:
            times = (row["next_commit_s"], row["next_commit_after_repair_s"], row["contributes_again_s"])
            faults.add_row(str(kind), str(row["count"]), *(_median_max(spread) for spread in times))
    facts = Table(box=None, show_header=False)
    for name, text in _facts(values):
        facts.add_row(name, text)
    return Group(faults, "", facts)


def _facts(values: dict[str, Any]) -> list[tuple[str, str]]:
    memory = values["coordinator_bytes"]
    goodput = "nothing measured" if values["goodput"] is None else f"{values['goodput']:.1%}, at least"
    return [
        ("chaos", f"{values['seconds']:.0f} s, {sum(row['count'] for row in values['faults'].values())} faults"),
        ("commits", f"{values['commits']}, rounds aborted {values['aborted']}"),
        ("peers in a commit", f"{values['participation']:.2f} of {values['peers']}"),
        ("a disturbed peer counts again", _median_max(values["contributes_again_s"]) + " s (killed ones, from their restart)"),
        (
            "inner steps that counted",
            f"{goodput} ({values['inner_steps_counted']:,} of {values['inner_steps_made']:,})",
        ),
        ("digests compared", f"{values['digests_compared']:,}, all equal" if values["violation"] is None else "see above"),
        (
            "coordinator's memory",
            f"{memory['median'] / 1e6:.0f} MB median, {memory['max'] / 1e6:.0f} MB at most" if memory else "?",
        ),
        *([("fork", _fork(values["fork"]))] if values["fork"] else []),
    ]


def _fork(values: dict[str, Any]) -> str:
    found = values["found_after_s"]
    return (
        f"found by {', '.join(found) or 'nobody'}; {max(found.values(), default=0.0):.1f} s, "
        f"{values['found_after_steps']} outer steps after the peers came back"
    )


def _median_max(spread: dict[str, float] | None) -> str:
    return f"{spread['median']:.1f} median, {spread['max']:.1f} max" if spread else "-"


def swarm_tables(report: SwarmReport) -> RenderableType:
    """Return the result of a swarm's chaos as tables."""
    history = report.history
    faults = Table("fault", "count", box=None, header_style="dim", title_justify="left")
    for kind, count in sorted(report.done.items()):
        faults.add_row(str(kind), str(count))
    facts = Table(box=None, show_header=False)
    steps = ", ".join(f"part {part}: {step}" for part, step in sorted(history.reached.items()))
    back = (
        f"{statistics.median(history.recovery_s):.1f} median, {max(history.recovery_s):.1f} max" if history.recovery_s else "-"
    )
    memory = f"{statistics.median(history.memory) / 1e6:.0f} MB median, {max(history.memory) / 1e6:.0f} MB at most"
    for name, text in (
        ("chaos", f"{report.seconds:.0f} s, {report.done.total()} faults, {report.skipped} skipped"),
        ("outer steps", f"{steps}; rounds aborted {history.aborted}"),
        ("longest pause of a part", f"{max(history.pauses_s, default=0.0):.1f} s"),
        ("a disturbed member's next outer step", f"{back} s (from its repair or restart)"),
        ("digests compared", f"{history.reports:,}" + (", all equal" if report.violation is None else ", see above")),
        ("largest host's memory", memory if history.memory else "?"),
    ):
        facts.add_row(name, text)
    return Group(faults, "", facts)
