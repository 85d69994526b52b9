"""The memory chart as one HTML file: inline SVG, no script, nothing fetched, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from tightfit.cli.chart import Bar, Chart, Panel, describe_bar, pick_ticks
from tightfit.core.files import write_atomic
from tightfit.core.units import GIB, render_bytes

WIDTH = 960
LEFT = 110
RIGHT = 190
ROW = 30
TOP = 30

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d8dee4;
  --paper: #ffffff; --limit: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4ae; --line: #3a424b;
  --paper: #0f1419; --limit: #ff8a80; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 0; }
p { color: var(--soft); margin: .2rem 0 .6rem; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font-size: 13px; }
text.soft { fill: var(--soft); font-size: 12px; } text.over { fill: var(--limit); }
text.size { paint-order: stroke; stroke: var(--paper); stroke-width: 5px;
  stroke-linejoin: round; }
line.grid { stroke: var(--line); } line.limit { stroke: var(--limit); stroke-width: 2;
  stroke-dasharray: 6 4; }
rect { stroke: var(--paper); stroke-width: 1; } rect:hover { opacity: .75; }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; }
li span { display: inline-block; width: .9em; height: .9em; border-radius: 2px;
  margin-right: .4em; vertical-align: -1px; }
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
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n{subtitle}<p>Memory on each GPU by phase; the dashed line is the card. "
        f"Point at a part for its size.</p>\n<ul>{legend}</ul>\n{panels}</body>\n</html>\n"
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
