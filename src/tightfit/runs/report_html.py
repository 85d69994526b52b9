"""One run, or several side by side, as charts and as one HTML file that opens anywhere."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import isfinite
from typing import Any

from tightfit.core.errors import SetupError
from tightfit.core.figures import (
    FIGURE_SCRIPT,
    FIGURE_STYLE,
    INK,
    LIMIT,
    RUN_COLOURS,
    SOFT,
    Hover,
    HoverSeries,
    make_figure,
    render_figure,
    render_page,
    render_table,
    style_axis,
    write_beside,
    write_title,
)
from tightfit.core.files import write_atomic
from tightfit.core.text import escape_html
from tightfit.core.units import GIB, MIB, render_bytes, render_count
from tightfit.runs.metrics import mean
from tightfit.runs.report import (
    UNKNOWN,
    Event,
    PastRun,
    RunReport,
    align_results,
    is_cpu_plan,
    list_differing,
    list_results,
    list_settings,
    read_run,
    render_error,
    render_quantity,
    render_time,
)
from tightfit.runs.run_folder import RunFolder

# One or several runs as a figure: loss and memory by step, predicted beside measured.

MOST_POINTS = 600
"""More than a screen has columns for; a run of a million steps still makes a small page."""
LARGEST_LOSS = 1e9
"""One that has exploded past this would flatten every other."""
FAR_ABOVE = 4.0
"""A capacity this many times the tallest line would flatten all of them: named, not drawn."""
LONGEST_NAME = 40

Points = Sequence[tuple[float, float]]


def load_runs(folders: Iterable[RunFolder]) -> tuple[PastRun, ...]:
    """Read each run once; a name that occurs twice gets its parent folder in front."""
    runs = [read_run(folder) for folder in folders]
    names = Counter(run.name for run in runs)
    return tuple(
        run
        if names[run.name] == 1
        else replace(run, name=f"{run.folder.path.resolve().parent.name}/{run.name}")
        for run in runs
    )


def draw_runs(runs: Sequence[PastRun]) -> tuple[Any, list[Hover]]:
    """The three panels one under another, and the numbers under the pointer."""
    num_rows = sum(len(run.report.compared) for run in runs)
    has_rewards = any(run.report.last_preference is not None for run in runs)
    heights = (
        *(3.4, *([2.8] if has_rewards else []), 2.8),
        0.5 + 0.36 * max(num_rows, 1),
    )
    figure = make_figure(sum(heights) + 2.2, hspace=0.08)
    loss, *rewards, memory, bars = figure.subplots(
        len(heights), 1, gridspec_kw={"height_ratios": heights}
    )
    hovers = [_draw_loss(loss, runs), *(_draw_rewards(axis, runs) for axis in rewards)]
    hovers.append(_draw_memory(memory, runs))
    _draw_compared(bars, runs)
    for axis in (loss, *rewards):
        axis.sharex(memory)
    write_title(figure, describe_runs(runs))
    return figure, [hover for hover in hovers if hover.heads]


def describe_runs(runs: Sequence[PastRun]) -> str:
    if len(runs) != 1:
        return f"{len(runs)} runs"
    report = runs[0].report
    return f"{runs[0].name}: {report.model}, {report.method} on {report.hardware}"


def smooth(points: Points) -> list[tuple[float, float]]:
    """Mean over about a thirtieth of the run around each step.

    Even-sided at the start, where a loss falls steeply and a lagging mean would stand above it.
    """
    half = max(1, len(points) // 60)
    sums = [0.0, *accumulate(y for _, y in points)]
    found = []
    for place, (x, _) in enumerate(points):
        reach = min(half, place)
        low, high = place - reach, min(len(points), place + reach + 1)
        found.append((x, (sums[high] - sums[low]) / (high - low)))
    return found


def thin(
    points: Points, pick: Callable[[Sequence[float]], float]
) -> tuple[tuple[float, float], ...]:
    """At most `MOST_POINTS`, each for a stretch of equally many: its last x and the picked y."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    found = ((group[-1][0], pick([y for _, y in group])) for group in groups)
    return tuple((x, y) for x, y in found if isfinite(y))


def _label(run: PastRun, what: str, runs: Sequence[PastRun]) -> str:
    name = run.name if len(run.name) <= LONGEST_NAME else run.name[: LONGEST_NAME - 3] + "..."
    return what if len(runs) == 1 else f"{name}: {what}"


def _draw_loss(axis: Any, runs: Sequence[PastRun]) -> Hover:
    series: list[HoverSeries] = []

    def draw(points: Points, label: str, *, is_named: bool = True, **style: Any) -> None:
        if points:
            xs, ys = zip(*points, strict=True)
            axis.plot(xs, ys, label=label if is_named else "", **style)
            text = [f"{y:.5g}" for y in ys]
            colour = style["color"]
            series.append(HoverSeries(label=label, colour=colour, x=xs, text=text))

    for run, colour in zip(runs, RUN_COLOURS, strict=False):
        steps = run.steps
        losses = [(float(r.step), r.loss) for r in steps if _is_drawn(r.loss)]
        evals = [(float(r.step), r.loss) for r in run.evals if _is_drawn(r.loss)]
        raw = _label(run, "train", runs)
        draw(thin(losses, mean), raw, is_named=False, color=colour, alpha=0.3, linewidth=0.9)
        smoothed = _label(run, "train, smoothed", runs)
        draw(thin(smooth(losses), mean), smoothed, color=colour, linewidth=1.8)
        draw(
            thin(evals, mean), _label(run, "eval", runs), color=colour, marker="o", markersize=5,
            markeredgecolor="white", linestyle=":", linewidth=1.0, zorder=4,
        )  # fmt: skip
        broken = [record.step for record in steps if not _is_drawn(record.loss)]
        if broken:
            word = "from" if len(broken) > 1 else "at"
            label = _label(run, f"not finite {word} step {broken[0]:,}", runs)
            axis.axvline(broken[0], color=LIMIT, linewidth=1.2, linestyle="--", label=label)
    _finish(
        axis, "Loss: lower is better; eval is on rows held back from training", is_empty=not series
    )
    return _make_hover(axis, series)


def _draw_rewards(axis: Any, runs: Sequence[PastRun]) -> Hover:
    series: list[HoverSeries] = []
    for run, colour in zip(runs, RUN_COLOURS, strict=False):
        for name, style in (("chosen", "-"), ("rejected", ":")):
            points = [
                (float(r.step), value)
                for r in run.steps
                if r.preference is not None
                and (value := getattr(r.preference, f"reward_{name}")) is not None
                and _is_drawn(value)
            ]
            drawn = thin(smooth(points), mean)
            if not drawn:
                continue
            xs, ys = zip(*drawn, strict=True)
            label = _label(run, name, runs)
            axis.plot(xs, ys, label=label, color=colour, linestyle=style, linewidth=1.8)
            text = [f"{y:.4g}" for y in ys]
            series.append(HoverSeries(label=label, colour=colour, x=xs, text=text))
    title = "Rewards of chosen and rejected answers: the distance should grow"
    _finish(axis, title, is_empty=not series)
    return _make_hover(axis, series)


def _is_drawn(loss: float) -> bool:
    return abs(loss) < LARGEST_LOSS  # False for NaN too


def _draw_memory(axis: Any, runs: Sequence[PastRun]) -> Hover:
    series: list[HoverSeries] = []
    levels = []
    for run in runs:
        # Of what torch's reserved memory measures: without the CUDA context.
        gpu, is_cpu = run.plan.estimate.gpu, is_cpu_plan(run.plan)
        levels.append(gpu.peak_reserved_bytes - (0 if is_cpu else gpu.context_bytes))
    peaks = [record.gpu_allocated_bytes for run in runs for record in run.steps]
    tallest = max([*peaks, *levels], default=0)
    unit, word = (GIB, "GiB") if max(peaks, default=0) >= GIB else (MIB, "MiB")
    for run, colour, level in zip(runs, RUN_COLOURS, levels, strict=False):
        is_cpu = is_cpu_plan(run.plan)
        fields = {"gpu_allocated_bytes": "process memory" if is_cpu else "allocated"}
        if not is_cpu:
            fields["gpu_reserved_bytes"] = "reserved"
        for field, what in fields.items():
            is_main = field == "gpu_allocated_bytes"
            points = [(float(r.step), float(getattr(r, field))) for r in run.steps]
            if not points:
                continue
            xs, ys = zip(*thin(points, max), strict=True)
            label = _label(run, what, runs)
            axis.plot(
                xs, [y / unit for y in ys], color=colour, linewidth=1.6 if is_main else 1.0,
                alpha=1.0 if is_main else 0.6, label=label,
            )  # fmt: skip
            text = [render_bytes(y) for y in ys]
            series.append(HoverSeries(label=label, colour=colour, x=xs, text=text))
        label = _label(run, f"predicted peak {render_bytes(level)}", runs)
        axis.axhline(level / unit, color=colour, linestyle="--", linewidth=1.2, label=label)
    is_cpu = all(is_cpu_plan(run.plan) for run in runs)
    for capacity in sorted({run.plan.estimate.gpu.capacity_bytes for run in runs}):
        label = f"{'RAM' if is_cpu else 'card'}: {render_bytes(capacity)}"
        if capacity <= FAR_ABOVE * tallest:
            axis.axhline(capacity / unit, color=LIMIT, linewidth=1.4, label=label)
        else:
            axis.plot([], [], " ", label=f"{label}, far above")
    axis.set_ylabel(word, fontsize=9)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylim(0, max(axis.get_ylim()[1], 1.08 * tallest / unit))
    title = "Memory of the process" if is_cpu else "Memory on the GPU of rank 0"
    _finish(axis, title, is_empty=not series)
    return _make_hover(axis, series)


def _make_hover(axis: Any, series: Sequence[HoverSeries]) -> Hover:
    steps = sorted({x for one in series for x in one.x})
    return Hover(axis=axis, series=series, heads=[(step, f"step {step:,.0f}") for step in steps])


def _draw_compared(axis: Any, runs: Sequence[PastRun]) -> None:
    """Measured as a share of predicted: quantities of different units on one scale."""
    rows = [
        (run, colour, found)
        for run, colour in zip(runs, RUN_COLOURS, strict=False)
        for found in run.report.compared
    ]
    order = list(dict.fromkeys(found.name for _, _, found in rows))
    rows.sort(key=lambda row: order.index(row[2].name))
    for place, (_, colour, found) in enumerate(rows):
        text = f"predicted {render_quantity(found.predicted, found.unit)}"
        percent = 0.0
        if found.measured is not None and found.predicted:
            percent = min(250.0, 100 * found.measured / found.predicted)
            text = f"measured {render_quantity(found.measured, found.unit)}, {text}"
            text += f" ({render_error(found.error_percent)})"
        axis.barh(place, percent, height=0.62, color=colour)
        write_beside(axis, text, (percent, place))
    _finish(axis, "Measured, as a share of what was predicted (100% is as predicted)")
    axis.axvline(100, color=INK, linestyle="--", linewidth=1.2)
    names = [_label(run, found.name, runs) for run, _, found in rows]
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 330)
    axis.set_xticks([0, 50, 100, 150, 200, 250], ["0%", "50%", "100%", "150%", "200%", "250%"])
    axis.grid(visible=False, axis="y")


def _finish(axis: Any, title: str, *, is_empty: bool = False) -> None:
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    style_axis(axis, grid="both")
    axis.tick_params(labelsize=8, colors=SOFT)
    if is_empty:
        axis.text(
            0.5, 0.5, "no step was finished", transform=axis.transAxes, ha="center", color=SOFT,
            fontsize=10,
        )  # fmt: skip
        axis.set_xticks([])
    if axis.get_legend_handles_labels()[0]:
        axis.legend(
            fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.3,
        )  # fmt: skip


PAGE_STYLE = """
h2 { border-top: 1px solid var(--line); padding-top: 1rem; }
.state { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .85rem;
  border: 1px solid var(--line); vertical-align: 3px; margin-left: .4rem; }
.finished { border-color: #228833; color: #228833; }
.failed, .died, .out-of-memory { border-color: var(--limit); color: var(--limit); }
.far { color: var(--limit); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem;
  margin: 1rem 0; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.3rem; } .card small { color: var(--soft); }
td.number, th.number { text-align: right; white-space: nowrap; }
details { margin: .4rem 0; } summary { cursor: pointer; }
"""


def write_html(run: RunFolder) -> None:
    """The report of one run, into its own folder."""
    write_atomic(run.html_path, render_report(load_runs([run])))


def render_report(runs: Sequence[PastRun]) -> str:
    """One run in full; several with their differences first."""
    if len(runs) == 1:
        run = runs[0]
        body = _head(run) + _cards(run.report) + _charts(runs) + _one_run(run)
        return _page(f"{run.name}: run report", body)
    names = ["", *(run.name for run in runs)]
    differing = list_differing([run.plan for run in runs])
    changed = [(name, *values) for name, values in differing.items()]
    states = ("status", *(run.report.status.value for run in runs))
    results = [states, *align_results([run.report for run in runs])]
    title = "Settings that differ"
    body = (
        f"<h1>{len(runs)} runs side by side</h1>\n"
        + (
            render_table(changed, head=names, title=title)
            if changed
            else f"<h2>{title}</h2>\n<p>All settings are the same.</p>\n"
        )
        + render_table(results, head=names, title="Results")
        + _charts(runs)
    )
    for run in runs:
        body += _head(run, level=2) + _one_run(run, is_part=True)
    return _page(f"{len(runs)} runs", body)


def render_plots(runs: Sequence[PastRun]) -> str:
    """The charts alone."""
    title = describe_runs(runs)
    return _page(title, f"<h1>{escape_html(title)}</h1>\n" + _charts(runs))


def _page(title: str, body: str) -> str:
    return render_page(title, body, style=FIGURE_STYLE + PAGE_STYLE, script=FIGURE_SCRIPT)


def _charts(runs: Sequence[PastRun]) -> str:
    try:
        figure, hovers = draw_runs(runs)
    except SetupError as error:  # a report without curves is still a report
        return f"<p>{escape_html(error.problem)} {escape_html(error.remedy)}</p>\n"
    return (
        "<h2>Loss, memory and predictions</h2>\n<p>Loss is how wrong the model's next word is: "
        "lower is better. <em>Train</em> is on the rows it learns from, <em>eval</em> on rows "
        "held back; where eval rises while train falls, it learns by heart. Point at a curve for "
        f"numbers.</p>\n{render_figure(figure, hovers, label='Loss and memory by step')}"
    )


def _head(run: PastRun, *, level: int = 1) -> str:
    report = run.report
    state = report.status.value
    trained = f"{render_count(report.num_trainable_params)} of {render_count(report.num_params)}"
    badge = f'<span class="state {state}">{state}</span>'
    text = (
        f"<h{level}>{escape_html(run.name)} {badge}</h{level}>\n"
        f"<p>{escape_html(f'{report.model}, {report.method} on {report.hardware}')}; {trained} "
        f"parameters trained; last change {escape_html(render_time(report.updated_at))}</p>\n"
    )
    if report.problem:
        text += f'<p class="far">{escape_html(report.problem)}</p>\n'
    if report.remedy:
        text += f"<p>try: {escape_html(report.remedy)}</p>\n"
    return text


def _cards(report: RunReport) -> str:
    """What a reader wants first: did it learn, how long, did it fit."""
    values = {result.label: result.value for result in list_results(report)}
    peak = next(label for label in values if label.endswith("memory, peak"))
    shown = []
    for what, before, after in (
        ("eval loss", "before", "after"),
        ("perplexity", "before", "after"),
        ("train loss", "first", "last"),
    ):
        ends = values[f"{what}, {before}"], values[f"{what}, {after}"]
        shown.append((what, UNKNOWN if set(ends) == {UNKNOWN} else " → ".join(ends)))
    shown += [(label, values[label]) for label in ("time", "tokens per second", peak)]
    cards = "".join(
        f'<div class="card"><small>{escape_html(label)}</small><b>{escape_html(value)}</b></div>'
        for label, value in shown
    )
    return f'<div class="cards">{cards}</div>\n'


def _one_run(run: PastRun, *, is_part: bool = False) -> str:
    report, plan = run.report, run.plan
    compared = [
        (
            found.name,
            render_quantity(found.predicted, found.unit),
            render_quantity(found.measured, found.unit),
            render_error(found.error_percent),
        )
        for found in report.compared
    ]
    results = [(r.label, r.value, r.meaning) for r in list_results(report)]
    notes = [*plan.warnings, *plan.estimate.assumptions]
    return "".join(
        [
            render_table(
                compared,
                head=("", "predicted", "measured", "error"),
                title="Predicted beside measured",
                note="The error is in percent of the measured value: above 0, too much was "
                "predicted.",
            ),
            "" if is_part else render_table(results, title="Results"),
            f"<h2>The plan, and why</h2>\n<p>{escape_html(report.strategy)}</p>{_list(plan.why)}\n",
            _folded("Assumptions and warnings", _list(notes)) if notes else "",
            _events("Changes of plan", report.plan_changes),
            _events("Events", report.events),
            _folded("Settings", render_table(list_settings(plan).items())),
            _folded("Versions and machine", _environment(run)),
        ]
    )


def _environment(run: PastRun) -> str:
    found = run.environment
    if found is None:
        return "<p>Not kept by this run.</p>"
    rows = [
        ("command", shlex.join(found.argv)),
        ("started", found.started_at),
        ("host", f"{found.hostname}, {found.cpu}, {found.num_cores} cores"),
        ("RAM", render_bytes(found.memory_bytes)),
        ("GPUs", ", ".join(found.gpus) or "none"),
        ("driver", f"{found.driver} (up to CUDA {found.driver_cuda})" if found.driver else "-"),
        ("torch built for", f"CUDA {found.torch_cuda}" if found.torch_cuda else "the CPU"),
        ("system", found.platform),
        ("python", found.python),
        ("tightfit", found.tightfit),
        *found.packages.items(),
    ]
    return render_table(rows)


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{escape_html(title)}</summary>{inside}</details>\n"


def _list(notes: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape_html(note)}</li>" for note in notes) + "</ul>"


def _events(title: str, events: Sequence[Event]) -> str:
    rows = [(f"step {event.step:,}", event.text) for event in events]
    return render_table(rows, title=title) if rows else ""
