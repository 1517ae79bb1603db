"""The results of a demo for people: report.html, one page without network or scripts, and a table for the terminal."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edit.lab.demo.results import Results
from edit.view.charts import PALETTE, Bar, Mark, Series, Tile, line_chart, log_bars, tile_grid
from edit.view.observations import Point
from edit.view.state import Event, RoundRow, RunState
from edit.view.units import bytes_text, duration_text

__all__ = [
    "headline",
    "html_table",
    "numbered_events",
    "page",
    "render_report",
    "result_rows",
    "results_table",
    "summary",
]

_SERIES_STYLES = 8
_NUMBERED_TONES = ("fault", "good", "bad")
_VERDICT_WORDS = {
    "ok": "merged (fuller: more weight)",
    "nonfinite": "rejected: NaN or infinite",
    "anomalous": "rejected: norm far above the usual",
    "outlier": "far from most of the others",
    "copied": "a copy of another one, or of the last update",
    "idle": "rejected: no work in it",
    "absent": "absent",
}


def render_report(state: RunState, results: Results, settings: str, started: float) -> str:
    """Return the page. settings: the text of run.toml; started: unix seconds."""
    return page(
        "report.html",
        run_id=escape(results.run_id),
        headline=escape(headline(results)),
        summary=escape(summary(results)),
        tiles=_tiles(results),
        validation_note=escape(_validation_note(results)),
        validation_chart=_validation_chart(state),
        events=_events(state, started),
        verdict_key=_verdict_key(),
        verdict_chart=_verdict_chart(state),
        training_chart=_training_chart(state),
        bytes_note=escape(_bytes_note(results)),
        bytes_chart=_bytes_chart(results),
        results_table=_results_table(results),
        peers_table=_peers_table(results),
        sample_note=f"Drawn from the outer parameters byte by byte, seed {results.seed}.",
        sample=escape(results.sample or "(none)"),
        settings=escape(settings.strip()),
    )


def page(name: str, **values: str) -> str:
    """Return one of this folder's pages with these values, which are HTML, in its places."""
    folder = resources.files("edit.lab.demo")
    series = " ".join(f".s{n} {{ --c: var(--s{n}); }}" for n in range(_SERIES_STYLES))
    style = f"{PALETTE}\n{series}\n{folder.joinpath('report.css').read_text(encoding='utf-8')}"
    return Template(folder.joinpath(name).read_text(encoding="utf-8")).substitute(style=style, **values)


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain texts."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def headline(results: Results) -> str:
    """Return the result in one sentence."""
    peers = "one peer" if len(results.peers) == 1 else f"{len(results.peers)} peers"
    peers += " without a coordinator" if results.swarm else ""
    if not results.complete:
        return f"Stopped after outer step {results.outer_steps}: partial results of {peers}"
    percent = results.losses.percent_below_lone if results.losses else None
    if percent is None:
        return f"{peers.capitalize()} trained one model"
    return f"{peers.capitalize()} trained one model {abs(percent):.1f} % {'better' if percent >= 0 else 'worse'} than one alone"


def summary(results: Results) -> str:
    """Return size, length and traffic of the run in two sentences."""
    fewer = f", {results.fewer_bytes:.0f} times less than data-parallel training (computed)" if results.fewer_bytes else ""
    return (
        f"A byte-level GPT of {results.parameters:,} parameters, {results.steps} inner steps per peer, exchanged every "
        f"{results.sync_every} steps over gRPC with mutual TLS. Each peer sent {bytes_text(results.mean_sent)}{fewer}."
    )


def _tiles(results: Results) -> str:
    rows: list[tuple[str, str]] = []
    if results.losses is not None:
        percent = results.losses.percent_below_lone
        rows.append((f"{results.losses.outer:.3f}", "held-out loss of the outer parameters, nats per byte"))
        if percent is not None:
            rows.append((f"{-percent:+.1f} %".replace("-", "−"), "against the same peer alone, same number of steps"))
    if results.fewer_bytes:
        rows.append((f"{results.fewer_bytes:.0f}×", "fewer bytes sent than data-parallel (computed)"))
    rows.append((f"{results.committed}", f"rounds committed, {results.aborted} aborted"))
    equal = results.digests.compared - len(results.digests.unequal)
    rows.append((f"{equal}/{results.digests.compared}", "reported digests equal to the committed ones"))
    if results.takeovers:
        slowest = max(takeover.seconds for takeover in results.takeovers)
        rows.append((f"{slowest:.1f} s", "at most, from a lost leader or owner to the next outer step of all parts"))
    if results.agreement is not None:
        same = results.agreement.members - len(results.agreement.unequal)
        rows.append((f"{same}/{results.agreement.members}", "members ended with the same outer parameters on disk"))
    rows.append((duration_text(results.wall_s), "wall time, all processes on one machine"))
    return "".join(f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in rows)


def _validation_note(results: Results) -> str:
    where = "Files of every peer's packages that no peer has trained on."
    if results.losses is None:
        return where
    return (
        f"{where} All peers start from the same values, whose loss is {results.losses.initial:.3f}. The table of results is "
        f"measured on {results.losses.windows} windows of that text, the curve on fewer of them."
    )


def _points(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(point.step, point.loss) for point in points]


def _smooth(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return the mean of each loss and up to seven before it, because the loss varies much from batch to batch."""
    return [
        (point.step, sum(one.loss for one in points[max(0, place - 7) : place + 1]) / min(8, place + 1))
        for place, point in enumerate(points)
    ]


def _validation_chart(state: RunState) -> str:
    lone = _points(state.validation.get("lone", ()))
    if len(lone) == 1:  # only the end is known: draw a short line
        lone = [(lone[0][0] * 0.97, lone[0][1]), lone[0]]
    outer = _points(state.validation.get("outer", ()))
    series = [Series("outer parameters", "s0", outer), Series("peer-0 alone", "lone", lone)]
    longest = max((x for x, _ in lone), default=0.0)
    return line_chart(series, _marks(state), max(longest, _last_step(state)), "inner steps", height=340)


def _training_chart(state: RunState) -> str:
    rows = list(state.peers.values())[:_SERIES_STYLES]
    series = [Series(row.peer_id, f"s{place}", _smooth(row.curve)) for place, row in enumerate(rows)]
    series.append(Series("peer-0 alone", "lone", _smooth(state.lone)))
    longest = max((x for one in series for x, _ in one.points), default=0.0)
    return line_chart(series, (), max(longest, _last_step(state)), "own inner steps", height=300)


def _last_step(state: RunState) -> float:
    return float(state.outer_steps * state.sync_every)


def numbered_events(state: RunState) -> list[Event]:
    """Return the events that the charts number: the faults, and how each was overcome."""
    return [event for event in state.events if event.tone in _NUMBERED_TONES]


def _progress_at(rows: Sequence[RoundRow], t: float) -> float:
    """Return the outer steps committed at `t`, with the elapsed share of the open round."""
    times = [row.t for row in rows]
    done = bisect.bisect_right(times, t)
    if done == 0 or done == len(rows):
        return float(rows[done - 1].outer_step) if done else 0.0
    return rows[done - 1].outer_step + min(0.95, (t - times[done - 1]) / max(1e-6, times[done] - times[done - 1]))


def _marks(state: RunState) -> list[Mark]:
    rows = [row for row in state.rounds if row.committed]
    return [Mark(_progress_at(rows, event.t) * state.sync_every, event.text, event.tone) for event in numbered_events(state)]


def _verdict_chart(state: RunState) -> str:
    rows = [row for row in state.rounds if row.committed]
    names = list(state.peers)
    full = 2.0 / max(1, len(names))  # twice the fair share gets the strongest colour
    tiles = [_tile(row, column, place, name, full) for column, row in enumerate(rows) for place, name in enumerate(names)]
    return tile_grid(
        names, max(len(rows), 1), tiles, [Mark(_progress_at(rows, e.t), e.text, e.tone) for e in numbered_events(state)]
    )


def _tile(row: RoundRow, column: int, place: int, name: str, full: float) -> Tile:
    cell = row.cells.get(name)
    if cell is None:
        return Tile(column, place, "absent", 1.0, f"{name}, outer step {row.outer_step}: absent ({row.reason})")
    title = f"{name}, outer step {row.outer_step}: {cell.verdict}, weight {cell.weight:.3f}, norm {cell.norm:.3g}"
    return Tile(column, place, cell.verdict, cell.weight / full if cell.verdict == "ok" else 1.0, title)


def _verdict_key() -> str:
    colours = {
        "ok": "good",
        "nonfinite": "bad",
        "anomalous": "fault",
        "copied": "fault",
        "outlier": "idle",
        "idle": "idle",
        "absent": "rule",
    }
    keys = (f'<i style="background:var(--{colours[name]})"></i>{escape(text)}' for name, text in _VERDICT_WORDS.items())
    return f"One column per committed round.{''.join(keys)}"


def _events(state: RunState, started: float) -> str:
    numbers = {id(event): number for number, event in enumerate(numbered_events(state), 1)}
    items = []
    for event in state.events:
        badge = f'<b class="{event.tone}">{numbers[id(event)]}</b>' if id(event) in numbers else "<b></b>"
        items.append(f"<li><time>{duration_text(event.t - started)}</time>{badge}<span>{escape(event.text)}</span></li>")
    return f'<ol class="events">{"".join(items)}</ol>'


def _bytes_note(results: Results) -> str:
    return (
        "Counted on each peer's data connection, over all its processes. Data-parallel is COMPUTED: a ring all-reduce of fp32 "
        f"gradients in each of the same {results.steps} steps. Logarithmic scale."
    )


def _bytes_chart(results: Results) -> str:
    bars = [Bar(peer.peer_id, peer.sent, bytes_text(peer.sent), f"s{n % 8}") for n, peer in enumerate(results.peers)]
    computed = results.data_parallel_bytes
    return log_bars([*bars, Bar("data-parallel (computed)", computed, bytes_text(computed), "lone")])


def _results_table(results: Results) -> str:
    return html_table(("", "value", "how"), [(name, value, how) for name, value, how in result_rows(results)])


def result_rows(results: Results) -> list[tuple[str, str, str]]:
    """Return (name, value, how it was obtained) of every result."""
    rows: list[tuple[str, str, str]] = []
    if results.losses is not None:
        rows.append(("held-out loss, initial parameters", f"{results.losses.initial:.4f}", "measured"))
        if results.losses.lone is not None:
            rows.append(("held-out loss, peer-0 alone", f"{results.losses.lone:.4f}", "measured"))
        rows.append(("held-out loss, outer parameters", f"{results.losses.outer:.4f}", "measured"))
        if results.losses.percent_below_lone is not None:
            rows.append(("outer below alone", f"{results.losses.percent_below_lone:.1f} %", "measured"))
    own = [peer.own_steps for peer in results.peers]
    rows.append(("own inner steps, peers", f"{min(own)} to {max(own)}", "counted"))
    if results.lone_steps:
        rows.append(("own inner steps, peer-0 alone", str(results.lone_steps), "counted"))
    received = sum(peer.received for peer in results.peers) / len(results.peers)
    rows.append(("sent per peer", bytes_text(results.mean_sent), "counted, mean"))
    rows.append(("received per peer", bytes_text(received), "counted, mean"))
    rows.append(("data-parallel would send per peer", bytes_text(results.data_parallel_bytes), "computed"))
    rows.append(("rounds committed / aborted", f"{results.committed} / {results.aborted}", "measured"))
    rows.append(("seconds per round", f"{results.round_s:.2f}", "measured, median"))
    checked = f"{results.digests.compared - len(results.digests.unequal)} of {results.digests.compared}"
    rows.append(("peers' digests equal to the committed", checked, f"reported, {results.digests.outer_steps} outer steps"))
    if results.restart is not None:
        same = "unchanged" if results.restart.equal else "CHANGED"
        rows.append(("digest over the coordinator's restart", same, f"measured, outer step {results.restart.outer_step}"))
    for takeover in results.takeovers:
        how, _, does = takeover.what.partition(", which ")
        rows.append((f"outer step after {how.replace(' to ', ' of ')}", f"{takeover.seconds:.1f} s", f"measured; it {does}"))
    if results.agreement is not None:
        members = results.agreement.members - len(results.agreement.unequal)
        why = "; ".join(results.agreement.unequal) or f"measured on disk, outer step {results.agreement.outer_step}"
        rows.append(("members with the same outer parameters", f"{members} of {results.agreement.members}", why))
    if results.coordinator_memory_bytes:
        rows.append(("coordinator's peak memory", bytes_text(results.coordinator_memory_bytes), "measured"))
    rows.append(("wall time", duration_text(results.wall_s), "measured"))
    return rows


def _peers_table(results: Results) -> str:
    head = ("peer", "own inner steps", "sent", "received", "merged", "mean weight", "rejected", "verdicts")
    rows = []
    for peer in results.peers:
        bad = sum(count for verdict, count in peer.verdicts.items() if verdict != "ok")
        words = ", ".join(f"{verdict} {count}" for verdict, count in sorted(peer.verdicts.items()))
        traffic = (bytes_text(peer.sent), bytes_text(peer.received))
        rows.append(
            (peer.peer_id, str(peer.own_steps), *traffic, str(peer.merged), f"{100 * peer.weight:.1f} %", str(bad), words)
        )
    return html_table(head, rows)


def results_table(results: Results) -> RenderableType:
    """Return the results for the terminal: headline, every number, the first lines of the sample."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", pad_edge=False)
    table.add_column("result", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True, style="bold")
    table.add_column("how", style="dim", overflow="fold")
    for row in result_rows(results):
        table.add_row(*row)
    sections: list[RenderableType] = [
        Text(headline(results), style="bold green" if results.complete else "bold yellow"),
        table,
    ]
    if results.sample:
        sections += [Text("\nthe outer parameters write:", style="dim"), Text("\n".join(results.sample.splitlines()[:8]))]
    return Group(*sections)
