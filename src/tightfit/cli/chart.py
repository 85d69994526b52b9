"""The memory chart: for each GPU one panel, for each phase one bar stacked by component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.core.errors import UsageError
from tightfit.core.units import GIB, render_bytes
from tightfit.estimate.result import Estimate

COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#8c6d46",
    "#6f7bd1",
    "#999999",
)
"""Told apart with the common colour blindnesses; after Paul Tol's bright set and Okabe and Ito's."""


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

    @property
    def components(self) -> tuple[str, ...]:
        """Every part that is drawn somewhere, in order of appearance."""
        return tuple(
            dict.fromkeys(name for p in self.panels for bar in p.bars for name, _ in bar.parts)
        )

    @property
    def colour_of(self) -> dict[str, str]:
        return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(self.components)}

    @property
    def top_gib(self) -> float:
        """Where the common scale ends: a little past the widest bar or card."""
        sizes = [size for p in self.panels for size in (p.capacity_bytes, *_totals(p))]
        return 1.08 * max(sizes) / GIB


def make_panel(title: str, subtitle: str, estimate: Estimate) -> Panel:
    """One panel from one estimate; parts of no size are left out."""
    bars = tuple(
        Bar(
            phase=phase.name,
            parts=tuple((name, size) for name, size in phase.components.items() if size > 0),
        )
        for phase in estimate.phases
    )
    return Panel(
        title=title, subtitle=subtitle, capacity_bytes=estimate.gpu.capacity_bytes, bars=bars
    )


def write_chart(chart: Chart, path: Path) -> None:
    """PNG or HTML, by the file's ending."""
    if path.suffix.lower() == ".png":
        from tightfit.cli.chart_png import write_png

        write_png(chart, path)
    elif path.suffix.lower() in (".html", ".htm"):
        from tightfit.cli.chart_html import write_html

        write_html(chart, path)
    else:
        raise UsageError(
            f"`--chart {path}` ends neither in .png nor in .html.",
            remedy=f"--chart {path.with_suffix('.html')}",
        )


def pick_ticks(top_gib: float, *, most: int = 8) -> list[float]:
    """Round numbers from 0 to the end of the scale."""
    steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
    step = next((step for step in steps if top_gib / step <= most), top_gib / most)
    return [step * i for i in range(int(top_gib / step) + 1)]


def describe_bar(bar: Bar, panel: Panel) -> str:
    """`12.4 GiB`, and by how much it is over where it is."""
    over = bar.total_bytes - panel.capacity_bytes
    told = render_bytes(bar.total_bytes)
    return f"{told}, {render_bytes(over)} too much" if over > 0 else told


def _totals(panel: Panel) -> Sequence[int]:
    return [bar.total_bytes for bar in panel.bars]
