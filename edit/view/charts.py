"""Charts as SVG text: lines over inner steps, bars on a logarithmic scale, a grid of tiles, groups of bars, points.

Colours are CSS classes (s0, s1, ... for series), so a chart follows the light or dark scheme of its page; `bars_picture` and
`points_picture` are files of their own and bring them along. Every mark has a <title>, which browsers show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import ClassVar

__all__ = [
    "PALETTE",
    "Bar",
    "Group",
    "Mark",
    "Part",
    "PartedBar",
    "Point",
    "Series",
    "Tile",
    "bars_picture",
    "curves_picture",
    "line_chart",
    "log_bars",
    "points_picture",
    "tile_grid",
]

# Colours by name, for pages in light and in dark. s0 ... s7: series.
# fmt: off
_LIGHT = {
    "page": "#f6f7f9", "card": "#ffffff", "ink": "#16202c", "quiet": "#64707d", "rule": "#dfe4ea", "accent": "#0b6bcb",
    "good": "#1a7f4b", "fault": "#b35c00", "bad": "#c62f3b", "idle": "#8a6d00", "s0": "#0b6bcb", "s1": "#c2620a",
    "s2": "#1a7f4b", "s3": "#8b44ac", "s4": "#b0272f", "s5": "#0a7e8c", "s6": "#6b6f10", "s7": "#a0336f",
}
_DARK = {
    "page": "#0f141a", "card": "#171e26", "ink": "#e6ebf0", "quiet": "#95a2b0", "rule": "#2b3541", "accent": "#5aa9f5",
    "good": "#45c486", "fault": "#f0a04b", "bad": "#f2717b", "idle": "#d8b93c", "s0": "#5aa9f5", "s1": "#f0a04b",
    "s2": "#45c486", "s3": "#c58be0", "s4": "#f2717b", "s5": "#4cc6d3", "s6": "#c3c752", "s7": "#e788b8",
}
# fmt: on


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


PALETTE = f""":root {{ color-scheme: light dark; {_variables(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}"""
"""The colours as CSS variables of a page."""

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
    right: float = _WIDTH - _RIGHT  # of the plot

    def x(self, value: float) -> float:
        return _LEFT + (value / max(self.x_max, 1e-9)) * (self.right - _LEFT)

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
    """Return lines with their names at their ends, without what is above 1.8 times the lowest value (the steep beginning)."""
    drawn = [one for one in series if one.points]
    values = [value for one in drawn for _, value in one.points]
    if not values:
        return '<p class="quiet">Nothing was measured.</p>'
    return _svg(height, _lines(drawn, marks, x_max, x_label, height))


def _lines(drawn: Sequence[Series], marks: Sequence[Mark], x_max: float, x_label: str, height: int) -> str:
    values = [value for one in drawn for _, value in one.points]
    low, high = min(values), min(max(values), 1.8 * min(values))
    margin = 0.06 * (high - low) or 0.1
    longest = max(len(f"{one.name} {one.points[-1][1]:.3f}") for one in drawn)
    room = max(_RIGHT, 36 + math.ceil(_LABEL_CHAR * longest))  # for the names at the ends of the lines
    axes = _Axes(x_max, low - margin, high + margin, height, _WIDTH - room)
    body = [
        _grid(axes, x_label),
        *_flags([axes.x(mark.x) for mark in marks], marks, height - _BOTTOM),
        *(_line(axes, one) for one in drawn),
        *_end_labels(axes, drawn),
    ]
    return "\n".join(body)


def _svg(height: int, body: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'


def _grid(axes: _Axes, x_label: str) -> str:
    right, bottom = axes.right, axes.height - _BOTTOM
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
    drawn, order = [], sorted(range(len(places)), key=lambda place: places[place])
    moved = _apart([places[place] for place in order], _BADGE_GAP, 10.0, _WIDTH - 10.0)
    badges = dict(zip(order, moved, strict=True))
    for number, (x, mark) in enumerate(zip(places, marks, strict=True), 1):
        badge = badges[number - 1]
        drawn.append(
            f'<g class="mark {mark.tone}"><title>{escape(mark.text)}</title>'
            f'<path d="M{badge:.1f},{_TOP - 17} L{x:.1f},{_TOP - 4} V{bottom}"/>'
            f'<circle cx="{badge:.1f}" cy="{_TOP - 25}" r="8"/>'
            f'<text x="{badge:.1f}" y="{_TOP - 21}" text-anchor="middle">{number}</text></g>'
        )
    return drawn


def _line(axes: _Axes, series: Series) -> str:
    """Return a line as far as it lies in the plot, and its points, where they are few."""
    path = " ".join(
        f"{'ML'[place > 0]}{axes.x(x):.1f},{axes.y(y):.1f}"
        for part in _below(series.points, axes.y_max)
        for place, (x, y) in enumerate(part)
    )
    line = f'<path class="line {series.style}" d="{path}"><title>{escape(series.name)}</title></path>'
    if len(series.points) > 60:
        return line
    dots = "".join(
        f'<circle class="dot {series.style}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3">'
        f"<title>{escape(series.name)}: {y:.3f} at step {x:g}</title></circle>"
        for x, y in series.points
        if y <= axes.y_max
    )
    return line + dots


def _below(points: Sequence[tuple[float, float]], top: float) -> list[list[tuple[float, float]]]:
    """Return the parts of a line that are not above `top`: each begins and ends there, or where the line does."""
    parts: list[list[tuple[float, float]]] = []
    before: tuple[float, float] | None = None
    for x, y in points:
        inside = y <= top
        if before is not None and inside != (before[1] <= top):
            crossing = before[0] + (x - before[0]) * (top - before[1]) / (y - before[1])
            if inside:
                parts.append([(crossing, top)])
            else:
                parts[-1].append((crossing, top))
        elif inside and before is None:
            parts.append([])
        if inside:
            parts[-1].append((x, y))
        before = x, y
    return parts


def _apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places, which ascend, moved so that each is at least `gap` after the one before, between `low` and `high`.

    Where there is no room for that, the gap is smaller.
    """
    gap = min(gap, (high - low) / max(1, len(places) - 1))
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap if moved else low))
    limit = high
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def _end_labels(axes: _Axes, series: Sequence[Series]) -> list[str]:
    """Return the names at the right, each behind its colour, in the order of the last values; none over another or a tick."""
    ends = sorted((axes.y(min(one.points[-1][1], axes.y_max)), place) for place, one in enumerate(series))
    heights = _apart([y for y, _ in ends], _LABEL_GAP, _TOP, axes.height - _BOTTOM - 4)
    labels, left = [], axes.right + 10
    for y, (_, place) in zip(heights, ends, strict=True):
        one = series[place]
        labels.append(
            f'<path class="line {one.style} key" d="M{left},{y:.1f} h16"/>'
            f'<text class="label {one.style}" x="{left + 22}" y="{y + 4:.1f}">{escape(one.name)}'
            f' <tspan class="quiet">{one.points[-1][1]:.3f}</tspan></text>'
        )
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
    left, pitch_y = max(76, 18 + math.ceil(_LABEL_CHAR * max(map(len, rows), default=0))), 24
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
    for value in (each for each in ticks(1, max(2, columns)) if each == int(each)):
        x = left + (value - 0.5) * pitch_x
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    parts += _flags([left + mark.x * pitch_x for mark in marks], marks, bottom)
    return _svg(height, "\n".join(parts))


# ---- a picture of its own ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar. style: a CSS class."""

    value: float
    style: str
    title: str


@dataclass(frozen=True, slots=True)
class PartedBar:
    """One horizontal bar of parts that add up, with `text` at its end. at: another value on the same scale, a diamond."""

    name: str
    parts: Sequence[Part]
    text: str
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Bars under one name."""

    name: str
    bars: Sequence[PartedBar]


_PICTURE_STYLE = """.page { fill: $page; } text { fill: $ink; } .tick, .quiet { fill: $quiet; }
.grid { stroke: $rule; } .card { fill: $card; stroke: $rule; } .at { fill: $page; stroke: $ink; stroke-width: 1.6; }
.limit { stroke: $quiet; stroke-dasharray: 4 4; } .lone { fill: $quiet; } .interval { stroke: $ink; stroke-width: 1.4; }
.s0 { fill: $s0; } .s1 { fill: $s1; } .s2 { fill: $s2; } .s3 { fill: $s3; } .s4 { fill: $s4; } .s5 { fill: $s5; }"""
_PICTURE_FONTS = """text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; }
text.title { font-size: 22px; font-weight: 650; } text.group { font-weight: 600; }"""
_BAR, _BAR_GAP, _GROUP_GAP = 18, 5, 30


def bars_picture(
    title: str,
    notes: Sequence[str],
    groups: Sequence[Group],
    unit: str,
    key: Mapping[str, str],
    at: str = "",
    limit: tuple[float, str] | None = None,
    log: bool = False,
) -> str:
    """Return an SVG file: a title, lines of notes, a key, and groups of bars over one scale.

    unit: of the scale; key: the meaning of each style; at: of the diamonds; limit: a value to compare with, drawn as a vertical
    line, and its name; log: a logarithmic scale that starts below the smallest bar, for bars of one part.
    """
    bars = [bar for group in groups for bar in group.bars]
    ends = [sum(part.value for part in bar.parts) for bar in bars] + [bar.at for bar in bars if bar.at is not None]
    scale = _Scale.over([value for value in (*ends, *([limit[0]] if limit else [])) if value > 0], log)
    top = 62 + 19 * len(notes) + 40
    bottom = top + 14 + sum(_GROUP_GAP + len(group.bars) * (_BAR + _BAR_GAP) for group in groups)
    height = bottom + 50
    parts = [*_key(key, at, top - 22), _card(top, height)]
    for value in scale.ticks():
        x = scale.x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 12}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text class="tick" x="{_WIDTH - 28}" y="{bottom + 18}" text-anchor="end">{escape(unit)}</text>')
    y = top + 12
    for group in groups:
        parts.append(f'<text class="group" x="28" y="{y + 20}">{escape(group.name)}</text>')
        y += _GROUP_GAP
        for bar in group.bars:
            parts += _parted_bar(bar, scale, y)
            y += _BAR + _BAR_GAP
    if limit is not None:
        x = scale.x(limit[0])
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 12}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{top + 25}" text-anchor="middle">{escape(limit[1])}</text>')
    return _picture(title, notes, parts, height)


_LINES_STYLE = ".line { fill: none; stroke-width: 2; } .axis { stroke: $rule; }\n" + "\n".join(
    f".line.s{i} {{ stroke: $s{i}; }} .dot.s{i} {{ fill: $s{i}; }}" for i in range(8)
)


def curves_picture(title: str, notes: Sequence[str], series: Sequence[Series], x_label: str, height: int = 420) -> str:
    """Return an SVG file: a title, lines of notes, and lines as `line_chart` draws them, with their names at their ends."""
    drawn = [one for one in series if one.points]
    top, x_max = 62 + 19 * len(notes), max((x for one in drawn for x, _ in one.points), default=1.0)
    body = _lines(drawn, (), x_max, x_label, height) if drawn else ""
    shown = f'<g transform="translate(0,{top})">\n{body}\n</g>'
    return _picture(title, notes, [_card(top, height + 20), shown], top + height + 20, _LINES_STYLE)


def _picture(title: str, notes: Sequence[str], parts: Sequence[str], height: int, more_style: str = "") -> str:
    """Return an SVG file: its colours, a title and lines of notes, then what is drawn."""
    style = Template(f"{_PICTURE_STYLE}\n{more_style}")  # colours and not variables: not every viewer of SVG files knows those
    dark = f"@media (prefers-color-scheme: dark) {{ {style.substitute(_DARK)} }}"
    frame = [
        f"<title>{escape(title)}</title>",
        f"<style>{_PICTURE_FONTS}\n{style.substitute(_LIGHT)}\n{dark}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="28" y="44">{escape(title)}</text>',
        *(f'<text class="quiet" x="28" y="{68 + 19 * n}">{escape(note)}</text>' for n, note in enumerate(notes)),
    ]
    body = "\n".join((*frame, *parts))
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n{body}\n</svg>\n'


def _card(top: int, height: int) -> str:
    return f'<rect class="card" x="14" y="{top}" width="{_WIDTH - 28}" height="{height - top - 14}" rx="10"/>'


@dataclass(frozen=True, slots=True)
class _Scale:
    """Map values to pixels from left to right."""

    low: float
    high: float
    log: bool

    LEFT: ClassVar[int] = 200
    RIGHT: ClassVar[int] = _WIDTH - 190

    @classmethod
    def over(cls, values: Sequence[float], log: bool) -> _Scale:
        if not values:
            return cls(0.0, 1.0, False)
        if log:
            return cls(10.0 ** math.floor(math.log10(min(values)) - 0.2), max(values), True)
        return cls(0.0, max(values), False)

    def x(self, value: float) -> float:
        share = math.log(max(value, self.low) / self.low, self.high / self.low) if self.log else value / self.high
        return self.LEFT + share * (self.RIGHT - self.LEFT)

    def ticks(self) -> list[float]:
        if not self.log:
            return ticks(0.0, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = (factor * 10.0**power for power in powers for factor in (1, 2, 5))
        return [value for value in values if self.low <= value <= self.high]


def _key(key: Mapping[str, str], at: str, y: int) -> list[str]:
    parts, x = [], 28.0
    for style, name in key.items():
        parts.append(f'<rect class="bar {style}" x="{x:.1f}" y="{y - 11}" width="12" height="12" rx="2"/>')
        parts.append(f'<text x="{x + 18:.1f}" y="{y}">{escape(name)}</text>')
        x += 18 + 7.2 * len(name) + 24
    if at:
        parts.append(_diamond(x + 6, y - 5, at))
        parts.append(f'<text x="{x + 18:.1f}" y="{y}">{escape(at)}</text>')
    return parts


def _diamond(x: float, y: float, title: str) -> str:
    path = f"M{x - 6:.1f},{y:.1f} L{x:.1f},{y - 6:.1f} L{x + 6:.1f},{y:.1f} L{x:.1f},{y + 6:.1f} Z"
    return f'<path class="at" d="{path}"><title>{escape(title)}</title></path>'


def _parted_bar(bar: PartedBar, scale: _Scale, y: int) -> list[str]:
    baseline = y + _BAR - 5
    parts = [f'<text x="{scale.LEFT - 12}" y="{baseline}" text-anchor="end">{escape(bar.name)}</text>']
    reached, end = 0.0, float(scale.LEFT)
    for part in bar.parts:
        begin, reached = end, reached + part.value
        end = max(begin, scale.x(reached))
        parts.append(
            f'<rect class="bar {part.style}" x="{begin:.1f}" y="{y}" width="{end - begin:.1f}" height="{_BAR}" rx="2">'
            f"<title>{escape(bar.name)}: {escape(part.title)}</title></rect>"
        )
    if bar.at is not None:
        parts.append(_diamond(scale.x(bar.at), y + _BAR / 2, f"{bar.name}: {bar.at:.2f}"))
        end = max(end, scale.x(bar.at) + 6)
    parts.append(f'<text x="{end + 8:.1f}" y="{baseline}">{escape(bar.text)}</text>')
    return parts


@dataclass(frozen=True, slots=True)
class Point:
    """A value y at x > 0, with an interval of y - half to y + half. style: a CSS class."""

    name: str
    x: float
    y: float
    half: float
    style: str


_POINTS_HEIGHT, _POINT_GAP, _LABEL_HEIGHT, _LABEL_CHAR = 400, 6.0, 14, 6.7


def points_picture(
    title: str,
    notes: Sequence[str],
    points: Sequence[Point],
    x_label: str,
    y_label: str,
    key: Mapping[str, str],
    limits: Mapping[float, str],
    linear: float,
) -> str:
    """Return an SVG file: a title, lines of notes, a key, and named points with their intervals.

    x is logarithmic; y is asinh(y / linear): as good as linear within +- `linear`, logarithmic far beyond it on both sides.
    Points and names that would cover each other are moved apart. key: the meaning of each style; limits: values of y to compare
    with, drawn as horizontal lines, and their names.
    """
    top = 62 + 19 * len(notes) + 40
    bottom = top + 30 + _POINTS_HEIGHT
    height = bottom + 50
    left, right = 70, _WIDTH - 170
    xs = [point.x for point in points] or [1.0]
    ends = [*limits, 0.0, *(point.y + sign * point.half for point in points for sign in (-1, 1))]
    x_low, x_high = math.log(min(xs)) - 0.2, math.log(max(xs)) + 0.2
    y_low, y_high = math.asinh(min(ends) / linear), math.asinh(max(ends) / linear)

    def x(value: float) -> float:
        return left + (math.log(value) - x_low) / (x_high - x_low) * (right - left)

    def y(value: float) -> float:
        return bottom - 10 - (math.asinh(value / linear) - y_low) / max(y_high - y_low, 1e-9) * _POINTS_HEIGHT

    parts = [*_key(key, "", top - 22), _card(top, height)]
    for value in _round_numbers(max(ends) - min(ends), linear):
        if min(ends) <= value <= max(ends):
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
            parts.append(f'<text class="tick" x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for power in range(math.ceil(x_low / math.log(2)), math.floor(x_high / math.log(2)) + 1):
        parts.append(f'<text class="tick" x="{x(2.0**power):.1f}" y="{bottom + 18}" text-anchor="middle">{2.0**power:g}</text>')
    parts.append(f'<text class="tick" x="{_WIDTH - 28}" y="{bottom + 18}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text class="tick" x="28" y="{top + 18}">{escape(y_label)}</text>')
    for value, name in limits.items():
        parts.append(f'<line class="limit" x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="tick" x="{right + 8}" y="{y(value) + 4:.1f}">{escape(name)}</text>')
    labels: list[tuple[float, float, float]] = []
    drawn: list[float] = []
    for point in sorted(points, key=lambda one: (-one.y, one.x)):
        at, low, high = x(point.x), y(point.y - point.half), y(point.y + point.half)
        while any(abs(at - other) < _POINT_GAP for other in drawn):
            at += _POINT_GAP
        drawn.append(at)
        hover = f"{point.name}: {point.y:+.3f} +- {point.half:.3f} at {point.x:g}"
        parts.append(f'<line class="interval" x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        parts.append(
            f'<circle class="{point.style}" cx="{at:.1f}" cy="{y(point.y):.1f}" r="5"><title>{escape(hover)}</title></circle>'
        )
        begin, end, line = at + 9, at + 9 + _LABEL_CHAR * len(point.name), y(point.y) + 4
        while taken := [other for a, b, other in labels if a < end and begin < b and abs(other - line) < _LABEL_HEIGHT]:
            line = max(taken) + _LABEL_HEIGHT
        labels.append((begin, end, line))
        parts.append(f'<text x="{begin:.1f}" y="{line:.1f}">{escape(point.name)}</text>')
    return _picture(title, notes, parts, height)


def _round_numbers(most: float, least: float) -> list[float]:
    """Return 0 and 1, 2 and 5 times the powers of ten from `least` to `most`, with both signs, ascending."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(max(most, least))) + 1)
    values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    positive = [value for value in values if value >= least * 0.999]
    return [*(-value for value in reversed(positive)), 0.0, *positive]
