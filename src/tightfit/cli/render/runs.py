"""Runs as tables: a list, one run, several beside each other."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from tightfit.cli.terminal.screen import Column, heading, make_table, plain, render_notes, show
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_count
from tightfit.runs.charts import RunView
from tightfit.runs.find import (
    DEFAULT_FOLDER,
    FoundRun,
)
from tightfit.runs.report import Comparison, RunReport, list_differing
from tightfit.runs.report_words import (
    UNKNOWN,
    align_results,
    list_results,
    render_error,
    render_progress,
    render_quantity,
    render_time,
)
from tightfit.runs.run_folder import RunStatus

# Runs as text: a list, one in full, several side by side.

STATUS_STYLES = {
    RunStatus.PREPARED: "dim",
    RunStatus.RUNNING: "bold cyan",
    RunStatus.FINISHED: "bold green",
    RunStatus.STOPPED: "yellow",
    RunStatus.OUT_OF_MEMORY: "bold yellow",
    RunStatus.FAILED: "bold red",
    RunStatus.DIED: "bold red",
}
FAR_OFF_PERCENT = 10.0
"""A prediction further off than this is coloured."""
MOST_EVENTS = 20


def show_list(found: Sequence[FoundRun]) -> None:
    show(_render_list(found))


def show_run(run: RunView) -> None:
    show(_render_run(run))


def show_comparison(runs: Sequence[RunView]) -> None:
    show(_render_comparison(runs))


def _render_list(found: Sequence[FoundRun]) -> Iterator[RenderableType]:
    if not found:
        yield f"No runs in {DEFAULT_FOLDER}/ yet."
        yield "Start one: tightfit train MODEL --data FILE --on here"
        return
    columns = (
        Column(title="run", keep=False, style="bold"),
        Column(title="status"),
        Column(title="model", keep=False),
        Column(title="method"),
        Column(title="steps", right=True),
        Column(title="loss", right=True),
        Column(title="eval", right=True),
        Column(title="changed"),
    )
    yield make_table(columns, [_list_row(run) for run in found])
    broken = [f"{run.folder.path}: {run.fault.problem}" for run in found if run.fault is not None]
    yield from render_notes("Cannot be read", broken)
    yield ""
    yield plain(f"{count_of(len(found), 'run')}. One in full: tightfit runs {_quoted(found[0])}")


def _list_row(run: FoundRun) -> tuple[str | Text, ...]:
    path, report = sanitize(str(run.folder.path)), run.report
    if report is None:
        return (path, Text("unreadable", style="bold red"), "", "", "", "", "", "")
    after = report.eval_after or report.eval_before
    return (
        path,
        _status(report.status),
        sanitize(report.model.rpartition("/")[2]),
        report.method,
        render_progress(report),
        _loss(report.last_loss),
        _loss(after.loss if after is not None else None),
        render_time(report.updated_at).removesuffix(" UTC"),
    )


def _render_run(run: RunView) -> Iterator[RenderableType]:
    report = run.report
    yield Text.assemble((sanitize(run.curves.name), "bold"), "  ", _status(report.status))
    yield from _render_subject(report)
    yield ""
    columns = (
        Column(title="result"),
        Column(title="value", right=True),
        Column(title="", keep=False, style="dim"),
    )
    yield make_table(columns, [(r.label, r.value, r.meaning) for r in list_results(report)])
    yield ""
    yield heading("Predicted beside measured")
    yield _render_compared(report.compared)
    yield from render_notes("Why this plan", run.past.plan.why)
    changes = [f"step {event.step:,}: {event.text}" for event in report.plan_changes]
    yield from render_notes("Changes of plan", changes)
    events = [f"step {event.step:,}: {event.text}" for event in report.events]
    yield from render_notes("Events", events[-MOST_EVENTS:])
    yield ""
    name = shlex.quote(str(run.past.folder.path))
    yield plain(f"The same with curves, in a browser: tightfit runs {name} --html report.html")


def _render_subject(report: RunReport) -> Iterator[RenderableType]:
    trained = f"{render_count(report.num_trainable_params)} of {render_count(report.num_params)}"
    yield plain(f"{report.model} on {report.hardware}; {trained} parameters trained")
    yield plain(report.strategy)
    yield plain(f"last change {render_time(report.updated_at)}")
    if report.problem:
        yield Text(sanitize(report.problem), style="red")
    if report.remedy:
        yield plain(f"  try: {report.remedy}")


def _render_compared(compared: Sequence[Comparison]) -> RenderableType:
    columns = (
        Column(title="quantity"),
        Column(title="predicted", right=True),
        Column(title="measured", right=True),
        Column(title="error", right=True),
    )
    rows = [
        (
            found.name,
            render_quantity(found.predicted, found.unit),
            render_quantity(found.measured, found.unit),
            _error(found.error_percent),
        )
        for found in compared
    ]
    return make_table(columns, rows)


def _render_comparison(runs: Sequence[RunView]) -> Iterator[RenderableType]:
    names = [sanitize(run.curves.name) for run in runs]
    columns = (Column(title="setting"), *(Column(title=name, keep=False) for name in names))
    differing = list_differing([run.past.plan for run in runs])
    if differing:
        yield heading("Settings that differ")
        yield make_table(columns, [(name, *values) for name, values in differing.items()])
    else:
        yield plain("All settings are the same.")
    yield ""
    yield heading("Results")
    rows: list[tuple[str | Text, ...]] = [("status", *(_status(r.report.status) for r in runs))]
    rows += align_results([run.report for run in runs])
    yield make_table((Column(title="result"), *columns[1:]), rows)
    yield ""
    yield heading("How far predictions were off (above 0: predicted too much)")
    errors = [{found.name: found.error_percent for found in r.report.compared} for r in runs]
    quantities = dict.fromkeys(name for side in errors for name in side)
    reported: list[tuple[str | Text, ...]] = [
        (name, *(_error(side.get(name)) for side in errors)) for name in quantities
    ]
    yield make_table((Column(title="quantity"), *columns[1:]), reported)


def _status(status: RunStatus) -> Text:
    return Text(status.value, style=STATUS_STYLES[status])


def _error(percent: float | None) -> Text:
    is_far = percent is not None and abs(percent) > FAR_OFF_PERCENT
    return Text(render_error(percent), style="yellow" if is_far else "")


def _loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def _quoted(run: FoundRun) -> str:
    return shlex.quote(str(run.folder.path))
