"""The chart of a trace: memory over the job by category, with the card's capacity and the peak."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import ceil
from pathlib import Path
from typing import Any

from tightfit.cli.terminal.output import announce
from tightfit.cli.terminal.trace_text import (
    describe_effort,
    describe_maker,
    describe_place,
    describe_tensor,
)
from tightfit.core.figures import (
    INK,
    LIMIT,
    MEMORY_COLOURS,
    ON_WHITE,
    SOFT,
    Hover,
    HoverSeries,
    draw_legend,
    make_figure,
    pick_colours,
    render_table,
    style_axis,
    write_figure,
    write_title,
)
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB, render_bytes
from tightfit.estimation.result import Estimate
from tightfit.hardware.types import Gpu
from tightfit.planning.describe import describe_how, describe_levers
from tightfit.trace.result import Timeline, TracedMemory

CONTEXT = "cuda context"
COLOURS = MEMORY_COLOURS | {
    "inputs": "#994455",
    "load reserve": "#88ccaa",
    "temporary": "#ccbb44",
}
MOST_EMPTY = 2.5
"""A card that is larger than this many times the job is named, not drawn: it would leave the job
a strip at the bottom."""
SHORTEST_SHARE = 14
"""A stage is drawn at least so much of the width: one part in this many."""
LETTER_FRACTION = 0.0085
"""Of the width, that a letter of a name under the picture takes."""
MOST_NAMED = 0.8
"""Of the width, that names may take before moments are drawn without regard to them."""
MOST_STRETCHES = 6
LETTERS_PER_LINE = 125
"""Letters of small print across the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring columns under one name, as `first step, forward`."""

    name: str
    start: int
    end: int

    @property
    def stage(self) -> str:
        return self.name.partition(", ")[0]

    @property
    def part(self) -> str:
        return self.name.partition(", ")[2]

    def has_room(self, name: str, num_columns: int) -> bool:
        """Whether a name under the picture can be read."""
        return self.end - self.start >= LETTER_FRACTION * len(name) * num_columns


@dataclass(frozen=True, kw_only=True)
class TracePanel:
    """One traced job on one card. Without slots, so that sums are made once and kept."""

    title: str
    subtitle: str = ""
    traced: TracedMemory
    capacity_bytes: int
    """The card's, the context's share included."""
    context_bytes: int

    @cached_property
    def timeline(self) -> Timeline:
        """The trace's, with short moments made long enough to be seen."""
        return stretch(self.traced.timeline)

    @cached_property
    def num_columns(self) -> int:
        return _count_columns(self.timeline)

    @cached_property
    def layers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and bytes per column as they are stacked: the context below everything."""
        context = (self.context_bytes,) * self.num_columns
        rows = zip(self.timeline.categories, self.timeline.bytes, strict=True)
        return ((CONTEXT, context), *rows)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(row for _, row in self.layers), strict=True)))

    @cached_property
    def peak_column(self) -> int:
        """The fullest column of the moment that the trace calls its peak; stages of later
        processes may be fuller."""
        moment = self.traced.peak.stage
        stage = moment.partition(",")[0]
        named = [span for span in self.moments if span.name in (moment, stage)]
        columns = [column for span in named for column in range(span.start, span.end)]
        return max(columns or range(self.num_columns), key=self.totals.__getitem__)

    @cached_property
    def top_bytes(self) -> float:
        """Where the scale ends."""
        highest = max(self.totals, default=1)
        if self.capacity_bytes > MOST_EMPTY * highest:
            return 1.25 * highest
        return 1.08 * max(highest, self.capacity_bytes)

    @cached_property
    def moments(self) -> tuple[Span, ...]:
        """`first step, forward` and the like."""
        return tuple(_list_spans(self.timeline))

    @cached_property
    def stages(self) -> tuple[Span, ...]:
        """`first step` and the like: moments of one stage together."""
        return _join_stages(self.moments)


def make_trace_panel(
    strategy: Strategy,
    gpu: Gpu,
    estimate: Estimate,
    traced: TracedMemory,
    *,
    number: int | None = None,
) -> TracePanel:
    """The panel of one strategy on one card, with its rank where there are several."""
    how = describe_how(strategy, gpu.name)
    return TracePanel(
        title=how if number is None else f"{number}. {how}",
        subtitle=describe_levers(strategy),
        traced=traced,
        capacity_bytes=estimate.gpu.capacity_bytes,
        context_bytes=estimate.gpu.context_bytes,
    )


def stretch(timeline: Timeline) -> Timeline:
    """The same with the columns of short stages repeated: saving is few events, yet a stage.

    What is repeated makes the picture longer and the others' share of it smaller, hence again.
    """
    num_columns = _count_columns(timeline)
    for _ in range(MOST_STRETCHES):
        stretched = _stretch(timeline, num_columns)
        num_columns = _count_columns(stretched)
        moments = _list_spans(stretched)
        if all(span.has_room(span.part or span.stage, num_columns) for span in moments):
            break
    return stretched


def _stretch(timeline: Timeline, num_columns: int) -> Timeline:
    """For a picture of so many columns in all."""
    moments = tuple(_list_spans(timeline))
    named = LETTER_FRACTION * sum(len(span.part or span.stage) for span in moments)
    # Of a stage that comes twice, the first.
    lengths = {span.name: span.end - span.start for span in reversed(_join_stages(moments))}
    least_stage = num_columns / SHORTEST_SHARE
    least_moment = num_columns / max(SHORTEST_SHARE, 2 * len(moments))
    letter = LETTER_FRACTION * num_columns if named < MOST_NAMED else 0.0
    columns: list[int] = []
    stages: list[tuple[int, str]] = []
    for span in moments:
        stages.append((len(columns), span.name))
        in_stage = least_stage / lengths[span.stage]
        least = max(least_moment, letter * len(span.part or span.stage))
        times = ceil(max(1.0, in_stage, least / (span.end - span.start)))
        columns += [column for column in range(span.start, span.end) for _ in range(times)]
    rows = tuple(tuple(row[column] for column in columns) for row in timeline.bytes)
    return Timeline(categories=timeline.categories, bytes=rows, stages=tuple(stages))


def _list_spans(timeline: Timeline) -> Iterator[Span]:
    ends = [start for start, _ in timeline.stages[1:]] + [_count_columns(timeline)]
    for (start, name), end in zip(timeline.stages, ends, strict=False):
        yield Span(name=name, start=start, end=end)


def _join_stages(moments: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbouring moments of one stage as one."""
    groups = [list(group) for _, group in groupby(moments, key=lambda span: span.stage)]
    return tuple(Span(name=g[0].stage, start=g[0].start, end=g[-1].end) for g in groups)


def _count_columns(timeline: Timeline) -> int:
    return len(timeline.bytes[0]) if timeline.bytes else 0


def write_trace_chart(model_name: str, panels: Sequence[TracePanel], path: Path) -> None:
    """One panel for each traced job; PNG or HTML, by the file's ending."""
    title = f"{model_name}: GPU memory over the step"
    names = list(dict.fromkeys(name for panel in panels for name, _ in panel.layers))
    colour_of = pick_colours(names, COLOURS)
    figure = make_figure(4.6 * len(panels) + 1.3, hspace=0.06)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for panel, axis in zip(panels, axes, strict=True):
        _draw_panel(axis, panel, colour_of)
    write_title(figure, title)
    draw_legend(figure, colour_of)
    drawn = [pair for pair in zip(panels, axes, strict=True) if pair[0].num_columns]
    hovers = [_make_hover(axis, panel, colour_of) for panel, axis in drawn]
    tables = "".join(map(_render_tables, panels))
    write_figure(figure, path, title=title, hovers=hovers, more=tables)
    announce(path)


def _draw_panel(axis: Any, panel: TracePanel, colour_of: dict[str, str]) -> None:
    peak = panel.traced.peak_allocated_bytes + panel.context_bytes
    needed = panel.traced.smallest_capacity_bytes + panel.context_bytes
    short = needed - panel.capacity_bytes
    over = f", {render_bytes(short)} more than the card" if short > 0 else ""
    summary = (
        f"Peak {render_bytes(peak)} with the CUDA context; "
        f"survives in {render_bytes(needed)}{over}."
    )
    if not panel.num_columns:
        summary = "Nothing was allocated."
    lines = textwrap.wrap(f"{panel.subtitle}. {summary}".lstrip(". "), LETTERS_PER_LINE)
    # Room for the small print, and under it two lines about the peak.
    axis.set_title(
        panel.title, loc="left", fontsize=10, fontweight="bold", pad=36 + 11 * len(lines)
    )
    axis.annotate(
        "\n".join(lines), (0, 1), xycoords="axes fraction", xytext=(0, 32),
        textcoords="offset points", fontsize=8, color=SOFT,
    )  # fmt: skip
    axis.set_xlim(0, max(panel.num_columns, 1))
    axis.set_ylim(0, panel.top_bytes / GIB)
    axis.set_ylabel("GiB on each GPU", fontsize=9)
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0, labelsize=9)
    style_axis(axis, grid="y")
    if not panel.num_columns:
        return
    # From the whole down to the context, each area over the one before.
    sums = list(accumulate((row for _, row in panel.layers), _add))
    for (name, _), row in reversed(list(zip(panel.layers, sums, strict=True))):
        starts, sizes = _list_runs(row)
        edges = [*starts, panel.num_columns]
        axis.stairs([n / GIB for n in sizes], edges, fill=True, color=colour_of[name], zorder=2)
    _draw_spans(axis, panel)
    _draw_capacity(axis, panel)
    _draw_peak(axis, panel)


def _add(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sum, zip(one, other, strict=True)))


def _list_runs(row: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where neighbouring columns of one size begin, and their sizes."""
    starts = [at for at in range(len(row)) if at == 0 or row[at] != row[at - 1]]
    return starts, [row[at] for at in starts]


def _draw_spans(axis: Any, panel: TracePanel) -> None:
    """Lines where moments begin; their names under the plot, stages under those."""
    edges = {stage.start for stage in panel.stages}
    for is_stage, spans in ((False, panel.moments), (True, panel.stages)):
        for span in spans:
            if span.start and (is_stage or span.start not in edges):
                axis.axvline(
                    span.start, color=INK, linewidth=0.8 if is_stage else 0.6,
                    linestyle="-" if is_stage else ":", alpha=0.6, zorder=3,
                )  # fmt: skip
            name = span.name if is_stage else span.part
            if span.has_room(name, panel.num_columns):
                axis.annotate(
                    name, ((span.start + span.end) / 2, 0), xycoords=("data", "axes fraction"),
                    xytext=(0, -19 if is_stage else -6), textcoords="offset points",
                    ha="center", va="top", fontsize=8,
                    fontweight="bold" if is_stage else "normal", color=INK if is_stage else SOFT,
                )  # fmt: skip


def _draw_capacity(axis: Any, panel: TracePanel) -> None:
    """The card's line, or its size where it is above the picture; away from the peak."""
    label = f"card: {render_bytes(panel.capacity_bytes)}"
    height = min(panel.capacity_bytes, panel.top_bytes) / GIB
    if panel.capacity_bytes <= panel.top_bytes:
        axis.axhline(height, color=LIMIT, linewidth=1.4, linestyle="--", zorder=4)
    else:
        label += ", above this picture"
    is_left = panel.peak_column > panel.num_columns / 2
    is_low = height < 0.94 * panel.top_bytes / GIB
    axis.annotate(
        label, (0 if is_left else 1, height), xycoords=("axes fraction", "data"),
        xytext=(4 if is_left else -4, 4 if is_low else -4), textcoords="offset points",
        ha="left" if is_left else "right", va="bottom" if is_low else "top", fontsize=8,
        color=LIMIT, zorder=6, bbox=ON_WHITE,
    )  # fmt: skip


def _draw_peak(axis: Any, panel: TracePanel) -> None:
    """What it is over the plot, and a line from there down to the place."""
    column = panel.peak_column + 0.5
    size = panel.totals[panel.peak_column]
    style = {"color": INK, "zorder": 5}
    top = panel.top_bytes / GIB
    axis.plot([column, column], [size / GIB, top], linewidth=0.9, clip_on=False, **style)
    axis.plot([column], [size / GIB], marker="o", markersize=3.5, **style)
    share = column / panel.num_columns
    is_late = share > 0.5
    room = int(LETTERS_PER_LINE * (share if is_late else 1 - share))
    label = f"peak {render_bytes(size)}, {describe_place(panel.traced.peak)}"
    axis.annotate(
        "\n".join(textwrap.wrap(label, room, max_lines=2, placeholder=" ...")),
        (column, 1), xycoords=("data", "axes fraction"), xytext=(0, 4),
        textcoords="offset points", ha="right" if is_late else "left", fontsize=8,
        fontweight="bold", color=INK,
    )  # fmt: skip


def _make_hover(axis: Any, panel: TracePanel, colour_of: dict[str, str]) -> Hover:
    """The size of each category, their sum and what is over the card, column by column."""
    over = tuple(max(0, total - panel.capacity_bytes) for total in panel.totals)
    rows = [(name, colour_of[name], row) for name, row in reversed(panel.layers)]
    rows += [("together", "none", panel.totals), ("over the card by", LIMIT, over)]
    series = []
    for name, colour, row in rows:
        starts, sizes = _list_runs(row)
        text = [render_bytes(size) if size else "" for size in sizes]
        series.append(HoverSeries(label=name, colour=colour, x=starts, text=text))
    peak = panel.peak_column
    heads = {span.start: span.name for span in panel.moments}
    at_peak = next(span.name for span in reversed(panel.moments) if span.start <= peak)
    place = describe_place(panel.traced.peak).partition(": ")[2]
    heads.setdefault(peak + 1, at_peak)
    heads[peak] = f"{at_peak}: the peak, {place}"
    return Hover(
        axis=axis, series=series, heads=sorted(heads.items()), is_steps=True, start=peak + 0.5
    )


def _render_tables(panel: TracePanel) -> str:
    """Under the picture: the peak of each stage, and the tensors alive at the largest."""
    context = panel.context_bytes
    stages = [
        (
            stage.name,
            render_bytes(stage.peak_allocated_bytes + context),
            render_bytes(stage.peak_reserved_bytes + context),
        )
        for stage in panel.traced.stages
    ]
    tensors = [
        (render_bytes(one.num_bytes), one.category, describe_tensor(one), describe_maker(one))
        for one in panel.traced.peak.tensors
    ]
    return render_table(
        stages,
        head=("stage", "allocated", "reserved"),
        title=f"{panel.title}: peak of each stage, with the CUDA context",
        note=describe_effort(panel.traced),
    ) + render_table(
        tensors,
        head=("size", "part", "tensors", "made by"),
        title="Tensors at the peak",
        note=describe_place(panel.traced.peak),
    )
