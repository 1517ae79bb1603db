"""The rows of a comparison as a table, as a picture of loss against bytes, and as curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from edit.lab.bench.results import Row, figure_note, results_table
from edit.lab.compare.intervals import half_width, mean_text
from edit.view.charts import Point, Series, curves_picture, points_picture

__all__ = ["comparison_table", "curves", "gaps", "loss_against_bytes"]

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


def gaps(rows: Sequence[Row], name: str, base: str) -> list[float]:
    """Return by how much the loss of `name` is above that of `base` with the same seed, in nats, where both are known."""
    losses = {(row["method"], row["seed"]): row["loss"] for row in rows}
    seeds = sorted(seed for method, seed in losses if method == name)
    pairs = [(losses[name, seed], losses.get((base, seed))) for seed in seeds]
    return [loss - other for loss, other in pairs if loss is not None and other is not None]


def comparison_table(rows: Sequence[Row], names: Sequence[str], base: str) -> Table:
    """Return the table, a row for each method, in the order of the names. base: the method that gaps are to; "": none."""
    shown = [_cells(rows, name, base) for name in names if any(row["method"] == name for row in rows)]
    first = rows[0]
    title = f"{first['peers']} peers, {first['steps']} steps each, {first['parameters']:,} parameters"
    note = (
        "loss: nats per byte of the outer parameters on held-out text; gap: to "
        f"{base or 'nothing'}, same seed; +-: 95 % interval.\n"
        "MB of one peer in the run; bits per parameter and exchange; peak: bytes sent per parameter within one inner step;\n"
        f"time: inner steps of a peer that is not slowed down, without the network.\n{figure_note(rows)}"
    )
    return results_table(title, _HEAD, shown, note)


def _cells(rows: Sequence[Row], name: str, base: str) -> tuple[str, ...]:
    mine = [row for row in rows if row["method"] == name]
    losses = [row["loss"] for row in mine]
    gap = gaps(rows, name, base) if base and base != name else []
    known = {row["seed"]: row["loss"] for row in rows if row["method"] == base}
    shares = [100 * (row["loss"] / known[row["seed"]] - 1) for row in mine if row["loss"] and known.get(row["seed"])]
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


def loss_against_bytes(rows: Sequence[Row], names: Sequence[str], base: str) -> str:
    """Return an SVG file: each method's gap to `base` over the bytes that a peer sends in the run, for each parameter."""
    points = []
    for i, name in enumerate(names):
        mine = [row for row in rows if row["method"] == name and row["sent"] and row["loss"] is not None]
        values = gaps(rows, name, base) if base else [row["loss"] for row in mine]
        if mine and values:
            half = half_width(values)
            x = statistics.fmean(row["sent"] / row["parameters"] for row in mine)
            points.append(Point(name, x, statistics.fmean(values), 0.0 if math.isnan(half) else half, f"s{i % 6}"))
    of = f"above {base}" if base else "in nats per byte"
    notes = [f"Loss on held-out text, {of}; mean over the seeds and 95 % interval.", figure_note(rows)]
    return points_picture("Loss against bytes", notes, points, "bytes sent per parameter", "gap", {}, {}, linear=0.01)


def curves(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return an SVG file: the loss of each method in the course of the run, the mean over its seeds."""
    drawn = []
    for i, name in enumerate(names):
        mine: Sequence[Mapping[str, Any]] = [row for row in rows if row["method"] == name]
        points: dict[int, list[float]] = {}
        for row in mine:
            for step, loss in row["curve"]:
                if loss is not None:
                    points.setdefault(step, []).append(loss)
        means = [(float(step), statistics.fmean(values)) for step, values in sorted(points.items())]
        drawn.append(Series(name, f"s{i % 8}", means))
    notes = [
        "Nats per byte of the outer parameters on held-out text, over inner steps; mean over the seeds.",
        figure_note(rows),
    ]
    return curves_picture("Loss in the course of the run", notes, drawn, "inner steps")
