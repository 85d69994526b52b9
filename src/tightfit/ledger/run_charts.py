"""The loss chart and the memory chart of one or several runs, for the HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.core.units import GIB, MIB, render_bytes
from tightfit.ledger.curves import Points, RunCurves
from tightfit.ledger.svg import Level, Line, LineChart

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
        told = f"{start}predicted peak {render_bytes(run.predicted_peak_bytes)}"
        value = run.predicted_peak_bytes / size
        levels.append(Level(label=told, value=value, colour=run.colour))
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
