"""Runs as one PNG: loss curves, memory by step, predicted beside measured. By matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightfit.core.errors import EnvironmentFaultError
from tightfit.core.files import write_atomic
from tightfit.core.units import GIB, MIB, render_bytes
from tightfit.ledger.curves import RunCurves
from tightfit.ledger.words import render_error, render_quantity

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
    except ImportError as fault:
        raise EnvironmentFaultError(
            "A PNG plot needs matplotlib, which is not installed.",
            remedy="pip install 'tightfit[plot]'    (or --plot runs.html, which needs nothing)",
        ) from fault
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
            told = f"not finite from step {step:,}" if more else f"not finite at step {step:,}"
            axis.axvline(
                step, color=LIMIT, linewidth=1.2, linestyle="--", label=_label(run, told, runs)
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
        told = f"predicted {render_quantity(predicted, found.unit)}"
        share = 0.0
        if measured is not None and predicted:
            share = 100 * measured / predicted
            told = f"measured {render_quantity(measured, found.unit)}, {told}"
            told += f" ({render_error(found.error_percent)})"
        axis.barh(place, min(share, 250.0), height=0.62, color=run.colour)
        axis.annotate(
            told, (min(share, 250.0), place), xytext=(5, 0), textcoords="offset points",
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
