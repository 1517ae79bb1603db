"""The rows of a comparison as a table, as a picture of loss against bytes, and as curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from edit.lab.bench.results import Row, figure_note, results_table
from edit.lab.compare.intervals import half_width, mean_text
from edit.lab.compare.method import Length
from edit.view.charts import Point, Series, curves_picture, points_picture

__all__ = ["comparison_table", "curves", "gaps", "grid_table", "loss_against_bytes"]

_HEAD = (
    "method",
    "seeds",
    "loss",
    "gap",
    "gap, %",
    "spike, %",
    "MB sent",
    "MB received",
    "bits up",
    "bits down",
    "peak",
    "time",
)
_NOT_OF_AVERAGES = ("",) * (len(_HEAD) - 5)


def gaps(rows: Sequence[Row], name: str, base: str, loss: str = "loss") -> list[float]:
    """Return by how much the loss of `name` is above that of `base` with the same seed, in nats, where both are known.

    loss: "loss_averaged" for that of the method's averaged parameters.
    """
    mine = {row["seed"]: row.get(loss) for row in rows if row["method"] == name}
    known = {row["seed"]: row["loss"] for row in rows if row["method"] == base}
    pairs = [(value, known.get(seed)) for seed, value in sorted(mine.items())]
    return [value - other for value, other in pairs if value is not None and other is not None]


def comparison_table(rows: Sequence[Row], names: Sequence[str], base: str) -> Table:
    """Return the table, a row for each method, in the order of the names; a second one for the average of its parameters.

    base: the method that gaps are to; "": none.
    """
    shown = [cells for name in names for cells in _lines(rows, name, base)]
    first = rows[0]
    title = f"{first['peers']} peers, {first['steps']} steps each, {first['parameters']:,} parameters"
    note = (
        "loss: nats per byte of the outer parameters on held-out text; gap: to "
        f"{base or 'nothing'}, same seed; +-: 95 % interval.\n"
        "MB of one peer in the run; bits per parameter and exchange; peak: bytes sent per parameter within one inner step;\n"
        f"time: inner steps of a peer that is not slowed down, without the network.\n{figure_note(rows)}"
    )
    return results_table(title, _HEAD, shown, note)


def grid_table(cells: Sequence[tuple[Length, Sequence[Row]]], names: Sequence[str], base: str, seeds: int) -> Table:
    """Return the table of several numbers of peers and H: a row for each method and number of peers, a column for each H.

    cells: the rows of each pair; seeds: how many trials a full cell has. A cell has the mean gap to `base` with
    its 95 % interval; the base itself, and everything without a base, has the mean loss.
    """
    peers, every = (list(dict.fromkeys(values)) for values in zip(*((one.peers, one.every) for one, _ in cells), strict=True))
    found = {(length.peers, length.every): rows for length, rows in cells}
    shown: list[tuple[str, ...]] = []
    for name in names:
        for loss in ("loss", "loss_averaged"):
            for count in peers:
                texts = [_grid_cell(found[count, h], name, base, loss, seeds) for h in every]
                if any(texts):
                    shown.append((name if loss == "loss" else f"{name}, averaged", str(count), *texts))
    rows = [row for _, those in cells for row in those]
    note = (
        f"gap to {base}, same seed and as many peers, and its 95 % interval; of {base} itself the loss.\n"
        if base
        else "loss and its 95 % interval.\n"
    )
    note += f"Nats per byte on held-out text; (n): fewer seeds than {seeds}.\n{figure_note(rows)}"
    title = f"{rows[0]['steps']} steps of each peer, {rows[0]['parameters']:,} parameters"
    return results_table(title, ("method", "peers", *(f"H {h}" for h in every)), shown, note)


def _grid_cell(rows: Sequence[Row], name: str, base: str, loss: str, seeds: int) -> str:
    losses = [row.get(loss) for row in rows if row["method"] == name]
    if loss == "loss" and None in losses:
        return "diverged"
    is_gap = bool(base) and base != name
    values = gaps(rows, name, base, loss) if is_gap else [value for value in losses if value is not None]
    few = f" ({len(values)})" if 0 < len(values) < seeds else ""
    return mean_text(values, "+.4f" if is_gap else ".4f") + few


def _lines(rows: Sequence[Row], name: str, base: str) -> list[tuple[str, ...]]:
    mine = [row for row in rows if row["method"] == name]
    if not mine:
        return []
    lines = [_cells(rows, name, base, "loss")]
    if all(row.get("loss_averaged") is not None for row in mine):
        lines.append((f"{name}, averaged", *_cells(rows, name, base, "loss_averaged")[1:5], *_NOT_OF_AVERAGES))
    return lines


def _cells(rows: Sequence[Row], name: str, base: str, loss: str) -> tuple[str, ...]:
    mine = [row for row in rows if row["method"] == name]
    losses = [row[loss] for row in mine]
    gap = gaps(rows, name, base, loss) if base and base != name and None not in losses else []
    known = {row["seed"]: row["loss"] for row in rows if row["method"] == base}
    shares = [100 * (row[loss] / known[row["seed"]] - 1) for row in mine if row[loss] and known.get(row["seed"])]
    spikes = [row["spike"] for row in mine]

    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in mine)

    return (
        name,
        str(len(mine)),
        "diverged" if None in losses else f"{statistics.fmean(losses):.4f}",
        mean_text(gap, "+.4f"),
        mean_text(shares, "+.2f") if gap else "",
        "diverged" if None in spikes else f"{100 * max(spikes):.1f}",
        f"{mean('sent') / 1e6:.2f}",
        f"{mean('received') / 1e6:.2f}",
        f"{mean('bits_up'):.2f}",
        f"{mean('bits_down'):.2f}",
        f"{mean('peak'):.3f}",
        f"{mean('virtual_s'):.0f}",
    )


def loss_against_bytes(cells: Sequence[tuple[Length, Sequence[Row]]], names: Sequence[str], base: str) -> str:
    """Return an SVG file: each method's gap to `base` over the bytes that a peer sends in the run, for each parameter.

    cells: the rows of each number of peers and H. With several a point is named by these, and its colour says the method, as
    far as there are colours.
    """
    several, coloured = len(cells) > 1, len(names) <= 6
    points, key, diverged = [], {}, list[str]()
    drawn: set[tuple[str, str]] = set()
    for length, rows in cells:
        for i, name in enumerate(names):
            mine = [row for row in rows if row["method"] == name and row["sent"]]
            where = f"{length.peers} x H {mine[0].get('every', length.every) if mine else length.every}"
            if (name, where) in drawn or (several and name == base):
                continue
            drawn.add((name, where))  # else a method with an H of its own would be there for each other one
            if lost := sum(row["loss"] is None for row in mine):
                diverged.append(f"{name}{f', {where}' if several else ''} ({lost} of {len(mine)} seeds)")
                continue
            values = gaps(rows, name, base) if base else [row["loss"] for row in mine]
            if not mine or not values:
                continue
            half = half_width(values)
            x = statistics.fmean(row["sent"] / row["parameters"] for row in mine)
            label = name if not several else where if coloured else f"{name}, {where}"
            points.append(Point(label, x, statistics.fmean(values), 0.0 if math.isnan(half) else half, f"s{i % 6}"))
            if several and coloured:
                key[f"s{i}"] = name
    of = f"above {base}" if base else "in nats per byte"
    what = f"Loss on held-out text, {of}; mean over the seeds and 95 % interval" + (", peers x H." if several else ".")
    notes = [what, figure_note([row for _, rows in cells for row in rows])]
    if diverged:
        notes.append(f"Diverged, so without a point: {'; '.join(diverged)}.")
    return points_picture("Loss against bytes", notes, points, "bytes sent per parameter", "gap", key, {}, linear=0.01)


def curves(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return an SVG file: the loss of each method in the course of the run, the mean over its seeds, until one diverges."""
    drawn = []
    for i, name in enumerate(names):
        mine: Sequence[Mapping[str, Any]] = [row for row in rows if row["method"] == name]
        points: dict[int, list[float]] = {}
        ends = min((step for row in mine for step, loss in row["curve"] if loss is None), default=math.inf)
        for row in mine:
            for step, loss in row["curve"]:
                if step < ends:
                    points.setdefault(step, []).append(loss)
        means = [(float(step), statistics.fmean(values)) for step, values in sorted(points.items())]
        diverged = ends < math.inf or any(row["loss"] is None for row in mine)
        drawn.append(Series(f"{name} (diverged)" if diverged else name, f"s{i % 8}", means))
    notes = [
        "Nats per byte of the outer parameters on held-out text, over inner steps; mean over the seeds.",
        figure_note(rows),
    ]
    if nowhere := [one.name for one in drawn if not one.points]:
        notes.append(f"Without a point: {', '.join(nowhere)}.")
    return curves_picture("Loss in the course of the run", notes, drawn, "inner steps")
