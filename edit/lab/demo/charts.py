"""Charts as SVG text: lines over inner steps, bars on a logarithmic scale, a grid of tiles.

Colours are CSS classes of the page (s0, s1, ... for series), so a chart follows the page's light or dark scheme. Every mark has
a <title>, which browsers show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "Mark", "Series", "Tile", "line_chart", "log_bars", "tile_grid"]

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 920, 46, 170, 40, 38
_LABEL_GAP = 15
_BADGE_GAP = 18


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. style: a CSS class. An empty series is left out."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at x, for an event."""

    x: float
    text: str
    tone: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar, with `text` at its end."""

    name: str
    value: float
    text: str
    style: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One cell of a grid. strength: 0 to 1, the opacity of the colour."""

    column: int
    row: int
    style: str
    strength: float
    title: str


@dataclass(frozen=True, slots=True)
class _Axes:
    """Map values to pixels; y grows upwards."""

    x_max: float
    y_min: float
    y_max: float
    height: int

    def x(self, value: float) -> float:
        return _LEFT + (value / max(self.x_max, 1e-9)) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_min) / max(self.y_max - self.y_min, 1e-9)
        return self.height - _BOTTOM - share * (self.height - _BOTTOM - _TOP)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about `count` round numbers between `low` and `high`."""
    raw = (high - low) / max(1, count)
    if raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * n, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], marks: Sequence[Mark], x_max: float, x_label: str, height: int = 320) -> str:
    """Return lines with their names at their ends. Values above 1.8 times the lowest (the steep beginning) are clipped."""
    drawn = [one for one in series if one.points]
    values = [value for one in drawn for _, value in one.points]
    if not values:
        return '<p class="quiet">Nothing was measured.</p>'
    low, high = min(values), min(max(values), 1.8 * min(values))
    margin = 0.06 * (high - low) or 0.1
    axes = _Axes(x_max, low - margin, high + margin, height)
    width, inner = _WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    body = [
        _grid(axes, x_label),
        *_flags([axes.x(mark.x) for mark in marks], marks, height - _BOTTOM),
        f'<clipPath id="c{height}"><rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{inner}"/></clipPath>',
        *(_line(axes, one, f"c{height}") for one in drawn),
        *_end_labels(axes, drawn),
    ]
    return _svg(height, "\n".join(body))


def _svg(height: int, body: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'


def _grid(axes: _Axes, x_label: str) -> str:
    right, bottom = _WIDTH - _RIGHT, axes.height - _BOTTOM
    parts = []
    for value in ticks(axes.y_min, axes.y_max):
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(0, axes.x_max):
        parts.append(f'<text class="tick" x="{axes.x(value):.1f}" y="{bottom + 17}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="tick" x="{right}" y="{bottom + 33}" text-anchor="end">{escape(x_label)}</text>')
    return "\n".join(parts)


def _flags(places: Sequence[float], marks: Sequence[Mark], bottom: float) -> list[str]:
    """Return a numbered badge and a vertical line for each mark. Badges that overlap are moved apart, lines are not."""
    drawn, free = [], 0.0
    for number, (x, mark) in enumerate(zip(places, marks, strict=True), 1):
        badge = max(x, free)
        free = badge + _BADGE_GAP
        drawn.append(
            f'<g class="mark {mark.tone}"><title>{escape(mark.text)}</title>'
            f'<path d="M{badge:.1f},{_TOP - 17} L{x:.1f},{_TOP - 4} V{bottom}"/>'
            f'<circle cx="{badge:.1f}" cy="{_TOP - 25}" r="8"/>'
            f'<text x="{badge:.1f}" y="{_TOP - 21}" text-anchor="middle">{number}</text></g>'
        )
    return drawn


def _line(axes: _Axes, series: Series, clip: str) -> str:
    path = " ".join(f"{'ML'[place > 0]}{axes.x(x):.1f},{axes.y(y):.1f}" for place, (x, y) in enumerate(series.points))
    line = f'<path class="line {series.style}" clip-path="url(#{clip})" d="{path}"><title>{escape(series.name)}</title></path>'
    if len(series.points) > 60:
        return line
    dots = "".join(
        f'<circle class="dot {series.style}" clip-path="url(#{clip})" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3">'
        f"<title>{escape(series.name)}: {y:.3f} at step {x:g}</title></circle>"
        for x, y in series.points
    )
    return line + dots


def _end_labels(axes: _Axes, series: Sequence[Series]) -> list[str]:
    """Return the names at the right, in the order of the last values, moved apart so that none covers another."""
    ends = sorted((axes.y(min(one.points[-1][1], axes.y_max)), place) for place, one in enumerate(series))
    labels, free = [], float(_TOP)
    overflow = max(0.0, len(ends) * _LABEL_GAP + ends[0][0] - axes.height)
    for y, place in ends:
        one = series[place]
        free = max(free, y - overflow)
        labels.append(
            f'<text class="label {one.style}" x="{_WIDTH - _RIGHT + 10}" y="{free + 4:.1f}">{escape(one.name)}'
            f' <tspan class="quiet">{one.points[-1][1]:.3f}</tspan></text>'
        )
        free += _LABEL_GAP
    return labels


def log_bars(bars: Sequence[Bar]) -> str:
    """Return bars on a logarithmic scale that starts at a tenth of the smallest value, with a grid line per power of ten."""
    values = [bar.value for bar in bars if bar.value > 0]
    if not values:
        return '<p class="quiet">Nothing was measured.</p>'
    low, high = math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values)))
    left, right, step = 190, _WIDTH - 130, 30
    height = 16 + step * len(bars) + 26
    scale = (right - left) / (high - low)
    parts = []
    for power in range(low, high + 1):
        x = left + (power - low) * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{height - 26}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{_power_text(power)}</text>')
    for place, bar in enumerate(bars):
        y = 16 + step * place
        width = (math.log10(bar.value) - low) * scale if bar.value > 0 else 0.0
        parts.append(f'<text class="label" x="{left - 12}" y="{y + 15}" text-anchor="end">{escape(bar.name)}</text>')
        parts.append(
            f'<rect class="bar {bar.style}" x="{left}" y="{y + 2}" width="{width:.1f}" height="18" rx="3">'
            f"<title>{escape(bar.name)}: {escape(bar.text)}</title></rect>"
        )
        parts.append(f'<text class="label" x="{left + width + 8:.1f}" y="{y + 15}">{escape(bar.text)}</text>')
    return _svg(height, "\n".join(parts))


def _power_text(power: int) -> str:
    unit = ("B", "kB", "MB", "GB", "TB")[max(0, min(4, power // 3))]
    return f"{10 ** (power - 3 * max(0, min(4, power // 3))):g} {unit}"


def tile_grid(rows: Sequence[str], columns: int, tiles: Sequence[Tile], marks: Sequence[Mark]) -> str:
    """Return a row of tiles per name and a column per round, with numbered marks above the columns."""
    left, pitch_y = 76, 24
    pitch_x = min(36.0, (_WIDTH - left - 10) / max(1, columns))
    height = _TOP + pitch_y * len(rows) + 28
    parts = []
    for place, name in enumerate(rows):
        y = _TOP + pitch_y * place
        parts.append(f'<text class="label" x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
    for tile in tiles:
        x, y, width = left + tile.column * pitch_x, _TOP + pitch_y * tile.row, max(1.0, pitch_x - 2)
        opacity = 0.25 + 0.75 * max(0.0, min(1.0, tile.strength))
        parts.append(
            f'<rect class="tile {tile.style}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{pitch_y - 4}" rx="2"'
            f' fill-opacity="{opacity:.2f}"><title>{escape(tile.title)}</title></rect>'
        )
    bottom = _TOP + pitch_y * len(rows)
    for value in ticks(1, max(2, columns)):
        x = left + (value - 0.5) * pitch_x
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    parts += _flags([left + mark.x * pitch_x for mark in marks], marks, bottom)
    return _svg(height, "\n".join(parts))
