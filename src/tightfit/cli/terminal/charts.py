"""Charts of estimates, row lengths and measured speeds, as PNG or as an HTML page."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tightfit.cli.terminal.output import announce
from tightfit.core.errors import UsageError
from tightfit.core.figures import (
    INK,
    LIMIT,
    MEMORY_COLOURS,
    SOFT,
    add_tooltip,
    draw_legend,
    make_figure,
    pick_colours,
    style_axis,
    write_beside,
    write_figure,
    write_title,
)
from tightfit.core.files import check_writable
from tightfit.core.packages import require_packages
from tightfit.core.text import sanitize, shorten
from tightfit.core.units import GIB, render_bytes
from tightfit.data.view import choose_step, make_bins
from tightfit.estimation.result import Estimate
from tightfit.planning.plan import fullest_phases

if TYPE_CHECKING:
    from tightfit.runs.bench import Bench

PREDICTED, MEASURED = "#b0b0b0", "#4477aa"
SIDE_COLOURS = {"to train on": "#4477aa", "to evaluate on": "#e69f00"}
NEAR = 1.35
"""A limit up to so far beyond the longest row is drawn; a further one would squeeze the bars."""


def check_chart_path(
    path: Path, endings: Sequence[str] = (".png", ".html", ".htm"), *, option: str = "--chart"
) -> None:
    """Refuse an ending, a missing package or a folder, before any work is done."""
    if path.suffix.lower() not in endings:
        instead = path.parent / f"{path.stem.strip('.') or 'chart'}{endings[0]}"
        raise UsageError(
            f"`{option} {shorten(path)}` does not end in {' or '.join(endings[:2])}.",
            remedy=f"{option} {shlex.quote(str(instead))}",
        )
    if ".png" in endings:  # a report page does without curves
        require_packages("A chart", "matplotlib", extra="plot")
    check_writable(path)


# Memory by phase: one panel per plan or GPU, one bar per phase stacked by component.


class MemoryPanel(NamedTuple):
    title: str
    subtitle: str
    estimate: Estimate


def write_memory_chart(
    title: str, panels: Sequence[MemoryPanel], path: Path, *, subtitle: str = ""
) -> None:
    """Panels on one common scale, so that bars of different GPUs can be compared."""
    stages = [fullest_phases(panel.estimate) for panel in panels]
    sizes = [panel.estimate.gpu.capacity_bytes for panel in panels]
    sizes += [sum(phase.components.values()) for found in stages for phase in found.values()]
    drawn = {
        _words(name): 0
        for found in stages
        for phase in found.values()
        for name, size in phase.components.items()
        if size > 0
    }
    known = [name for name in MEMORY_COLOURS if name in drawn]
    names = [*known, *(name for name in drawn if name not in MEMORY_COLOURS)]
    colour_of = pick_colours(names, MEMORY_COLOURS)
    heights = [1.1 + 0.34 * len(found) for found in stages]
    figure = make_figure(sum(heights) + 1.6)
    axes = figure.subplots(
        len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        _draw_memory(axis, panel, colour_of)
    axes[-1, 0].set_xlabel("GiB on each GPU")
    axes[-1, 0].set_xlim(0, 1.17 * max(sizes) / GIB)
    write_title(figure, title, subtitle)
    draw_legend(figure, colour_of)
    write_figure(figure, path, title=title)
    announce(path)


def _draw_memory(axis: Any, panel: MemoryPanel, colour_of: Mapping[str, str]) -> None:
    phases = fullest_phases(panel.estimate)
    capacity = panel.estimate.gpu.capacity_bytes
    # The same order in every bar, so that equal parts stand under each other.
    order = {name: place for place, name in enumerate(MEMORY_COLOURS)}
    for row, (stage, phase) in enumerate(phases.items()):
        parts = [(_words(name), size) for name, size in phase.components.items() if size > 0]
        total = 0
        for name, size in sorted(parts, key=lambda part: order.get(part[0], 4)):
            (bar,) = axis.barh(
                row, size / GIB, left=total / GIB, height=0.72, color=colour_of[name],
                edgecolor="white", linewidth=0.6,
            )  # fmt: skip
            add_tooltip(bar, f"{stage}: {name} {render_bytes(size)}")
            total += size
        over = f", {render_bytes(total - capacity)} too much" if total > capacity else ""
        label = f"{render_bytes(total)}{over}"
        write_beside(axis, label, (total / GIB, row), colour=LIMIT if over else INK)
    _draw_upright(axis, f"card: {render_bytes(capacity)}", capacity / GIB, LIMIT, "--")
    axis.set_title(
        f"{panel.title}  ", loc="left", fontsize=10, fontweight="bold",
        pad=30 if panel.subtitle else 18,
    )  # fmt: skip
    axis.annotate(
        panel.subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 17),
        textcoords="offset points", fontsize=8, color=SOFT,
    )  # fmt: skip
    axis.set_yticks(range(len(phases)), list(phases), fontsize=9)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    style_axis(axis, grid="x")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _draw_upright(axis: Any, label: str, at: float, colour: str, line: str) -> None:
    """A vertical line with its label above the plot."""
    axis.axvline(at, color=colour, linewidth=1.3, linestyle=line, zorder=3)
    axis.annotate(
        label, (at, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
        textcoords="offset points", ha="center", fontsize=8, color=colour,
    )  # fmt: skip


# Row lengths of a dataset.


def write_length_chart(
    title: str,
    subtitle: str,
    sides: Mapping[str, Mapping[int, int]],
    path: Path,
    *,
    percentiles: Mapping[str, int],
    seq_len: int,
) -> None:
    """`sides`: rows by length, under the names of `SIDE_COLOURS`."""
    longest = max(length for lengths in sides.values() for length in lengths)
    shows_limit = seq_len <= NEAR * longest
    top = max(longest, seq_len) if shows_limit else longest
    step = choose_step(top, most=60)
    figure = make_figure(4.6)
    axis = figure.subplots()
    bottom = [0] * -(-top // step)
    for name, lengths in sides.items():
        bins = make_bins(lengths, step=step, top=top)
        bars = axis.bar(
            [item.first - 0.5 for item in bins], [item.num_rows for item in bins], width=step,
            align="edge", bottom=bottom, color=SIDE_COLOURS[name], edgecolor="white",
            linewidth=0.4, label=name,
        )  # fmt: skip
        for bar, (first, last, count) in zip(bars, bins, strict=True):
            add_tooltip(bar, f"{first:,} to {last:,} tokens: {count:,} rows {name}")
        bottom = [below + item.num_rows for below, item in zip(bottom, bins, strict=True)]
    if len(sides) > 1:
        axis.legend(frameon=False, fontsize=8)
    axis.set_xlabel("tokens in a row")
    axis.set_ylabel("rows")
    axis.set_xlim(0, top * 1.02)
    style_axis(axis, grid="y")
    taken = [seq_len] if shows_limit else []
    for name, at in percentiles.items():
        if all(abs(at - other) > 0.09 * top for other in taken):  # else labels would overlap
            taken.append(at)
            _draw_upright(axis, f"{name} {at:,}", at, SOFT, ":")
    if shows_limit:
        _draw_upright(axis, f"seq_len {seq_len:,}", seq_len, LIMIT, "--")
    write_title(figure, title, subtitle)
    write_figure(figure, path, title=title)
    announce(path)


# Predicted and measured speed of plans.


def write_bench_chart(found: Bench, path: Path) -> None:
    """The plans in the order of the table, fastest on top."""
    from tightfit.runs.bench import speed_of

    figure = make_figure(1.9 + 0.75 * len(found.trials))
    axis = figure.subplots()
    height, labels = 0.38, []
    for row, trial in enumerate(found.trials):
        predicted, measured = trial.predicted_tokens_per_second, speed_of(trial)
        text = f"{measured:,.0f}" if trial.measured else trial.status.value.replace("-", " ")
        for at, speed, colour, label in (
            (row - height / 2, predicted, PREDICTED, f"{predicted:,.0f}"),
            (row + height / 2, measured, MEASURED, text),
        ):
            axis.barh(at, speed, height=height, color=colour)
            write_beside(axis, label, (speed, at))
        plan = sanitize(f"ranked {trial.rank}: {trial.description}")
        labels.append("\n".join(textwrap.wrap(plan, 44)))
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("tokens per second")
    axis.set_xlim(0, 1.15 * axis.dataLim.x1)
    axis.tick_params(axis="y", length=0)
    style_axis(axis, grid="x")
    draw_legend(figure, {"predicted": PREDICTED, "measured": MEASURED})
    title = sanitize(f"{found.model} on {found.hardware}")
    write_title(figure, title)
    write_figure(figure, path, title=title)
    announce(path)
