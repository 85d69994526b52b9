"""The memory chart as one HTML file: inline SVG, no script, nothing fetched, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from tightfit.cli.charts.memory import Bar, Chart, Panel, describe_bar, pick_ticks
from tightfit.core.files import write_atomic
from tightfit.core.html_page import render_page
from tightfit.core.units import GIB, render_bytes

WIDTH = 960
LEFT = 110
RIGHT = 190
ROW = 30
TOP = 30

_STYLE = """
text.size { paint-order: stroke; stroke: var(--paper); stroke-width: 5px;
  stroke-linejoin: round; }
rect { stroke: var(--paper); stroke-width: 1; } rect:hover { opacity: .75; }
"""


def write_html(chart: Chart, path: Path) -> None:
    write_atomic(path, render_html(chart))


def render_html(chart: Chart) -> str:
    """The whole document."""
    legend = "".join(
        f'<li><span style="background:{colour}"></span>{escape(name)}</li>'
        for name, colour in chart.colour_of.items()
    )
    panels = "".join(_render_panel(panel, chart) for panel in chart.panels)
    title = escape(chart.title)
    subtitle = f"<p>{escape(chart.subtitle)}</p>\n" if chart.subtitle else ""
    return render_page(
        chart.title,
        f"<h1>{title}</h1>\n{subtitle}<p>Memory on each GPU by phase; the dashed line is the card. "
        f'Point at a part for its size.</p>\n<ul class="legend">{legend}</ul>\n{panels}',
        style=_STYLE,
    )


def _render_panel(panel: Panel, chart: Chart) -> str:
    height = TOP + ROW * len(panel.bars) + 28
    # The sizes last, each with a halo: the card's line would strike them through.
    inside = "".join(
        [
            *_axis(chart, height),
            *_bars(panel, chart),
            *_limit(panel, chart, height),
            *_sizes(panel, chart),
        ]
    )
    label = escape(f"{panel.title}: memory by phase", quote=True)
    return (
        f"<h2>{escape(panel.title)}</h2>\n<p>{escape(panel.subtitle)}</p>\n"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{inside}</svg>\n'
    )


def _x(gib: float, chart: Chart) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * gib / chart.top_gib, 2)


def _axis(chart: Chart, height: int) -> Iterator[str]:
    for tick in pick_ticks(chart.top_gib):
        x = _x(tick, chart)
        yield f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{height - 24}"/>'
        yield f'<text class="soft" x="{x}" y="{height - 8}" text-anchor="middle">{tick:g}</text>'
    yield f'<text class="soft" x="{WIDTH - RIGHT + 16}" y="{height - 8}">GiB</text>'


def _bars(panel: Panel, chart: Chart) -> Iterator[str]:
    for row, bar in enumerate(panel.bars):
        y = TOP + ROW * row + 4
        yield f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(bar.phase)}</text>'
        yield from _parts(bar, chart, y)


def _sizes(panel: Panel, chart: Chart) -> Iterator[str]:
    for row, bar in enumerate(panel.bars):
        y = TOP + ROW * row + 4
        end = _x(bar.total_bytes / GIB, chart) + 8
        kind = "size over" if bar.total_bytes > panel.capacity_bytes else "size soft"
        told = escape(describe_bar(bar, panel))
        yield f'<text class="{kind}" x="{end}" y="{y + 16}">{told}</text>'


def _parts(bar: Bar, chart: Chart, y: int) -> Iterator[str]:
    colour_of = chart.colour_of
    done = 0
    for name, size in bar.parts:
        left, right = _x(done / GIB, chart), _x((done + size) / GIB, chart)
        done += size
        told = escape(f"{bar.phase}: {name} {render_bytes(size)}")
        yield (
            f'<rect x="{left}" y="{y}" width="{max(right - left, 0.5):.2f}" height="{ROW - 8}" '
            f'fill="{colour_of[name]}"><title>{told}</title></rect>'
        )


def _limit(panel: Panel, chart: Chart, height: int) -> Iterator[str]:
    x = _x(panel.capacity_bytes / GIB, chart)
    told = escape(f"card: {render_bytes(panel.capacity_bytes)}")
    yield (
        f'<line class="limit" x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{height - 24}">'
        f"<title>{told}</title></line>"
    )
    yield f'<text class="over" x="{x}" y="{TOP - 12}" text-anchor="middle">{told}</text>'
