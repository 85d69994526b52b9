"""The chart of row lengths, as PNG or as one HTML file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.cli.charts.memory import make_figure, save_figure
from tightfit.cli.terminal.output import announce
from tightfit.core.files import write_atomic

_STEPS = (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500)


class Bin(NamedTuple):
    """Rows with `first` to `last` tokens."""

    first: int
    last: int
    num_rows: int


def choose_step(top: int, *, most: int) -> int:
    """A round width that makes at most `most` bins up to `top`."""
    scale = 1
    while True:
        for step in _STEPS:
            if -(-top // (step * scale)) <= most:
                return step * scale
        scale *= 1000


def make_bins(rows_by_length: Mapping[int, int], *, step: int, top: int) -> list[Bin]:
    """Bins of equal width from 1 up to `top`; longer rows are not counted."""
    counts = [0] * -(-top // step)
    for length, num_rows in rows_by_length.items():
        if length <= len(counts) * step:
            counts[(length - 1) // step] += num_rows
    return [Bin(at * step + 1, (at + 1) * step, count) for at, count in enumerate(counts)]


# The chart of row lengths as PNG or as one HTML file.

COLOURS = {"to train on": "#4477aa", "to evaluate on": "#e69f00"}
LIMIT_COLOUR = "#b3261e"
WIDTH, HEIGHT = 960, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 46, 40
NEAR = 1.35
"""A limit up to so far beyond the longest row is drawn; a further one would squeeze the bars."""
_STYLE = "rect { stroke: var(--paper); stroke-width: .5; } rect:hover { opacity: .75; }"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthChart:
    """What is drawn: rows by length, for each side."""

    title: str
    subtitle: str
    sides: Mapping[str, Mapping[int, int]]
    """Rows by length, under the names of `COLOURS`."""
    percentiles: Mapping[str, int]
    seq_len: int

    @property
    def longest(self) -> int:
        return max(length for lengths in self.sides.values() for length in lengths)

    @property
    def shows_limit(self) -> bool:
        return self.seq_len <= NEAR * self.longest

    @property
    def top(self) -> int:
        """Where the scale of lengths ends."""
        return max(self.longest, self.seq_len) if self.shows_limit else self.longest

    def bins(self, name: str) -> list[Bin]:
        return make_bins(self.sides[name], step=choose_step(self.top, most=60), top=self.top)

    @property
    def tallest(self) -> int:
        columns = zip(*(self.bins(name) for name in self.sides), strict=True)
        tallest: int = max(sum(item.num_rows for item in column) for column in columns)
        return tallest

    @property
    def limit_label(self) -> str:
        return f"seq_len {self.seq_len:,}"


def write_length_chart(chart: LengthChart, path: Path) -> None:
    """PNG or HTML, by the file's ending."""
    if path.suffix.lower() == ".png":
        _write_png(chart, path)
    else:
        write_atomic(path, render_length_html(chart))
    announce(path)


def _write_png(chart: LengthChart, path: Path) -> None:
    figure = make_figure(4.6)
    axis = figure.subplots()
    _draw_bars(axis, chart)
    _draw_lines(axis, chart)
    # Dollar signs in a file's name are no mathematics.
    axis.set_title(
        chart.title, loc="left", fontsize=13, fontweight="bold", pad=36, parse_math=False
    )
    axis.annotate(
        chart.subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 24), parse_math=False,
        textcoords="offset points", fontsize=9, color="#555555",
    )  # fmt: skip
    with warnings.catch_warnings():
        # The chart's font lacks some scripts; a box in a file's name is no reason for alarm.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        save_figure(figure, path)


def _draw_bars(axis: Any, chart: LengthChart) -> None:
    bottom = [0] * len(chart.bins(next(iter(chart.sides))))
    for name in chart.sides:
        bins = chart.bins(name)
        axis.bar(
            [item.first - 0.5 for item in bins], [item.num_rows for item in bins],
            width=bins[0].last - bins[0].first + 1, align="edge", bottom=bottom,
            color=COLOURS[name], edgecolor="white", linewidth=0.4, label=name,
        )  # fmt: skip
        bottom = [below + item.num_rows for below, item in zip(bottom, bins, strict=True)]
    if len(chart.sides) > 1:
        axis.legend(frameon=False, fontsize=8)
    axis.set_xlabel("tokens in a row")
    axis.set_ylabel("rows")
    axis.set_xlim(0, chart.top * 1.02)
    axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_lines(axis: Any, chart: LengthChart) -> None:
    marks = [(f"{name} {at:,}", at, "#555555", ":") for name, at in _spread(chart)]
    if chart.shows_limit:
        marks.append((chart.limit_label, chart.seq_len, LIMIT_COLOUR, "--"))
    for label, at, colour, line in marks:
        axis.axvline(at, color=colour, linewidth=1.2, linestyle=line, zorder=3)
        axis.annotate(
            label, (at, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", fontsize=8, color=colour,
        )  # fmt: skip


def _spread(chart: LengthChart) -> Iterator[tuple[str, int]]:
    """Percentiles whose labels do not run into each other or into the limit's."""
    taken = [chart.seq_len] if chart.shows_limit else []
    for name, at in chart.percentiles.items():
        if all(abs(at - other) > 0.09 * chart.top for other in taken):
            taken.append(at)
            yield name, at


def render_length_html(chart: LengthChart) -> str:
    """The whole document."""
    from tightfit.core.html_page import render_page

    height = HEIGHT - BOTTOM
    inside = "".join([*_axis(chart, height), *_columns(chart, height), *_lines(chart, height)])
    legend = "".join(
        f'<li><span style="background:{COLOURS[name]}"></span>{escape(name)}</li>'
        for name in chart.sides
    )
    return render_page(
        chart.title,
        f"<h1>{escape(chart.title)}</h1>\n<p>{escape(chart.subtitle)}</p>\n"
        f'<ul class="legend">{legend}</ul>\n'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title, quote=True)}">{inside}</svg>\n',
        style=_STYLE,
    )


def _x(length: float, chart: LengthChart) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * length / (chart.top * 1.02), 2)


def _y(num_rows: float, chart: LengthChart, height: int) -> float:
    return round(height - (height - TOP) * num_rows / chart.tallest, 2)


def _axis(chart: LengthChart, height: int) -> Iterator[str]:
    for tick in _ticks(chart.tallest, most=5):
        y = _y(tick, chart, height)
        yield f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>'
        yield f'<text class="soft" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:,}</text>'
    for tick in _ticks(chart.top, most=8):
        x = _x(tick, chart)
        yield f'<text class="soft" x="{x}" y="{height + 18}" text-anchor="middle">{tick:,}</text>'
    yield f'<text class="soft" x="{LEFT - 8}" y="{TOP - 14}" text-anchor="end">rows</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield (
        f'<text class="soft" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">'
        "tokens in a row</text>"
    )


def _ticks(top: int, *, most: int) -> range:
    return range(0, top + 1, choose_step(top, most=most))


def _columns(chart: LengthChart, height: int) -> Iterator[str]:
    done: dict[int, int] = {}
    for name in chart.sides:
        for item in chart.bins(name):
            if not item.num_rows:
                continue
            below = done.get(item.first, 0)
            done[item.first] = below + item.num_rows
            left, right = _x(item.first - 1, chart), _x(item.last, chart)
            bottom, top = _y(below, chart, height), _y(below + item.num_rows, chart, height)
            label = f"{item.first:,} to {item.last:,} tokens: {item.num_rows:,} rows {name}"
            yield (
                f'<rect x="{left}" y="{top}" width="{right - left:.2f}" '
                f'height="{max(bottom - top, 0.5):.2f}" fill="{COLOURS[name]}">'
                f"<title>{escape(label)}</title></rect>"
            )


def _lines(chart: LengthChart, height: int) -> Iterator[str]:
    marks = [("grid", "soft", f"{name} {at:,}", at) for name, at in _spread(chart)]
    if chart.shows_limit:
        marks.append(("limit", "over", chart.limit_label, chart.seq_len))
    for line, kind, label, at in marks:
        x = _x(at, chart)
        yield f'<line class="{line}" x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{height}"/>'
        yield f'<text class="{kind}" x="{x}" y="{TOP - 12}" text-anchor="middle">{label}</text>'
