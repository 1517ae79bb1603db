"""`status` and `members`: how a run stands, as tables for terminals of any width."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from edit.plain_text import parse_json, printable
from editpb.run_status import MemberStatus, RunStatus
from editpb.validity import SOON_S, VERY_SOON_S, duration

__all__ = ["draining", "print_members", "print_status"]


def print_status(console: Console, run: RunStatus, rounds: int) -> None:
    """Print how the run stands, with its members and so many of its last rounds."""
    _print_headline(console, _words(run.run_id, "bold"), run)
    for one in run.aggregators:
        _print_headline(console, Text(f"aggregator {one.aggregator}"), one)
    print_members(console, run.members)
    headers = ("round", "outer step", "result", "reason", "s", "MB in", "MB out")
    table = Table(*(Column(header, overflow="fold") for header in headers), box=None, header_style="dim")  # never cut
    for report in run.rounds[-rounds:] if rounds else ():
        table.add_row(
            str(report.number),
            str(report.outer_step),
            Text("committed", "green") if report.committed else Text("aborted", "yellow"),
            _words(report.reason),
            f"{report.seconds:.1f}",
            f"{report.bytes_in / 1e6:.2f}",
            f"{report.bytes_out / 1e6:.2f}",
        )
    if table.row_count:
        console.print(table)
    if rounds and (last := next((report for report in reversed(run.rounds) if report.committed and report.every), None)):
        values = f"H {last.every}, batch {last.batch}, outer lr {last.outer_lr:g}, outer momentum {last.outer_momentum:g}"
        console.print(Text(f"outer step {last.outer_step} was taken with {values}"), soft_wrap=True)


def draining(run: RunStatus) -> str:
    """Return, in words, where a drain ends the run; '': it was not drained, or has ended."""
    if not run.draining or run.phase == "finished":
        return ""
    return f"draining to outer step {run.last_step}" if run.last_step else "draining"


def _words(text: str, style: str = "") -> Text:
    """Return what a member or a coordinator wrote, as it stands: no markup, nothing that a terminal would obey."""
    return Text(printable(text), style)


def _print_headline(console: Console, who: Text, run: RunStatus) -> None:
    facts = [
        run.phase,
        f"outer step {run.outer_step} of {run.outer_steps}",
        f"{run.parameters:,} parameters" if run.parameters else "",
        f"digest {run.digest[:12]}" if run.digest else "",
        draining(run),
    ]
    rows = [who]
    for fact in filter(None, facts):  # a fact is never cut: one for which a narrow terminal has no room begins a line
        if rows[-1].cell_len + 2 + len(fact) > console.width:
            rows.append(Text(""))
        rows[-1] += _words(f"  {fact}")
    for row in rows:
        console.print(row, soft_wrap=True)
    if chosen := _chosen(run):
        console.print(_words(f"outer.preset = auto chose {chosen}"), soft_wrap=True)
    if private := _privacy(run):
        console.print(_words(private), soft_wrap=True)
    if masked := _masked(run):
        console.print(_words(masked), soft_wrap=True)
    if run.audit:
        console.print(_words(f"audit log: {run.audit}"), soft_wrap=True)
    if run.waiting_for:
        console.print(_words(f"waiting for {run.waiting_for}"), soft_wrap=True)
    for line in (run.reason, run.governance, *run.warnings):
        if line:
            console.print(_words(line, "yellow"), soft_wrap=True)


def _chosen(run: RunStatus) -> str:
    """Return what `outer.preset = auto` chose, as the settings have it; empty: nothing."""
    value = next((each.value for each in run.settings if each.name == "outer.chosen"), "")
    try:
        chosen = parse_json(value)
    except ValueError:
        return ""
    return chosen if isinstance(chosen, str) else ""


def _privacy(run: RunStatus) -> str:
    """Return the run's differential privacy, and what it has spent, or each member says that it has where that may be seen."""
    if run.privacy:
        return f"privacy: {run.privacy}"
    said = {
        each.name.removeprefix("privacy."): each.value.strip('"') for each in run.settings if each.name.startswith("privacy.")
    }
    if said.get("level") != "example":
        return ""
    spent = [f"{row.peer_id} {row.metrics['epsilon']:.3g}" for row in run.members if "epsilon" in row.metrics]
    most = f"eps at most {said.get('epsilon_max', '?')} for each peer at delta {said.get('delta', '?')}"
    now = f"; now {', '.join(spent)}" if spent else ""
    return f"privacy: example-level, unit {said.get('unit', '?')}, {most}{now}"


def _masked(run: RunStatus) -> str:
    """Return how the run keeps contributions from its operator."""
    said = {each.name: each.value for each in run.settings if each.name.startswith("secagg.")}
    if said.get("secagg.enabled") != "true":
        return ""
    now = f"; {run.masks}" if run.masks else ""
    return f"secure aggregation: sums of at least {said.get('secagg.min_peers', '?')} peers{now}"


# The columns of `members`: header, what its cell says, and how early a terminal that is too narrow leaves it out (0: never).
_COLUMNS: tuple[tuple[str, Callable[[MemberStatus], Text], int], ...] = (
    ("member", lambda row: _words(row.peer_id), 0),
    ("role", lambda row: _words(row.role), 6),
    ("state", lambda row: _words(row.state), 0),
    ("reason", lambda row: _words(row.reason), 5),
    ("phase", lambda row: _words(_phase(row)), 1),
    ("uploaded", lambda row: Text(_uploaded(row)), 4),
    ("outer", lambda row: Text(str(row.outer_step)), 1),
    ("steps", lambda row: Text(str(row.inner_steps)), 8),
    ("loss", lambda row: Text(f"{row.loss:.3g}" if math.isfinite(row.loss) else ""), 2),
    ("tok/s", lambda row: Text(f"{row.tokens_per_s:.3g}" if row.tokens_per_s else ""), 7),
    ("in", lambda row: Text(str(row.contributions)), 2),
    ("out", lambda row: Text(str(row.rejections)), 2),
    ("absent", lambda row: Text(str(row.absences)), 3),
    ("consent", lambda row: Text("yes" if row.consented else ""), 8),
    ("certificate", lambda row: _certificate(row.expires, time.time()), 9),
)


def print_members(console: Console, rows: Sequence[MemberStatus]) -> None:
    """Print a line for each member with as many columns as fit, and what else is wrong with any of them."""
    cells = {header: [cell(row) for row in rows] for header, cell, _ in _COLUMNS}
    width = {header: max((text.cell_len for text in column), default=0) for header, column in cells.items()}
    shown = [column for column in _COLUMNS if width[column[0]]]  # what says nothing of anybody needs no room
    gap = 2
    while sum(max(width[header], len(header)) + gap for header, _, _ in shown) - gap > console.width and any(
        c[2] for c in shown
    ):
        shown.remove(max(shown, key=lambda column: column[2]))
    headers = [header for header, _, _ in shown]
    columns = (Column(header, overflow="fold") for header in headers)  # never cut
    table = Table(*columns, box=None, header_style="dim", pad_edge=False, padding=(0, gap, 0, 0))
    for i in range(len(rows)):
        table.add_row(*(cells[header][i] for header in headers))
    console.print(table)
    hidden = [header for header, _, _ in _COLUMNS if width[header] and header not in headers]
    for row in rows:
        if "reason" in hidden and row.state in ("lost", "left", "evicted"):
            console.print(_words(f"{row.peer_id} is {row.state}: {row.reason}"), soft_wrap=True)
        if "certificate" in hidden and row.expires and row.expires - time.time() < SOON_S:
            console.print(_words(f"{row.peer_id}'s certificate: ") + _certificate(row.expires, time.time()), soft_wrap=True)
    if hidden:
        console.print(
            Text(f"not shown, because the terminal is too narrow: {', '.join(hidden)} (--json has all)", "dim"), soft_wrap=True
        )


def _phase(row: MemberStatus) -> str:
    """Return the phase, and whether rounds wait for this member."""
    if row.quarantined_s > 0:
        return f"quarantined for {row.quarantined_s:.0f} s"
    return f"{row.phase}, optional" if row.optional else row.phase


def _certificate(expires: float, now: float) -> Text:
    """Return how long a member's certificate is still valid; empty where that is not known."""
    if not expires:
        return Text("")
    left = expires - now
    style = "" if left > SOON_S else "yellow" if left > VERY_SOON_S else "red"
    return Text(duration(left) if left > 0 else "expired", style)


def _uploaded(row: MemberStatus) -> str:
    """Return `3.1 of 12.0 MB` for a contribution that is being uploaded, else nothing."""
    return f"{row.upload_bytes / 1e6:.1f} of {row.upload_total_bytes / 1e6:.1f} MB" if row.upload_total_bytes else ""
