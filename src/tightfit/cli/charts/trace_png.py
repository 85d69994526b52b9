"""The traced chart as PNG, by matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from tightfit.cli.charts.memory import pick_ticks
from tightfit.cli.charts.memory_png import draw_legend, make_figure, save_figure, write_title
from tightfit.cli.charts.trace import (
    TraceChart,
    TracePanel,
    describe_card,
    describe_panel,
    describe_top,
    to_gib,
)

LIMIT = "#b3261e"
LETTERS_PER_LINE = 125
"""Letters of small print across the picture."""


def write_png(chart: TraceChart, path: Path) -> None:
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
    told = textwrap.wrap(
        f"{panel.subtitle}. {describe_panel(panel)}".lstrip(". "), LETTERS_PER_LINE
    )
    # Room for the small print, and under it two lines of words of the peak.
    axis.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", pad=36 + 11 * len(told))
    axis.annotate(
        "\n".join(told), (0, 1), xycoords="axes fraction", xytext=(0, 32),
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
