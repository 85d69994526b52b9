"""The traced memory chart: memory over the step by category, with capacity and peak; PNG or
HTML.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import ceil
from pathlib import Path
from typing import Any

from tightfit.cli.charts.memory import (
    OTHER_COLOURS,
    draw_legend,
    make_figure,
    pick_ticks,
    save_figure,
    write_title,
)
from tightfit.cli.render.trace import (
    describe_effort,
    describe_maker,
    describe_place,
    describe_tensor,
)
from tightfit.cli.terminal.output import announce
from tightfit.core.files import write_atomic
from tightfit.core.html_page import MEMORY_COLOURS, render_page
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB, render_bytes
from tightfit.estimation.result import Estimate
from tightfit.hardware.types import Gpu
from tightfit.planning.describe import describe_how, describe_levers
from tightfit.trace.result import Timeline, TracedMemory

# Style and script of the traced chart's page: the plot, and the sizes of a moment.

PAGE_STYLE = """
h2 { border-top: 1px solid var(--line); padding-top: 1rem; } h3 { font-size: .95rem;
  margin: 1.2rem 0 .2rem; }
.trace { --scale: 4.2rem; margin: .6rem 0 1rem; }
.trace .row { display: flex; } .trace .scale { position: relative; flex: 0 0 var(--scale); }
.trace .scale span { position: absolute; right: .5rem; transform: translateY(-50%);
  font-size: .78rem; color: var(--soft); white-space: nowrap; }
.trace .plot { position: relative; flex: 1; height: 22rem; touch-action: pan-y; cursor: crosshair;
  border-bottom: 1px solid var(--soft); }
.trace .plot:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
.trace svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.trace line { vector-effect: non-scaling-stroke; } line.stage { stroke: var(--ink); opacity: .55; }
line.moment { stroke: var(--ink); opacity: .35; stroke-dasharray: 2 4; }
.trace .card { position: absolute; transform: translateY(-115%); color: var(--limit);
  font-size: .82rem; background: var(--paper); border-radius: .3rem; padding: 0 .3rem;
  pointer-events: none; } .trace .card.below { transform: translateY(15%); }
.trace .peak { margin-left: var(--scale); } .trace .peak p { margin: 0; font-size: .82rem;
  font-weight: 600; color: var(--ink); overflow-wrap: anywhere; }
.trace .peak p.late { text-align: right; }
.trace .lead { position: absolute; top: 0; width: 0; pointer-events: none;
  border-left: 1.5px solid var(--ink); } .trace .lead::after { content: ""; position: absolute;
  left: -4.25px; bottom: -3.5px; width: 7px; height: 7px; border-radius: 50%;
  background: var(--ink); }
.trace .names { margin-left: var(--scale); position: relative; height: 2.6rem; }
.trace .names span { position: absolute; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; text-align: center; font-size: .78rem; }
.trace .names .stage { top: 1.2rem; font-weight: 600; } .trace .names .moment { top: .1rem;
  color: var(--soft); }
.trace .cursor { position: absolute; top: 0; bottom: 0; width: 0; pointer-events: none;
  border-left: 1.5px dashed var(--ink); }
.trace .tip { position: absolute; top: .4rem; pointer-events: none; background: var(--paper);
  border: 1px solid var(--line); border-radius: .4rem; padding: .35rem .6rem; font-size: .82rem;
  white-space: nowrap; z-index: 2; font-variant-numeric: tabular-nums; }
.trace .tip div { display: flex; gap: .5rem; } .trace .tip div > :last-child { margin-left: auto; }
.trace .tip span:first-child { flex: 0 0 .7em; height: .7em; border-radius: 2px;
  align-self: center; } .trace .tip .over { color: var(--limit); }
.trace .tip small { display: block; max-width: 18rem; white-space: normal; color: var(--soft);
  overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .3rem 0; font-size: .88rem; }
th, td { text-align: left; padding: .22rem .9rem .22rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } th { font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) { body { margin: 1rem auto; } .trace { --scale: 3.4rem; }
  .trace .plot { height: 17rem; } .trace .names .moment { display: none; }
  .trace .names .narrow { display: none; }
  .trace .names .stage { top: .2rem; } .trace .names { height: 1.5rem; }
  .trace .tip { top: calc(100% + 1.6rem); left: calc(-1 * var(--scale)) !important; right: 0; }
  .scroll td { white-space: nowrap; } }
@media print { .trace .tip, .trace .cursor { display: none; } }
"""

PAGE_SCRIPT = """
for (const trace of document.querySelectorAll('.trace')) {
  const data = JSON.parse(trace.dataset.trace);
  const plot = trace.querySelector('.plot'), tip = trace.querySelector('.tip');
  const cursor = trace.querySelector('.cursor');
  let at = data.peak;
  const size = bytes => {
    for (const [unit, word] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']])
      if (bytes >= 0.95 * unit) return (bytes / unit).toFixed(1) + ' ' + word;
    return bytes + ' B';
  };
  const find = (rows, column) => {
    let low = 0, high = rows.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1;
      if (rows[mid][0] <= column) low = mid; else high = mid - 1; }
    return rows[low];
  };
  const add = (...cells) => {
    const row = document.createElement('div');
    for (const [text, style] of cells) {
      const cell = document.createElement('span');
      cell.textContent = text;
      if (style) cell.style.background = style;
      row.append(cell);
    }
    tip.append(row);
    return row;
  };
  const show = column => {
    at = Math.max(0, Math.min(data.columns - 1, column));
    tip.replaceChildren();
    const head = document.createElement('b');
    head.textContent = find(data.moments, at)[1] + (at === data.peak ? ': the peak' : '');
    tip.append(head);
    let whole = 0;
    for (const part of data.parts) {
      const bytes = find(part.runs, at)[2];
      whole += bytes;
      if (bytes) add(['', part.colour], [part.name], [size(bytes)]);
    }
    add(['', 'transparent'], ['together'], [size(whole)]);
    const over = whole - data.capacity;
    if (over > 0) add(['', 'transparent'], ['over the card by'], [size(over)]).className = 'over';
    if (at === data.peak) {
      const place = document.createElement('small');
      place.textContent = data.place;
      tip.append(place);
    }
    tip.hidden = cursor.hidden = false;
    const wide = plot.clientWidth, x = (at + 0.5) / data.columns * wide;
    cursor.style.left = x + 'px';
    const room = wide - tip.offsetWidth;
    tip.style.left = Math.max(Math.min(0, room), Math.min(room,
      x + 12 + tip.offsetWidth > wide ? x - tip.offsetWidth - 12 : x + 12)) + 'px';
  };
  const hide = () => { tip.hidden = cursor.hidden = true; };
  const point = event => {
    const box = plot.getBoundingClientRect();
    show(Math.floor((event.clientX - box.left) / box.width * data.columns));
  };
  plot.addEventListener('pointermove', point);
  plot.addEventListener('pointerdown', point);
  plot.addEventListener('pointerleave', event => {
    if (event.pointerType === 'mouse' && document.activeElement !== plot) hide();
  });
  plot.addEventListener('focus', () => show(at));
  plot.addEventListener('blur', hide);
  plot.addEventListener('keydown', event => {
    const leap = event.shiftKey ? Math.ceil(data.columns / 40) : 1;
    const starts = data.moments.map(moment => moment[0]);
    const to = {
      ArrowLeft: () => at - leap, ArrowRight: () => at + leap,
      PageUp: () => [...starts].reverse().find(start => start < at) ?? 0,
      PageDown: () => starts.find(start => start > at) ?? data.columns - 1,
      Home: () => 0, End: () => data.columns - 1, p: () => data.peak,
    }[event.key];
    if (event.key === 'Escape') hide();
    if (!to || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    show(to());
  });
}
"""


CONTEXT = "cuda context"
COLOURS = MEMORY_COLOURS | {
    "inputs": "#994455",
    "load reserve": "#88ccaa",
    "temporary": "#ccbb44",
}
ROOM_ABOVE = 1.08
MOST_EMPTY = 2.5
"""A card that is larger than this many times the job is named, not drawn: it would leave the job
a strip at the bottom."""

SHORTEST_SHARE = 14
"""A stage is drawn at least so much of the width: one part in this many."""
LETTER_FRACTION = 0.0085
"""Of the width, that a letter of a name under the picture takes."""
MOST_NAMED = 0.8
"""Of the width, that names may take before moments are drawn without regard to them."""
MOST_STRETCHES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring columns under one name."""

    name: str
    start: int
    end: int

    @property
    def stage(self) -> str:
        """`first step` of `first step, forward`."""
        return self.name.partition(", ")[0]

    @property
    def part(self) -> str:
        """`forward` of `first step, forward`."""
        return self.name.partition(", ")[2]


@dataclass(frozen=True, kw_only=True)
class TracePanel:
    """One traced job on one card. Without slots, so that sums are made once and kept."""

    title: str
    subtitle: str
    traced: TracedMemory
    timeline: Timeline
    """The trace's, with short moments made long enough to be seen."""
    capacity_bytes: int
    context_bytes: int

    @cached_property
    def num_columns(self) -> int:
        return _count_columns(self.timeline)

    @cached_property
    def layers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and bytes per column as they are stacked: the context below everything."""
        timeline = self.timeline
        context = (self.context_bytes,) * self.num_columns
        return ((CONTEXT, context), *zip(timeline.categories, timeline.bytes, strict=True))

    @cached_property
    def stacked(self) -> tuple[tuple[int, ...], ...]:
        """The upper edge of each of `layers`."""
        edges: list[tuple[int, ...]] = []
        for _, row in self.layers:
            below = edges[-1] if edges else (0,) * self.num_columns
            edges.append(tuple(low + size for low, size in zip(below, row, strict=True)))
        return tuple(edges)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        return self.stacked[-1]

    @cached_property
    def peak_column(self) -> int:
        """The fullest column of the moment that the trace calls its peak; stages of later
        processes may be fuller."""
        moment = self.traced.peak.stage
        stage = moment.partition(",")[0]
        named = [span for span in self.moments if span.name in (moment, stage)]
        columns = [column for span in named for column in range(span.start, span.end)]
        return max(columns or range(self.num_columns), key=self.totals.__getitem__)

    @cached_property
    def top_bytes(self) -> float:
        """Where the scale ends."""
        highest = max(self.totals, default=1)
        if self.capacity_bytes > MOST_EMPTY * highest:
            return 1.25 * highest
        return ROOM_ABOVE * max(highest, self.capacity_bytes)

    @cached_property
    def has_line(self) -> bool:
        """Whether the card's capacity is inside the picture."""
        return self.capacity_bytes <= self.top_bytes

    @cached_property
    def moments(self) -> tuple[Span, ...]:
        """`first step, forward` and the like."""
        return tuple(_list_spans(self.timeline))

    @cached_property
    def stages(self) -> tuple[Span, ...]:
        """`first step` and the like: moments of one stage together."""
        return _gather(self.moments)

    def has_room(self, span: Span, name: str) -> bool:
        """Whether a name under the picture can be read."""
        return _has_room(span, name, self.num_columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChart:
    """One panel for each traced job."""

    title: str
    panels: tuple[TracePanel, ...]
    subtitle: str = ""

    @property
    def colour_of(self) -> dict[str, str]:
        """Of every category that is drawn somewhere, in stacking order."""
        names = dict.fromkeys(name for panel in self.panels for name, _ in panel.layers)
        others = [name for name in names if name not in COLOURS]
        drawn = {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
        return {name: COLOURS.get(name) or drawn[name] for name in names}


def make_trace_panel(
    title: str,
    traced: TracedMemory,
    *,
    capacity_bytes: int,
    context_bytes: int,
    subtitle: str = "",
) -> TracePanel:
    """One panel from one trace. `capacity_bytes` is the card's, the context's share included."""
    return TracePanel(
        title=title,
        subtitle=subtitle,
        traced=traced,
        timeline=stretch(traced.timeline),
        capacity_bytes=capacity_bytes,
        context_bytes=context_bytes,
    )


def make_strategy_panel(
    strategy: Strategy,
    gpu: Gpu,
    estimate: Estimate,
    traced: TracedMemory,
    *,
    number: int | None = None,
) -> TracePanel:
    """The panel of one strategy on one card, with its place where there are several."""
    how = describe_how(strategy, gpu.name)
    return make_trace_panel(
        how if number is None else f"{number}. {how}",
        traced,
        capacity_bytes=estimate.gpu.capacity_bytes,
        context_bytes=estimate.gpu.context_bytes,
        subtitle=describe_levers(strategy),
    )


def write_trace_panels(model_name: str, panels: tuple[TracePanel, ...], path: Path) -> None:
    """Panels of one model as a chart."""
    title = f"{model_name}: GPU memory over the step"
    write_trace_chart(TraceChart(title=title, panels=panels), path)


def stretch(timeline: Timeline) -> Timeline:
    """The same with the columns of short stages repeated: saving is few events, yet a stage.

    What is repeated makes the picture longer and the others' share of it smaller, hence again.
    """
    num_columns = _count_columns(timeline)
    for _ in range(MOST_STRETCHES):
        stretched = _stretch(timeline, num_columns)
        num_columns = _count_columns(stretched)
        moments = _list_spans(stretched)
        if all(_has_room(span, span.part or span.stage, num_columns) for span in moments):
            break
    return stretched


def _has_room(span: Span, name: str, num_columns: int) -> bool:
    return span.end - span.start >= LETTER_FRACTION * len(name) * num_columns


def _stretch(timeline: Timeline, num_columns: int) -> Timeline:
    """For a picture of so many columns in all."""
    moments = tuple(_list_spans(timeline))
    named = LETTER_FRACTION * sum(len(span.part or span.stage) for span in moments)
    lengths = {
        span.name: span.end - span.start for span in reversed(_gather(moments))
    }  # of a stage that comes twice, the first
    least_stage = num_columns / SHORTEST_SHARE
    least_moment = num_columns / max(SHORTEST_SHARE, 2 * len(moments))
    letter = LETTER_FRACTION * num_columns if named < MOST_NAMED else 0.0
    columns: list[int] = []
    stages: list[tuple[int, str]] = []
    for span in moments:
        stages.append((len(columns), span.name))
        in_stage = least_stage / lengths[span.stage]
        least = max(least_moment, letter * len(span.part or span.stage))
        times = ceil(max(1.0, in_stage, least / (span.end - span.start)))
        columns += [column for column in range(span.start, span.end) for _ in range(times)]
    rows = tuple(tuple(row[column] for column in columns) for row in timeline.bytes)
    return Timeline(categories=timeline.categories, bytes=rows, stages=tuple(stages))


def write_trace_chart(chart: TraceChart, path: Path) -> None:
    """PNG or HTML, by the file's ending; `check_chart_path` has refused others."""
    if path.suffix.lower() == ".png":
        write_trace_png(chart, path)
    else:
        write_trace_html(chart, path)
    announce(path)


def describe_panel(panel: TracePanel) -> str:
    """What the picture shows, in one sentence."""
    peak = panel.traced.peak_allocated_bytes + panel.context_bytes
    needed = panel.traced.smallest_capacity_bytes + panel.context_bytes
    short = needed - panel.capacity_bytes
    over = f", {render_bytes(short)} more than the card" if short > 0 else ""
    return (
        f"Peak {render_bytes(peak)} with the CUDA context; "
        f"survives in {render_bytes(needed)}{over}."
    )


def describe_card(panel: TracePanel) -> str:
    """`card: 23.5 GiB`, and that it is not to be seen where it is not."""
    label = f"card: {render_bytes(panel.capacity_bytes)}"
    return label if panel.has_line else f"{label}, above this picture"


def describe_top(panel: TracePanel) -> str:
    """`peak 17.3 GiB, steady step, backward: aten.mm in model.layers.3.mlp`."""
    size = render_bytes(panel.totals[panel.peak_column])
    return f"peak {size}, {describe_place(panel.traced.peak)}"


def list_runs(row: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring columns of one value: start, end, value."""
    start = 0
    for column in range(1, len(row) + 1):
        if column == len(row) or row[column] != row[start]:
            yield start, column, row[start]
            start = column


def _list_spans(timeline: Timeline) -> Iterator[Span]:
    ends = [start for start, _ in timeline.stages[1:]] + [_count_columns(timeline)]
    for (start, name), end in zip(timeline.stages, ends, strict=False):
        yield Span(name=name, start=start, end=end)


def _gather(moments: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbouring moments of one stage as one."""
    found: list[Span] = []
    for moment in moments:
        start = moment.start
        if found and found[-1].name == moment.stage:
            start = found.pop().start
        found.append(Span(name=moment.stage, start=start, end=moment.end))
    return tuple(found)


def _count_columns(timeline: Timeline) -> int:
    return len(timeline.bytes[0]) if timeline.bytes else 0


def to_gib(num_bytes: float) -> float:
    return num_bytes / GIB


# The traced chart as one HTML file: inline SVG, a small script of our own, nothing fetched.

SIDE = 1000
"""Of the drawing, which is stretched over the plot: words stand beside it, as large as others."""
NARROWEST_ON_PHONES = 0.14
"""Of the width: what is shorter has no name there."""


def write_trace_html(chart: TraceChart, path: Path) -> None:
    write_atomic(path, render_trace_html(chart))


def render_trace_html(chart: TraceChart) -> str:
    """The whole document."""
    subtitle = f"<p>{escape(chart.subtitle)}</p>\n" if chart.subtitle else ""
    panels = "".join(_render_panel(panel, chart) for panel in chart.panels)
    return render_page(
        chart.title,
        f"<h1>{escape(chart.title)}</h1>\n{subtitle}"
        "<p>Memory that tensors hold on each GPU, in the order in which they are made and freed "
        "(not in time). Point at the picture, or choose it and use the arrow keys, for the sizes "
        f"of a moment.</p>\n{panels}",
        style=PAGE_STYLE,
        script=PAGE_SCRIPT,
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
    label = escape(describe_card(panel))
    return f'<span class="card{below}" style="top:{_percent(y)};{side}:.4rem">{label}</span>'


def _render_peak(panel: TracePanel) -> str:
    """Over the plot, ending or beginning where the peak is."""
    x = _x(panel, panel.peak_column + 0.5)
    is_late = x > SIDE / 2
    place = f"padding-right:{_percent(SIDE - x)}" if is_late else f"padding-left:{_percent(x)}"
    side = "late" if is_late else "early"
    label = escape(describe_top(panel))
    return f'<div class="peak"><p class="{side}" style="{place}">{label}</p></div>'


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
        label, size = escape(name), " narrow" if width < NARROWEST_ON_PHONES else ""
        yield f'<span class="{kind}{size}" style="{place}" title="{label}">{label}</span>'


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


# The traced chart as PNG, by matplotlib.

LIMIT = "#b3261e"
LETTERS_PER_LINE = 125
"""Letters of small print across the picture."""


def write_trace_png(chart: TraceChart, path: Path) -> None:
    """Draw into memory, then write the file whole."""
    figure = make_figure(4.6 * len(chart.panels) + 1.3, hspace=0.06)
    axes = figure.subplots(len(chart.panels), 1, squeeze=False)
    for panel, axis in zip(chart.panels, axes[:, 0], strict=True):
        _draw_panel(axis, panel, chart)
    write_title(figure, chart.title, chart.subtitle)
    draw_legend(figure, chart.colour_of)
    save_figure(figure, path)


def _draw_panel(axis: Any, panel: TracePanel, chart: TraceChart) -> None:
    _dress_axis(axis, panel)
    if not panel.num_columns:
        return
    # One more edge than columns, so that the last column has its width too.
    edges = range(panel.num_columns + 1)
    below = [0.0] * (panel.num_columns + 1)
    for (name, _), stacked in zip(panel.layers, panel.stacked, strict=True):
        above = [to_gib(size) for size in (*stacked, stacked[-1])]
        colour = chart.colour_of[name]
        axis.fill_between(edges, below, above, step="post", color=colour, linewidth=0, zorder=2)
        below = above
    _draw_spans(axis, panel)
    _draw_card(axis, panel)
    _draw_peak(axis, panel)


def _dress_axis(axis: Any, panel: TracePanel) -> None:
    lines = textwrap.wrap(
        f"{panel.subtitle}. {describe_panel(panel)}".lstrip(". "), LETTERS_PER_LINE
    )
    # Room for the small print, and under it two lines of words of the peak.
    axis.set_title(
        panel.title, loc="left", fontsize=10, fontweight="bold", pad=36 + 11 * len(lines)
    )
    axis.annotate(
        "\n".join(lines), (0, 1), xycoords="axes fraction", xytext=(0, 32),
        textcoords="offset points", fontsize=8, color="#555555",
    )  # fmt: skip
    axis.set_xlim(0, max(panel.num_columns, 1))
    axis.set_ylim(0, to_gib(panel.top_bytes))
    axis.set_yticks(pick_ticks(to_gib(panel.top_bytes), most=7))
    axis.set_ylabel("GiB on each GPU", fontsize=9)
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0, labelsize=9)
    axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_spans(axis: Any, panel: TracePanel) -> None:
    """Lines where moments begin; their names under the plot, stages under those."""
    edges = {stage.start for stage in panel.stages}
    for depth, spans in ((-6, panel.moments), (-19, panel.stages)):
        is_stage = depth < -6
        for span in spans:
            if span.start and (is_stage or span.start not in edges):
                axis.axvline(
                    span.start, color="#1f2328", linewidth=0.8 if is_stage else 0.6,
                    linestyle="-" if is_stage else ":", alpha=0.6, zorder=3,
                )  # fmt: skip
            name = span.name if is_stage else span.part
            if not panel.has_room(span, name):
                continue
            axis.annotate(
                name, ((span.start + span.end) / 2, 0), xycoords=("data", "axes fraction"),
                xytext=(0, depth), textcoords="offset points", ha="center", va="top",
                fontsize=8, fontweight="bold" if is_stage else "normal",
                color="#1f2328" if is_stage else "#555555",
            )  # fmt: skip


def _draw_card(axis: Any, panel: TracePanel) -> None:
    from matplotlib.patheffects import withStroke

    is_left = panel.peak_column > panel.num_columns / 2
    height = to_gib(panel.capacity_bytes if panel.has_line else panel.top_bytes)
    if panel.has_line:
        axis.axhline(height, color=LIMIT, linewidth=1.4, linestyle="--", zorder=4)
    is_low = height < 0.94 * to_gib(panel.top_bytes)
    axis.annotate(
        describe_card(panel), (0 if is_left else 1, height), xycoords=("axes fraction", "data"),
        xytext=(4 if is_left else -4, 4 if is_low else -4), textcoords="offset points",
        ha="left" if is_left else "right", va="bottom" if is_low else "top", fontsize=8,
        color=LIMIT, zorder=6, path_effects=[withStroke(linewidth=3, foreground="white")],
    )  # fmt: skip


def _draw_peak(axis: Any, panel: TracePanel) -> None:
    """Its words over the plot, and a line from them down to the place."""
    column = panel.peak_column + 0.5
    height = to_gib(panel.totals[panel.peak_column])
    axis.plot(
        [column, column], [height, to_gib(panel.top_bytes)], color="#1f2328", linewidth=0.9,
        zorder=5, clip_on=False,
    )  # fmt: skip
    axis.plot([column], [height], marker="o", markersize=3.5, color="#1f2328", zorder=5)
    share = column / panel.num_columns
    is_late = share > 0.5
    room = int(LETTERS_PER_LINE * (share if is_late else 1 - share))
    axis.annotate(
        "\n".join(textwrap.wrap(describe_top(panel), room, max_lines=2, placeholder=" ...")),
        (column, 1), xycoords=("data", "axes fraction"), xytext=(0, 4),
        textcoords="offset points", ha="right" if is_late else "left", fontsize=8,
        fontweight="bold", color="#1f2328",
    )  # fmt: skip
