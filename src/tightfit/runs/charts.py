"""Charts of runs: loss and memory by step as plain numbers, as inline SVG, and as one PNG."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any

from tightfit.core.errors import SetupError
from tightfit.core.files import write_atomic
from tightfit.core.units import GIB, MIB, render_bytes
from tightfit.runs.metrics import mean
from tightfit.runs.report import PastRun, RunReport, is_cpu_plan, read_run, report_run
from tightfit.runs.report_words import render_error, render_quantity
from tightfit.runs.run_folder import RunFolder

MOST_POINTS = 600
"""More than a screen has columns for; a run of a million steps still makes a small page."""
LARGEST_LOSS = 1e9
"""One that has exploded past this would flatten every other."""
LEAST_SPAN_FRACTION = 1e-12
"""Of its ends, that a range must span to be divided: steps of it are then floats of their own."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#0099bb", "#b8860b", "#666666", "#994455")
"""One per run, told apart with the common colour blindnesses; after Paul Tol's bright set."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """One run, ready to be drawn."""

    name: str
    colour: str
    loss: Points
    smooth_loss: Points
    eval_loss: Points
    nonfinite_steps: tuple[int, ...]
    """Steps whose loss was NaN, infinite or beyond all drawing."""
    allocated: Points
    """In bytes, the greatest of the steps that one point stands for."""
    reserved: Points
    predicted_peak_bytes: float
    """Of what `reserved` measures: without the CUDA context."""
    capacity_bytes: float
    is_cpu: bool
    report: RunReport


def make_curves(past: PastRun, report: RunReport, *, place: int = 0) -> RunCurves:
    """`place`: which of several runs this is; decides its colour."""
    finite = [(float(r.step), r.loss) for r in past.steps if is_drawn(r.loss)]
    gpu = past.plan.estimate.gpu
    is_cpu = is_cpu_plan(past.plan)
    evals = [(float(r.step), r.loss) for r in past.evals if is_drawn(r.loss)]
    allocated = [(float(r.step), float(r.gpu_allocated_bytes)) for r in past.steps]
    reserved = [(float(r.step), float(r.gpu_reserved_bytes)) for r in past.steps]
    return RunCurves(
        name=past.name,
        colour=COLOURS[place % len(COLOURS)],
        loss=thin(finite, mean),
        smooth_loss=thin(smooth(finite), mean),
        eval_loss=thin(evals, mean),
        nonfinite_steps=tuple(r.step for r in past.steps if not is_drawn(r.loss)),
        allocated=thin(allocated, max),
        reserved=() if is_cpu else thin(reserved, max),
        predicted_peak_bytes=gpu.peak_reserved_bytes - (0 if is_cpu else gpu.context_bytes),
        capacity_bytes=gpu.capacity_bytes,
        is_cpu=is_cpu,
        report=report,
    )


def is_drawn(loss: float) -> bool:
    return abs(loss) < LARGEST_LOSS  # False for NaN too


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Mean over about a thirtieth of the run around each step.

    Even-sided at the start, where a loss falls steeply and a lagging mean would stand above it.
    """
    half = max(1, len(points) // 60)
    sums = [0.0, *accumulate(y for _, y in points)]
    found = []
    for place, (x, _) in enumerate(points):
        reach = min(half, place)
        low, high = place - reach, min(len(points), place + reach + 1)
        found.append((x, (sums[high] - sums[low]) / (high - low)))
    return found


def thin(points: Sequence[tuple[float, float]], pick: Callable[[Sequence[float]], float]) -> Points:
    """At most `MOST_POINTS`, each for a stretch of equally many: its last x and the picked y."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    found = ((group[-1][0], pick([y for _, y in group])) for group in groups)
    return tuple((x, y) for x, y in found if isfinite(y))


def pick_ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Round numbers inside the range, evenly apart; one, where floats cannot tell more apart."""
    span = high - low
    if not isfinite(span) or span <= LEAST_SPAN_FRACTION * max(abs(low), abs(high)):
        return [low]
    step = 10.0 ** _floor_log10(span / most)
    step *= next((factor for factor in (1, 2, 5) if span / (step * factor) <= most), 10)
    start = -int(-low // step)
    return [round(place * step, 12) for place in range(start, int(high // step) + 1)]


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run with all that is said and drawn of it."""

    past: PastRun
    report: RunReport
    curves: RunCurves


def load_run_views(folders: Iterable[RunFolder]) -> tuple[RunView, ...]:
    """Read each run once; a name that occurs twice gets its parent folder in front."""
    pasts = [read_run(folder) for folder in folders]
    names = Counter(past.name for past in pasts)
    reported = []
    for place, past in enumerate(pasts):
        report = report_run(past)
        curves = make_curves(past, report, place=place)
        if names[past.name] > 1:
            parent = past.folder.path.resolve().parent.name
            curves = replace(curves, name=f"{parent}/{past.name}")
        reported.append(RunView(past=past, report=report, curves=curves))
    return tuple(reported)


# Line charts as inline SVG, with the numbers beside them for the page's own small script.

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


# The loss chart and the memory chart of one or several runs, for the HTML page.

FAR_ABOVE = 4.0
"""A capacity this many times the tallest line would flatten all of them: said, not drawn."""
RESERVED_COLOUR = "#8899aa"


def make_loss_chart(runs: Sequence[RunCurves]) -> LineChart:
    lines, marks = [], []
    for run in runs:
        start = "" if len(runs) == 1 else f"{run.name}: "
        lines += [
            Line(label=f"{start}train", colour=run.colour, points=run.loss, kind="faint"),
            Line(label=f"{start}train, smoothed", colour=run.colour, points=run.smooth_loss),
            Line(
                label=f"{start}eval", colour=_eval_colour(run, runs), points=run.eval_loss,
                kind="dots",
            ),
        ]  # fmt: skip
        if run.nonfinite_steps:
            step = run.nonfinite_steps[0]
            marks.append((step, f"{start}loss not finite at step {step:,}"))
    return LineChart(title="Loss by step", lines=tuple(lines), marks=tuple(marks))


def make_memory_chart(runs: Sequence[RunCurves]) -> LineChart:
    tallest = max([y for run in runs for _, y in (*run.allocated, *run.reserved)], default=0.0)
    tallest = max([tallest, *(run.predicted_peak_bytes for run in runs)])
    size, unit = (GIB, "GiB") if tallest >= GIB else (MIB, "MiB")
    lines, levels = [], []
    for run in runs:
        start = "" if len(runs) == 1 else f"{run.name}: "
        kind = "process memory" if run.is_cpu else "allocated"
        lines.append(
            Line(label=start + kind, colour=run.colour, points=_scaled(run.allocated, size))
        )
        if len(runs) == 1:  # several runs would make a thicket
            reserved = _scaled(run.reserved, size)
            lines.append(Line(label="reserved", colour=RESERVED_COLOUR, points=reserved))
        reported = f"{start}predicted peak {render_bytes(run.predicted_peak_bytes)}"
        value = run.predicted_peak_bytes / size
        levels.append(Level(label=reported, value=value, colour=run.colour))
    for capacity in sorted({run.capacity_bytes for run in runs}):
        if capacity <= FAR_ABOVE * tallest:
            levels.append(Level(label=_name_capacity(runs, capacity), value=capacity / size))
    return LineChart(
        title="Memory by step", unit=unit, lines=tuple(lines), levels=tuple(levels),
        is_from_zero=True,
    )  # fmt: skip


def describe_capacity(runs: Sequence[RunCurves]) -> str:
    """`the card has 14.6 GiB`, for the sentence above the chart."""
    sizes = sorted({run.capacity_bytes for run in runs})
    return "; ".join(_name_capacity(runs, size) for size in sizes)


def _name_capacity(runs: Sequence[RunCurves], capacity: float) -> str:
    what = "the machine has" if all(run.is_cpu for run in runs) else "the card has"
    return f"{what} {render_bytes(capacity)}"


def _eval_colour(run: RunCurves, runs: Sequence[RunCurves]) -> str:
    return "#ee6677" if len(runs) == 1 else run.colour


def _scaled(points: Points, size: int) -> Points:
    return tuple((x, y / size) for x, y in points)


# Runs as one PNG: loss curves, memory by step, predicted beside measured. By matplotlib.

INK, SOFT, LIMIT = "#1f2328", "#59636e", "#b3261e"
FADED = 0.3
LONGEST_NAME = 40


def write_plot(runs: Sequence[RunCurves], path: Path) -> None:
    """Draw into memory, then write the file whole."""
    write_atomic(path, draw_png(runs))


def draw_png(runs: Sequence[RunCurves]) -> bytes:
    """The three panels one under another, on one width."""
    try:
        # The object interface, not pyplot: no display, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(
            "A PNG plot needs matplotlib, which is not installed.",
            remedy="pip install 'tightfit[plot]'    (or --plot runs.html, which needs nothing)",
        ) from error
    num_rows = sum(len(run.report.compared) for run in runs)
    heights = (3.4, 2.8, 0.5 + 0.36 * max(num_rows, 1))
    figure = Figure(figsize=(10, sum(heights) + 2.2), dpi=150)
    figure.set_layout_engine("constrained", hspace=0.08)
    FigureCanvasAgg(figure)
    loss, memory, bars = figure.subplots(3, 1, gridspec_kw={"height_ratios": heights})
    _draw_loss(loss, runs)
    _draw_memory(memory, runs)
    _draw_compared(bars, runs)
    loss.sharex(memory)
    figure.suptitle(_title(runs), x=0.01, ha="left", fontsize=13, fontweight="bold")
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": "tightfit"})
    return image.getvalue()


def _title(runs: Sequence[RunCurves]) -> str:
    if len(runs) != 1:
        return f"{len(runs)} runs"
    report = runs[0].report
    return _literal(f"{runs[0].name}: {report.model}, {report.method} on {report.hardware}")


def _literal(text: str) -> str:
    """A dollar sign would start a formula."""
    return text.replace("$", r"\$")


def _label(run: RunCurves, what: str, runs: Sequence[RunCurves]) -> str:
    name = run.name if len(run.name) <= LONGEST_NAME else run.name[: LONGEST_NAME - 3] + "..."
    return _literal(what if len(runs) == 1 else f"{name}: {what}")


def _draw_loss(axis: Any, runs: Sequence[RunCurves]) -> None:
    for run in runs:
        if run.loss:
            axis.plot(*zip(*run.loss, strict=True), color=run.colour, alpha=FADED, linewidth=0.9)
            axis.plot(
                *zip(*run.smooth_loss, strict=True), color=run.colour, linewidth=1.8,
                label=_label(run, "train, smoothed", runs),
            )  # fmt: skip
        if run.eval_loss:
            axis.plot(
                *zip(*run.eval_loss, strict=True), color=run.colour, marker="o", markersize=5,
                markeredgecolor="white", linestyle=":", linewidth=1.0, zorder=4,
                label=_label(run, "eval", runs),
            )  # fmt: skip
        for step in run.nonfinite_steps[:1]:
            more = len(run.nonfinite_steps) - 1
            reported = f"not finite from step {step:,}" if more else f"not finite at step {step:,}"
            axis.axvline(
                step, color=LIMIT, linewidth=1.2, linestyle="--", label=_label(run, reported, runs)
            )
    _dress(axis, "Loss: lower is better; eval is on rows held back from training")
    _finish(axis, has_lines=any(run.loss or run.eval_loss for run in runs))


def _draw_memory(axis: Any, runs: Sequence[RunCurves]) -> None:
    top = max([max((y for _, y in run.allocated), default=0.0) for run in runs], default=0.0)
    unit, word = (GIB, "GiB") if top >= GIB else (MIB, "MiB")

    def draw(points: Sequence[tuple[float, float]], **style: Any) -> None:
        if points:
            xs, ys = zip(*points, strict=True)
            axis.plot(xs, [y / unit for y in ys], **style)

    for run in runs:
        kind = "process memory" if run.is_cpu else "allocated"
        draw(run.allocated, color=run.colour, linewidth=1.6, label=_label(run, kind, runs))
        draw(
            run.reserved, color=run.colour, linewidth=1.0, alpha=0.6,
            label=_label(run, "reserved", runs),
        )  # fmt: skip
        axis.axhline(
            run.predicted_peak_bytes / unit, color=run.colour, linestyle="--", linewidth=1.2,
            label=_label(run, f"predicted peak {render_bytes(run.predicted_peak_bytes)}", runs),
        )  # fmt: skip
    tallest = max([top, *(run.predicted_peak_bytes for run in runs)])
    for capacity in sorted({run.capacity_bytes for run in runs}):
        what = "RAM" if all(run.is_cpu for run in runs) else "card"
        if capacity <= 4 * tallest:  # further up, the line would flatten all the others
            axis.axhline(
                capacity / unit, color=LIMIT, linewidth=1.4,
                label=f"{what}: {render_bytes(capacity)}",
            )  # fmt: skip
        else:
            axis.plot([], [], " ", label=f"{what}: {render_bytes(capacity)}, far above")
    is_cpu = bool(runs) and all(run.is_cpu for run in runs)
    _dress(axis, "Memory of the process" if is_cpu else "Memory on the GPU of rank 0")
    axis.set_ylabel(word, fontsize=9)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylim(0, max(axis.get_ylim()[1], 1.08 * tallest / unit))
    _finish(axis, has_lines=any(run.allocated for run in runs))


def _draw_compared(axis: Any, runs: Sequence[RunCurves]) -> None:
    """Measured as a share of predicted: quantities of different units on one scale."""
    from matplotlib.patheffects import withStroke

    rows = [(run, found) for run in runs for found in run.report.compared]
    order = list(dict.fromkeys(found.name for _, found in rows))
    rows.sort(key=lambda row: order.index(row[1].name))
    names = []
    for place, (run, found) in enumerate(rows):
        names.append(_label(run, found.name, runs))
        measured, predicted = found.measured, found.predicted
        reported = f"predicted {render_quantity(predicted, found.unit)}"
        share = 0.0
        if measured is not None and predicted:
            share = 100 * measured / predicted
            reported = f"measured {render_quantity(measured, found.unit)}, {reported}"
            reported += f" ({render_error(found.error_percent)})"
        axis.barh(place, min(share, 250.0), height=0.62, color=run.colour)
        axis.annotate(
            reported, (min(share, 250.0), place), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=8, color=INK, zorder=5,
            path_effects=[withStroke(linewidth=4, foreground="white")],
        )  # fmt: skip
    _dress(axis, "Measured, as a share of what was predicted (100% is as predicted)")
    axis.axvline(100, color=INK, linestyle="--", linewidth=1.2)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 330)
    axis.set_xticks([0, 50, 100, 150, 200, 250], ["0%", "50%", "100%", "150%", "200%", "250%"])
    axis.grid(visible=False, axis="y")


def _dress(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axis.grid(color="#e3e6ea", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, colors=SOFT)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _finish(axis: Any, *, has_lines: bool) -> None:
    if not has_lines:
        axis.text(
            0.5, 0.5, "no step was finished", transform=axis.transAxes, ha="center",
            color=SOFT, fontsize=10,
        )  # fmt: skip
        axis.set_xticks([])
    if axis.get_legend_handles_labels()[0]:
        axis.legend(
            fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.3,
        )  # fmt: skip
