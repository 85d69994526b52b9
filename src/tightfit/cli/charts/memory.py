"""The memory chart: one panel per GPU, one bar per phase stacked by component; PNG or HTML.

The HTML file is inline SVG without script; matplotlib loads only for PNG.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tightfit.cli.terminal.output import announce
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.files import check_writable, write_atomic
from tightfit.core.html_page import MEMORY_COLOURS, render_page
from tightfit.core.text import shorten
from tightfit.core.units import GIB, render_bytes
from tightfit.estimation.result import Estimate
from tightfit.planning.plan import fullest_phases

OTHER_COLOURS = ("#ccbb44", "#997700", "#994455", "#117733", "#88ccaa", "#332288")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One phase: its parts in drawing order."""

    phase: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One GPU (or one plan) and its phases."""

    title: str
    subtitle: str
    capacity_bytes: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels on one common scale, so that bars of different GPUs can be compared."""

    title: str
    panels: tuple[Panel, ...]
    subtitle: str = ""

    @property
    def components(self) -> tuple[str, ...]:
        """Every part that is drawn somewhere; known ones first, in their usual order."""
        drawn = {name: 0 for p in self.panels for bar in p.bars for name, _ in bar.parts}
        known = [name for name in MEMORY_COLOURS if name in drawn]
        return (*known, *(name for name in drawn if name not in MEMORY_COLOURS))

    @property
    def colour_of(self) -> dict[str, str]:
        others = [name for name in self.components if name not in MEMORY_COLOURS]
        drawn = {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
        return {name: MEMORY_COLOURS.get(name) or drawn[name] for name in self.components}

    @property
    def top_gib(self) -> float:
        """Where the common scale ends: a little past the widest bar or card."""
        sizes = [size for p in self.panels for size in (p.capacity_bytes, *_totals(p))]
        return 1.08 * max(sizes) / GIB


def make_panel(title: str, estimate: Estimate, *, subtitle: str = "") -> Panel:
    """One panel from one estimate: each stage at its fullest moment, parts of no size left out."""
    bars = tuple(
        Bar(phase=stage, parts=_order(phase.components))
        for stage, phase in fullest_phases(estimate).items()
    )
    return Panel(
        title=title, subtitle=subtitle, capacity_bytes=estimate.gpu.capacity_bytes, bars=bars
    )


def check_chart_path(path: Path) -> None:
    """Refuse an ending we cannot draw and a file we cannot write, before any work is done."""
    if path.suffix.lower() not in (".png", ".html", ".htm"):
        instead = path.parent / f"{path.stem.strip('.') or 'memory'}.html"
        raise UsageError(
            f"`--chart {shorten(path)}` ends neither in .png nor in .html.",
            remedy=f"--chart {shlex.quote(str(instead))}",
        )
    check_writable(path)


def write_chart(chart: Chart, path: Path) -> None:
    """PNG or HTML, by the file's ending."""
    if path.suffix.lower() == ".png":
        write_memory_png(chart, path)
    else:
        write_memory_html(chart, path)
    announce(path)


def pick_ticks(top_gib: float, *, most: int = 8) -> list[float]:
    """Round numbers from 0 to the end of the scale."""
    steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
    step = next((step for step in steps if top_gib / step <= most), top_gib / most)
    return [step * i for i in range(int(top_gib / step) + 1)]


def describe_bar(bar: Bar, panel: Panel) -> str:
    """`12.4 GiB`, and by how much it is over where it is."""
    over = bar.total_bytes - panel.capacity_bytes
    label = render_bytes(bar.total_bytes)
    return f"{label}, {render_bytes(over)} too much" if over > 0 else label


def _order(components: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """The same order in every bar, so that equal parts stand under each other."""
    places = {name: place for place, name in enumerate(MEMORY_COLOURS)}
    named = [(name.replace("_", " "), size) for name, size in components.items() if size > 0]
    return tuple(sorted(named, key=lambda part: places.get(part[0], 4)))


def _totals(panel: Panel) -> Sequence[int]:
    return [bar.total_bytes for bar in panel.bars]


# The memory chart as one HTML file: inline SVG, no script, nothing fetched, light and dark.

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


def write_memory_html(chart: Chart, path: Path) -> None:
    write_atomic(path, render_memory_html(chart))


def render_memory_html(chart: Chart) -> str:
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
        label = escape(describe_bar(bar, panel))
        yield f'<text class="{kind}" x="{end}" y="{y + 16}">{label}</text>'


def _parts(bar: Bar, chart: Chart, y: int) -> Iterator[str]:
    colour_of = chart.colour_of
    done = 0
    for name, size in bar.parts:
        left, right = _x(done / GIB, chart), _x((done + size) / GIB, chart)
        done += size
        label = escape(f"{bar.phase}: {name} {render_bytes(size)}")
        yield (
            f'<rect x="{left}" y="{y}" width="{max(right - left, 0.5):.2f}" height="{ROW - 8}" '
            f'fill="{colour_of[name]}"><title>{label}</title></rect>'
        )


def _limit(panel: Panel, chart: Chart, height: int) -> Iterator[str]:
    x = _x(panel.capacity_bytes / GIB, chart)
    label = escape(f"card: {render_bytes(panel.capacity_bytes)}")
    yield (
        f'<line class="limit" x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{height - 24}">'
        f"<title>{label}</title></line>"
    )
    yield f'<text class="over" x="{x}" y="{TOP - 12}" text-anchor="middle">{label}</text>'


# The memory chart as PNG, by matplotlib.


def write_memory_png(chart: Chart, path: Path) -> None:
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
    except ImportError as error:
        raise SetupError(
            "A PNG chart needs matplotlib, which is not installed.",
            remedy="pip install 'tightfit[plot]'    (or --chart chart.html, which needs nothing)",
        ) from error
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
