"""Numbers as text: bytes in decimal units, durations in minutes and seconds, curves as one line of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edit.view.observations import Point

__all__ = ["bytes_text", "duration_text", "loss_text", "resample", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"


def bytes_text(count: float) -> str:
    """1234567 -> '1.2 MB'. Decimal units, as network links are rated."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.{1 if count < 99.95 * size else 0}f} {unit}"
    return f"{count:.0f} B"


def duration_text(seconds: float) -> str:
    """83.2 -> '1:23'."""
    whole = max(0, int(seconds))
    hours = f"{whole // 3600}:" if whole >= 3600 else ""
    return f"{hours}{whole // 60 % 60:{'02' if hours else ''}}:{whole % 60:02}"


def loss_text(loss: float) -> str:
    """2.5 -> '2.500'; one of many digits, as a diverged peer's, in few: 1e300 -> '1e+300'."""
    return f"{loss:.3f}" if abs(loss) < 1e6 else f"{loss:.3g}"


def resample(points: Sequence[Point], bins: int, last_step: int) -> list[float]:
    """Return the mean loss in each of `bins` equal parts of 0 .. last_step; NaN where there is no point."""
    sums = [[0.0, 0] for _ in range(bins)]
    for point in points:
        place = sums[min(bins - 1, max(0, point.step * bins // max(1, last_step)))]
        place[0] += point.loss
        place[1] += 1
    return [total / count if count else math.nan for total, count in sums]


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return one block per value and a space for NaN, scaled from `low` to `high`, so that several lines can be compared."""
    span = max(high - low, 1e-9)
    return "".join(
        " " if math.isnan(value) else _BLOCKS[round(min(7.0, max(0.0, (value - low) / span * 7)))] for value in values
    )
