"""Line charts as inline SVG, with the numbers beside them for the page's own small script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import isfinite

from tightfit.ledger.curves import Points, pick_ticks

WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 40
ROOM_ABOVE = 0.06
"""Of the range, so that no line runs along the frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series of a chart."""

    label: str
    colour: str
    points: Points
    kind: str = "line"
    """`line`, `faint` or `dots`; a class of the page's style."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal line across the chart."""

    label: str
    value: float
    colour: str | None = None
    """None: the colour of limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Series over steps, on one vertical scale."""

    title: str
    unit: str = ""
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    marks: tuple[tuple[int, str], ...] = ()
    """Steps where something happened, drawn as upright lines."""
    is_from_zero: bool = False
    scale: tuple[float, float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _fit_scale(self))

    def x(self, step: float) -> float:
        low, high, _, _ = self.scale
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (step - low) / (high - low), 2)

    def y(self, value: float) -> float:
        _, _, low, high = self.scale
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low), 2)


def render_chart(chart: LineChart) -> str:
    """A legend, the picture, and its numbers."""
    shown = [line for line in chart.lines if line.points]
    if not shown:
        return f'<p class="none">{escape(chart.title)}: no step was finished.</p>\n'
    items = "".join(
        f'<li><span class="{kind}" style="--c:{colour}"></span>{escape(label)}</li>'
        for label, colour, kind in _legend(shown, chart)
    )
    inside = "".join([*_axes(chart), *_levels(chart), *_marks(chart), *_lines(shown, chart)])
    numbers = escape(json.dumps(_numbers(shown, chart), separators=(",", ":")), quote=True)
    return (
        f'<ul class="legend">{items}</ul>\n'
        f'<div class="chart" data-chart="{numbers}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title, quote=True)}">{inside}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/></svg>'
        '<div class="tip" hidden></div></div>\n'
    )


def _legend(lines: Sequence[Line], chart: LineChart) -> Iterator[tuple[str, str, str]]:
    """Label, colour and kind of each thing that is drawn; a faint line goes with its smooth one."""
    for line in lines:
        if line.kind != "faint":
            yield line.label, line.colour, line.kind
    for level in chart.levels:
        yield level.label, level.colour or "var(--limit)", "level"
    for _, text in chart.marks:
        yield text, "var(--limit)", "upright"


def _numbers(lines: Sequence[Line], chart: LineChart) -> dict[str, object]:
    """What the script needs to name the points under the pointer."""
    return {
        "width": WIDTH,
        "unit": chart.unit,
        "series": [
            {
                "label": line.label,
                "colour": line.colour,
                "x": [chart.x(x) for x, _ in line.points],
                "step": [x for x, _ in line.points],
                "y": [float(f"{y:.5g}") for _, y in line.points],
            }
            for line in lines
        ],
    }


def _fit_scale(chart: LineChart) -> tuple[float, float, float, float]:
    points = [point for line in chart.lines for point in line.points]
    xs = [x for x, _ in points] or [0.0]
    ys = [y for _, y in points] + [level.value for level in chart.levels]
    ys = [y for y in ys if isfinite(y)] or [0.0]
    low_x, high_x = min(0.0, *xs), max(1.0, *xs)
    low, high = (0.0 if chart.is_from_zero else min(ys)), max(ys)
    span = max(high - low, abs(high) * 1e-3, 1e-9)
    return (
        low_x,
        high_x,
        low - (0 if chart.is_from_zero else ROOM_ABOVE * span),
        high + (ROOM_ABOVE * span),
    )


def _axes(chart: LineChart) -> Iterator[str]:
    low_x, high_x, low, high = chart.scale
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for tick in pick_ticks(low, high):
        y = chart.y(tick)
        yield f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}"/>'
        yield f'<text class="soft" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>'
    for tick in pick_ticks(low_x, high_x, most=10):
        if tick == int(tick):
            x = chart.x(tick)
            yield f'<line class="grid" x1="{x}" y1="{bottom}" x2="{x}" y2="{bottom + 5}"/>'
            yield (
                f'<text class="soft" x="{x}" y="{bottom + 20}" text-anchor="middle">'
                f"{int(tick):,}</text>"
            )
    yield f'<text class="soft" x="{right}" y="{HEIGHT - 4}" text-anchor="end">step</text>'
    if chart.unit:
        yield f'<text class="soft" x="2" y="{TOP - 2}">{escape(chart.unit)}</text>'


def _levels(chart: LineChart) -> Iterator[str]:
    for level in chart.levels:
        y = chart.y(level.value)
        paint = "" if level.colour is None else f' style="stroke:{level.colour}"'
        yield (
            f'<line class="limit"{paint} x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}">'
            f"<title>{escape(level.label)}</title></line>"
        )


def _marks(chart: LineChart) -> Iterator[str]:
    for step, text in chart.marks:
        x = chart.x(step)
        yield (
            f'<line class="mark" x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}">'
            f"<title>{escape(text)}</title></line>"
        )


def _lines(lines: Sequence[Line], chart: LineChart) -> Iterator[str]:
    for line in lines:
        places = [(chart.x(x), chart.y(y)) for x, y in line.points]
        route = " ".join(f"{x},{y}" for x, y in places)
        yield f'<polyline class="{line.kind}" style="stroke:{line.colour}" points="{route}"/>'
        if line.kind == "dots" or len(places) == 1:
            yield from (
                f'<circle cx="{x}" cy="{y}" r="4" style="fill:{line.colour}"/>' for x, y in places
            )
