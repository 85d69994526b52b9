"""The memory chart as PNG, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.cli.charts.memory import Chart, Panel, describe_bar, pick_ticks
from tightfit.core.errors import EnvironmentFaultError
from tightfit.core.files import write_atomic
from tightfit.core.units import GIB, render_bytes


def write_png(chart: Chart, path: Path) -> None:
    """Draw into memory, then write the file whole."""
    heights = [1.1 + 0.34 * len(panel.bars) for panel in chart.panels]
    figure = make_figure(sum(heights) + 1.6)
    axes = figure.subplots(
        len(chart.panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    for panel, axis in zip(chart.panels, axes[:, 0], strict=True):
        _draw_panel(axis, panel, chart)
    axes[-1, 0].set_xlabel("GiB on each GPU")
    write_title(figure, chart.title, chart.subtitle)
    draw_legend(figure, chart.colour_of)
    save_figure(figure, path)


def make_figure(height: float, *, hspace: float | None = None) -> Any:
    """An empty picture, `height` inches high; `hspace` keeps its panels further apart."""
    try:
        # The object interface, not pyplot: no display, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as fault:
        raise EnvironmentFaultError(
            "A PNG chart needs matplotlib, which is not installed.",
            remedy="pip install 'tightfit[plot]'    (or --chart chart.html, which needs nothing)",
        ) from fault
    figure = Figure(figsize=(10, height), dpi=150, layout=ConstrainedLayoutEngine(hspace=hspace))
    FigureCanvasAgg(figure)
    return figure


def write_title(figure: Any, title: str, subtitle: str) -> None:
    # Empty last lines keep the first panel's heading off the title.
    lines = "\n\n" if subtitle else "\n"
    figure.suptitle(f"{title}{lines}", x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.01, 1 - 0.33 / figure.get_figheight(), subtitle, va="top", fontsize=9)


def save_figure(figure: Any, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": "tightfit"})
    write_atomic(path, image.getvalue())


def _draw_panel(axis: Any, panel: Panel, chart: Chart) -> None:
    from matplotlib.patheffects import withStroke

    colour_of = chart.colour_of
    for row, bar in enumerate(panel.bars):
        left = 0.0
        for name, size in bar.parts:
            axis.barh(
                row, size / GIB, left=left, height=0.72, color=colour_of[name],
                edgecolor="white", linewidth=0.6,
            )  # fmt: skip
            left += size / GIB
        over = bar.total_bytes > panel.capacity_bytes
        axis.annotate(
            describe_bar(bar, panel),
            (left, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="#b3261e" if over else "#333333",
            zorder=5,
            path_effects=[withStroke(linewidth=4, foreground="white")],
        )
    axis.axvline(
        panel.capacity_bytes / GIB, color="#b3261e", linewidth=1.4, linestyle="--", zorder=3
    )
    axis.annotate(
        f"card: {render_bytes(panel.capacity_bytes)}",
        (panel.capacity_bytes / GIB, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color="#b3261e",
    )
    _dress_axis(axis, panel, chart)


def _dress_axis(axis: Any, panel: Panel, chart: Chart) -> None:
    axis.set_title(
        f"{panel.title}  ",
        loc="left",
        fontsize=10,
        fontweight="bold",
        pad=30 if panel.subtitle else 18,
    )
    axis.annotate(
        panel.subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 17),
        textcoords="offset points", fontsize=8, color="#555555",
    )  # fmt: skip
    axis.set_yticks(range(len(panel.bars)), [bar.phase for bar in panel.bars], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, chart.top_gib * 1.08)
    axis.set_xticks(pick_ticks(chart.top_gib))
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def draw_legend(figure: Any, colour_of: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colour_of.items()]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=5, fontsize=8, frameon=False,
        handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip
