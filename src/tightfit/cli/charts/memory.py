"""The memory chart: for each GPU one panel, for each phase one bar stacked by component."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.cli.terminal.harmless import shorten
from tightfit.cli.terminal.output import announce
from tightfit.core.errors import UsageError
from tightfit.core.files import check_writable
from tightfit.core.units import GIB, render_bytes
from tightfit.estimate.result import Estimate
from tightfit.planning.explain import fullest_phases

NAMED_COLOURS = {
    "weights": "#4477aa",
    "adapters": "#ee6677",
    "gradients": "#aa3377",
    "optimizer": "#66ccee",
    "activations": "#e69f00",
    "logits": "#009e73",
    "communication": "#6f7bd1",
    "kv cache": "#8c6d46",
    "quantization": "#cc79a7",
    "dequantized": "#228833",
    "allocator slack": "#b0b0b0",
    "cuda context": "#7f7f7f",
}
"""Told apart with the common colour blindnesses; after Paul Tol's and Okabe and Ito's sets.

What is no tensor of the job is grey.
"""
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
        known = [name for name in NAMED_COLOURS if name in drawn]
        return (*known, *(name for name in drawn if name not in NAMED_COLOURS))

    @property
    def colour_of(self) -> dict[str, str]:
        others = [name for name in self.components if name not in NAMED_COLOURS]
        drawn = {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
        return {name: NAMED_COLOURS.get(name) or drawn[name] for name in self.components}

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
        from tightfit.cli.charts.memory_png import write_png

        write_png(chart, path)
    else:
        from tightfit.cli.charts.memory_html import write_html

        write_html(chart, path)
    announce(path)


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


def _order(components: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """The same order in every bar, so that equal parts stand under each other."""
    places = {name: place for place, name in enumerate(NAMED_COLOURS)}
    named = [(name.replace("_", " "), size) for name, size in components.items() if size > 0]
    return tuple(sorted(named, key=lambda part: places.get(part[0], 4)))


def _totals(panel: Panel) -> Sequence[int]:
    return [bar.total_bytes for bar in panel.bars]
