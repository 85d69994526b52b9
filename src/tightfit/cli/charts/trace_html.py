"""The traced chart as one HTML file: inline SVG, a small script of our own, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from tightfit.cli.charts.memory import pick_ticks
from tightfit.cli.charts.trace import (
    TraceChart,
    TracePanel,
    describe_card,
    describe_panel,
    describe_top,
    list_runs,
    to_gib,
)
from tightfit.cli.charts.trace_script import SCRIPT, STYLE
from tightfit.cli.render.trace import (
    describe_effort,
    describe_maker,
    describe_place,
    describe_tensor,
)
from tightfit.core.files import write_atomic
from tightfit.core.html_page import render_page
from tightfit.core.units import GIB, render_bytes

SIDE = 1000
"""Of the drawing, which is stretched over the plot: words stand beside it, as large as others."""
NARROWEST_ON_PHONES = 0.14
"""Of the width: what is shorter has no name there."""


def write_html(chart: TraceChart, path: Path) -> None:
    write_atomic(path, render_html(chart))


def render_html(chart: TraceChart) -> str:
    """The whole document."""
    subtitle = f"<p>{escape(chart.subtitle)}</p>\n" if chart.subtitle else ""
    panels = "".join(_render_panel(panel, chart) for panel in chart.panels)
    return render_page(
        chart.title,
        f"<h1>{escape(chart.title)}</h1>\n{subtitle}"
        "<p>Memory that tensors hold on each GPU, in the order in which they are made and freed "
        "(not in time). Point at the picture, or choose it and use the arrow keys, for the sizes "
        f"of a moment.</p>\n{panels}",
        style=STYLE,
        script=SCRIPT,
    )


def _render_panel(panel: TracePanel, chart: TraceChart) -> str:
    subtitle = f"<p>{escape(panel.subtitle)}</p>\n" if panel.subtitle else ""
    effort = escape(describe_effort(panel.traced))
    head = (
        f"<h2>{escape(panel.title)}</h2>\n{subtitle}"
        f"<p><b>{escape(describe_panel(panel))}</b> {effort}</p>\n"
    )
    if not panel.num_columns:
        return f"{head}<p>Nothing was allocated.</p>\n"
    return (
        f"{head}{_render_legend(panel, chart)}{_render_picture(panel, chart)}"
        f"{_render_stages(panel)}{_render_tensors(panel)}"
    )


def _render_legend(panel: TracePanel, chart: TraceChart) -> str:
    items = "".join(
        f'<li><span style="background:{chart.colour_of[name]}"></span>{escape(name)}</li>'
        for name, _ in reversed(panel.layers)
    )
    return f'<ul class="legend">{items}</ul>\n'


def _render_picture(panel: TracePanel, chart: TraceChart) -> str:
    label = escape(f"{panel.title}: memory over the job. {describe_top(panel)}", quote=True)
    numbers = escape(json.dumps(_numbers(panel, chart), separators=(",", ":")), quote=True)
    drawing = "".join([*_draw_grid(panel), *_draw_areas(panel, chart), *_draw_lines(panel)])
    return (
        f'<div class="trace" data-trace="{numbers}">{_render_peak(panel)}'
        f'<div class="row"><div class="scale">{"".join(_write_ticks(panel))}</div>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{label}">'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">'
        f"{drawing}</svg>{_render_lead(panel)}{_render_card(panel)}"
        '<i class="cursor" hidden></i>'
        '<div class="tip" role="status" hidden></div></div></div>'
        f'<div class="names">{"".join(_write_names(panel))}</div></div>\n'
    )


def _x(panel: TracePanel, column: float) -> float:
    return round(SIDE * column / panel.num_columns, 2)


def _y(panel: TracePanel, num_bytes: float) -> float:
    return round(SIDE * (1 - num_bytes / panel.top_bytes), 2)


def _percent(part: float) -> str:
    return f"{100 * part / SIDE:.2f}%"


def _draw_areas(panel: TracePanel, chart: TraceChart) -> Iterator[str]:
    """From the whole down to the context, each over the one before: only upper edges are drawn."""
    for (name, _), edge in reversed(list(zip(panel.layers, panel.stacked, strict=True))):
        route = [f"M0 {SIDE}"]
        for _, end, size in list_runs(edge):
            route.append(f"V{_y(panel, size):g}H{_x(panel, end):g}")
        part, colour = escape(name, quote=True), chart.colour_of[name]
        yield f'<path data-part="{part}" fill="{colour}" d="{"".join(route)}V{SIDE}Z"/>'


def _draw_grid(panel: TracePanel) -> Iterator[str]:
    for tick in pick_ticks(to_gib(panel.top_bytes), most=7):
        y = _y(panel, tick * GIB)
        yield f'<line class="grid" x1="0" y1="{y}" x2="{SIDE}" y2="{y}"/>'


def _draw_lines(panel: TracePanel) -> Iterator[str]:
    edges = {stage.start for stage in panel.stages}
    for moment in panel.moments[1:]:
        kind = "stage" if moment.start in edges else "moment"
        x = _x(panel, moment.start)
        yield f'<line class="{kind}" x1="{x}" y1="0" x2="{x}" y2="{SIDE}"/>'
    if panel.has_line:
        y = _y(panel, panel.capacity_bytes)
        yield f'<line class="limit" x1="0" y1="{y}" x2="{SIDE}" y2="{y}"/>'


def _write_ticks(panel: TracePanel) -> Iterator[str]:
    ticks = pick_ticks(to_gib(panel.top_bytes), most=7)
    for tick in ticks:
        unit = " GiB" if tick == ticks[-1] else ""
        yield f'<span style="top:{_percent(_y(panel, tick * GIB))}">{tick:g}{unit}</span>'


def _render_card(panel: TracePanel) -> str:
    """Its name over the line, on the side where the peak is not."""
    y = _y(panel, panel.capacity_bytes) if panel.has_line else 0
    side = "left" if panel.peak_column > panel.num_columns / 2 else "right"
    below = " below" if y < 0.08 * SIDE else ""
    told = escape(describe_card(panel))
    return f'<span class="card{below}" style="top:{_percent(y)};{side}:.4rem">{told}</span>'


def _render_peak(panel: TracePanel) -> str:
    """Over the plot, ending or beginning where the peak is."""
    x = _x(panel, panel.peak_column + 0.5)
    is_late = x > SIDE / 2
    place = f"padding-right:{_percent(SIDE - x)}" if is_late else f"padding-left:{_percent(x)}"
    side = "late" if is_late else "early"
    told = escape(describe_top(panel))
    return f'<div class="peak"><p class="{side}" style="{place}">{told}</p></div>'


def _render_lead(panel: TracePanel) -> str:
    """From those words down to the place."""
    left = _percent(_x(panel, panel.peak_column + 0.5))
    depth = _percent(_y(panel, panel.totals[panel.peak_column]))
    return f'<i class="lead" style="left:{left};height:{depth}"></i>'


def _write_names(panel: TracePanel) -> Iterator[str]:
    named = [("stage", span, span.name) for span in panel.stages]
    named += [("moment", span, span.part) for span in panel.moments if span.part]
    for kind, span, name in named:
        if not panel.has_room(span, name):
            continue
        width = (span.end - span.start) / panel.num_columns
        place = f"left:{_percent(_x(panel, span.start))};width:{100 * width:.2f}%"
        told, size = escape(name), " narrow" if width < NARROWEST_ON_PHONES else ""
        yield f'<span class="{kind}{size}" style="{place}" title="{told}">{told}</span>'


def _numbers(panel: TracePanel, chart: TraceChart) -> dict[str, object]:
    """What the script needs to name the sizes under the pointer."""
    return {
        "columns": panel.num_columns,
        "peak": panel.peak_column,
        "place": describe_place(panel.traced.peak).partition(": ")[2],
        "capacity": panel.capacity_bytes,
        "moments": [[moment.start, moment.name] for moment in panel.moments],
        "parts": [
            {"name": name, "colour": chart.colour_of[name], "runs": list(list_runs(row))}
            for name, row in reversed(panel.layers)
        ],
    }


def _render_stages(panel: TracePanel) -> str:
    rows = "".join(
        f'<tr><td>{escape(stage.name)}</td><td class="number">'
        f'{render_bytes(stage.peak_allocated_bytes + panel.context_bytes)}</td><td class="number">'
        f"{render_bytes(stage.peak_reserved_bytes + panel.context_bytes)}</td></tr>"
        for stage in panel.traced.stages
    )
    return (
        "<h3>Peak of each stage, with the CUDA context</h3>\n<table><thead><tr><th>stage</th>"
        '<th class="number">allocated</th><th class="number">reserved</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>\n"
    )


def _render_tensors(panel: TracePanel) -> str:
    rows = "".join(
        f'<tr><td class="number">{render_bytes(tensor.num_bytes)}</td>'
        f"<td>{escape(tensor.category)}</td><td>{escape(describe_tensor(tensor))}</td>"
        f"<td>{escape(describe_maker(tensor))}</td></tr>"
        for tensor in panel.traced.peak.tensors
    )
    return (
        '<h3>What stands at the peak</h3>\n<div class="scroll"><table><thead><tr>'
        '<th class="number">size</th><th>part</th><th>tensors</th><th>made by</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>\n"
    )
