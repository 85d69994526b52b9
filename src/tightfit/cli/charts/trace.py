"""The traced chart: memory over the job by category, the card as a line, the peak named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

from tightfit.cli.charts.memory import NAMED_COLOURS, OTHER_COLOURS
from tightfit.cli.describe import describe_how, describe_levers
from tightfit.cli.render.trace import describe_place
from tightfit.cli.terminal.output import announce
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB, render_bytes
from tightfit.estimate.result import Estimate
from tightfit.estimate.trace.result import Timeline, TracedMemory
from tightfit.hardware.types import Gpu

CONTEXT = "cuda context"
COLOURS = NAMED_COLOURS | {
    "inputs": "#994455",
    "load reserve": "#88ccaa",
    "temporary": "#ccbb44",
}
ROOM_ABOVE = 1.08
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring columns under one name."""

    name: str
    start: int
    end: int

    @property
    def stage(self) -> str:
        """`first step` of `first step, forward`."""
        return self.name.partition(", ")[0]

    @property
    def part(self) -> str:
        """`forward` of `first step, forward`."""
        return self.name.partition(", ")[2]


@dataclass(frozen=True, kw_only=True)
class TracePanel:
    """One traced job on one card. Without slots, so that sums are made once and kept."""

    title: str
    subtitle: str
    traced: TracedMemory
    timeline: Timeline
    """The trace's, with short moments made long enough to be seen."""
    capacity_bytes: int
    context_bytes: int

    @cached_property
    def num_columns(self) -> int:
        return _count_columns(self.timeline)

    @cached_property
    def layers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and bytes per column as they are stacked: the context below everything."""
        timeline = self.timeline
        context = (self.context_bytes,) * self.num_columns
        return ((CONTEXT, context), *zip(timeline.categories, timeline.bytes, strict=True))

    @cached_property
    def stacked(self) -> tuple[tuple[int, ...], ...]:
        """The upper edge of each of `layers`."""
        edges: list[tuple[int, ...]] = []
        for _, row in self.layers:
            below = edges[-1] if edges else (0,) * self.num_columns
            edges.append(tuple(low + size for low, size in zip(below, row, strict=True)))
        return tuple(edges)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        return self.stacked[-1]

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
        return ROOM_ABOVE * max(highest, self.capacity_bytes)

    @cached_property
    def has_line(self) -> bool:
        """Whether the card's capacity is inside the picture."""
        return self.capacity_bytes <= self.top_bytes

    @cached_property
    def moments(self) -> tuple[Span, ...]:
        """`first step, forward` and the like."""
        return tuple(_list_spans(self.timeline))

    @cached_property
    def stages(self) -> tuple[Span, ...]:
        """`first step` and the like: moments of one stage together."""
        return _gather(self.moments)

    def has_room(self, span: Span, name: str) -> bool:
        """Whether a name under the picture can be read."""
        return _has_room(span, name, self.num_columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChart:
    """One panel for each traced job."""

    title: str
    panels: tuple[TracePanel, ...]
    subtitle: str = ""

    @property
    def colour_of(self) -> dict[str, str]:
        """Of every category that is drawn somewhere, in stacking order."""
        names = dict.fromkeys(name for panel in self.panels for name, _ in panel.layers)
        others = [name for name in names if name not in COLOURS]
        drawn = {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
        return {name: COLOURS.get(name) or drawn[name] for name in names}


def make_trace_panel(
    title: str,
    traced: TracedMemory,
    *,
    capacity_bytes: int,
    context_bytes: int,
    subtitle: str = "",
) -> TracePanel:
    """One panel from one trace. `capacity_bytes` is the card's, the context's share included."""
    return TracePanel(
        title=title,
        subtitle=subtitle,
        traced=traced,
        timeline=stretch(traced.timeline),
        capacity_bytes=capacity_bytes,
        context_bytes=context_bytes,
    )


def make_strategy_panel(
    strategy: Strategy,
    gpu: Gpu,
    estimate: Estimate,
    traced: TracedMemory,
    *,
    number: int | None = None,
) -> TracePanel:
    """The panel of one strategy on one card, with its place where there are several."""
    how = describe_how(strategy, gpu.name)
    return make_trace_panel(
        how if number is None else f"{number}. {how}",
        traced,
        capacity_bytes=estimate.gpu.capacity_bytes,
        context_bytes=estimate.gpu.context_bytes,
        subtitle=describe_levers(strategy),
    )


def write_trace_panels(model_name: str, panels: tuple[TracePanel, ...], path: Path) -> None:
    """Panels of one model as a chart."""
    title = f"{model_name}: GPU memory over the step"
    write_trace_chart(TraceChart(title=title, panels=panels), path)


def stretch(timeline: Timeline) -> Timeline:
    """The same with the columns of short stages repeated: saving is few events, yet a stage.

    What is repeated makes the picture longer and the others' share of it smaller, hence again.
    """
    num_columns = _count_columns(timeline)
    for _ in range(MOST_STRETCHES):
        stretched = _stretch(timeline, num_columns)
        num_columns = _count_columns(stretched)
        moments = _list_spans(stretched)
        if all(_has_room(span, span.part or span.stage, num_columns) for span in moments):
            break
    return stretched


def _has_room(span: Span, name: str, num_columns: int) -> bool:
    return span.end - span.start >= LETTER_FRACTION * len(name) * num_columns


def _stretch(timeline: Timeline, num_columns: int) -> Timeline:
    """For a picture of so many columns in all."""
    moments = tuple(_list_spans(timeline))
    named = LETTER_FRACTION * sum(len(span.part or span.stage) for span in moments)
    lengths = {
        span.name: span.end - span.start for span in reversed(_gather(moments))
    }  # of a stage that comes twice, the first
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


def write_trace_chart(chart: TraceChart, path: Path) -> None:
    """PNG or HTML, by the file's ending; `check_chart_path` has refused others."""
    if path.suffix.lower() == ".png":
        from tightfit.cli.charts.trace_png import write_png

        write_png(chart, path)
    else:
        from tightfit.cli.charts.trace_html import write_html

        write_html(chart, path)
    announce(path)


def describe_panel(panel: TracePanel) -> str:
    """What the picture shows, in one sentence."""
    peak = panel.traced.peak_allocated_bytes + panel.context_bytes
    needed = panel.traced.smallest_capacity_bytes + panel.context_bytes
    short = needed - panel.capacity_bytes
    over = f", {render_bytes(short)} more than the card" if short > 0 else ""
    return (
        f"Peak {render_bytes(peak)} with the CUDA context; "
        f"survives in {render_bytes(needed)}{over}."
    )


def describe_card(panel: TracePanel) -> str:
    """`card: 23.5 GiB`, and that it is not to be seen where it is not."""
    told = f"card: {render_bytes(panel.capacity_bytes)}"
    return told if panel.has_line else f"{told}, above this picture"


def describe_top(panel: TracePanel) -> str:
    """`peak 17.3 GiB, steady step, backward: aten.mm in model.layers.3.mlp`."""
    size = render_bytes(panel.totals[panel.peak_column])
    return f"peak {size}, {describe_place(panel.traced.peak)}"


def list_runs(row: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring columns of one value: start, end, value."""
    start = 0
    for column in range(1, len(row) + 1):
        if column == len(row) or row[column] != row[start]:
            yield start, column, row[start]
            start = column


def _list_spans(timeline: Timeline) -> Iterator[Span]:
    ends = [start for start, _ in timeline.stages[1:]] + [_count_columns(timeline)]
    for (start, name), end in zip(timeline.stages, ends, strict=False):
        yield Span(name=name, start=start, end=end)


def _gather(moments: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbouring moments of one stage as one."""
    found: list[Span] = []
    for moment in moments:
        start = moment.start
        if found and found[-1].name == moment.stage:
            start = found.pop().start
        found.append(Span(name=moment.stage, start=start, end=moment.end))
    return tuple(found)


def _count_columns(timeline: Timeline) -> int:
    return len(timeline.bytes[0]) if timeline.bytes else 0


def to_gib(num_bytes: float) -> float:
    return num_bytes / GIB
