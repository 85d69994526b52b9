"""`tightfit runs`: List, show, compare and plot runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tightfit.api.catalogue import RunsOptions
from tightfit.api.options.common import Output
from tightfit.api.runs import read_or_list_runs
from tightfit.cli.terminal.charts import check_chart_path
from tightfit.cli.terminal.output import announce
from tightfit.cli.terminal.screen import (
    Cell,
    Column,
    heading,
    make_table,
    plain,
    render_notes,
    show_output,
    styled,
)
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_count
from tightfit.runs.report import (
    DEFAULT_FOLDER,
    UNKNOWN,
    Comparison,
    FoundRun,
    PastRun,
    RunReport,
    align_results,
    list_differing,
    list_results,
    render_error,
    render_progress,
    render_quantity,
    render_time,
)
from tightfit.runs.run_folder import RunStatus

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

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


def runs(options: RunsOptions, output: Output) -> None:
    """One run is shown, several are compared, a folder is listed."""
    if options.plot is not None:
        check_chart_path(options.plot, option="--plot")
    if options.html is not None:
        check_chart_path(options.html, (".html", ".htm"), option="--html")
    found = read_or_list_runs(options)
    for path in filter(None, (options.plot, options.html)):
        announce(path)
    document: dict[str, Any]
    if found.listed is not None:
        document = {"runs": [_describe_found(run) for run in found.listed]}
        parts = _render_list(found.listed)
    elif len(found.shown) == 1:
        document, parts = _describe(found.shown[0]), _render_run(found.shown[0])
    else:
        differing = list_differing([run.plan for run in found.shown])
        document = {"runs": [_describe(run) for run in found.shown], "differing": differing}
        parts = _render_comparison(found.shown)
    show_output(document, parts, as_json=output.as_json)


def _describe(run: PastRun) -> dict[str, Any]:
    return {"path": str(run.folder.path), **run.report.model_dump(mode="json")}


def _describe_found(found: FoundRun) -> dict[str, Any]:
    path, error = str(found.folder.path), found.error
    if found.report is not None:
        return {"path": path, **found.report.model_dump(mode="json")}
    return {"path": path, "error": error and error.problem, "remedy": error and error.remedy}


def _render_list(found: Sequence[FoundRun]) -> Iterator[RenderableType]:
    if not found:
        yield f"No runs in {DEFAULT_FOLDER}/ yet."
        yield "Start one: tightfit train MODEL --data FILE --on here"
        return
    columns = ("*~run", "status", "~model", "method", ">steps", ">loss", ">eval", "changed")
    yield make_table(columns, [_list_row(run) for run in found])
    broken = [f"{run.folder.path}: {run.error.problem}" for run in found if run.error is not None]
    yield from render_notes("Cannot be read", broken)
    yield ""
    first = shlex.quote(str(found[0].folder.path))
    yield plain(f"{count_of(len(found), 'run')}. One in full: tightfit runs {first}")


def _list_row(run: FoundRun) -> tuple[Cell, ...]:
    path, report = sanitize(str(run.folder.path)), run.report
    if report is None:
        return (path, styled("unreadable", "bold red"), "", "", "", "", "", "")
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


def _render_run(run: PastRun) -> Iterator[RenderableType]:
    report = run.report
    yield heading(f"{run.name}  ").append_text(_status(report.status))
    yield from _render_subject(report)
    yield ""
    columns = ("result", ">value", Column("", keep=False, style="dim"))
    yield make_table(columns, [(r.label, r.value, r.meaning) for r in list_results(report)])
    yield ""
    yield heading("Predicted beside measured")
    yield render_compared(report.compared)
    yield from render_notes("Why this plan", run.plan.why)
    changes = [f"step {event.step:,}: {event.text}" for event in report.plan_changes]
    yield from render_notes("Changes of plan", changes)
    events = [f"step {event.step:,}: {event.text}" for event in report.events]
    yield from render_notes("Events", events[-MOST_EVENTS:])
    yield ""
    name = shlex.quote(str(run.folder.path))
    yield plain(f"The same with curves, in a browser: tightfit runs {name} --html report.html")


def _render_subject(report: RunReport) -> Iterator[RenderableType]:
    trained = f"{render_count(report.num_trainable_params)} of {render_count(report.num_params)}"
    yield plain(f"{report.model} on {report.hardware}; {trained} parameters trained")
    yield plain(report.strategy)
    yield plain(f"last change {render_time(report.updated_at)}")
    if report.problem:
        yield styled(report.problem, "red")
    if report.remedy:
        yield plain(f"  try: {report.remedy}")


def render_compared(compared: Sequence[Comparison]) -> RenderableType:
    """Also at the end of a run."""
    columns = ("quantity", ">predicted", ">measured", ">error")
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


def _render_comparison(runs: Sequence[PastRun]) -> Iterator[RenderableType]:
    columns = [Column(sanitize(run.name), keep=False) for run in runs]
    differing = list_differing([run.plan for run in runs])
    if differing:
        yield heading("Settings that differ")
        yield make_table(
            ("setting", *columns), [(name, *values) for name, values in differing.items()]
        )
    else:
        yield plain("All settings are the same.")
    yield ""
    yield heading("Results")
    results: list[tuple[Cell, ...]] = [("status", *(_status(r.report.status) for r in runs))]
    results += align_results([run.report for run in runs])
    yield make_table(("result", *columns), results)
    yield ""
    yield heading("How far predictions were off (above 0: predicted too much)")
    errors = [{found.name: found.error_percent for found in r.report.compared} for r in runs]
    quantities = dict.fromkeys(name for side in errors for name in side)
    reported: list[tuple[Cell, ...]] = [
        (name, *(_error(side.get(name)) for side in errors)) for name in quantities
    ]
    yield make_table(("quantity", *columns), reported)


def _status(status: RunStatus) -> Text:
    return styled(status.value, STATUS_STYLES[status])


def _error(percent: float | None) -> Text:
    is_far = percent is not None and abs(percent) > FAR_OFF_PERCENT
    return styled(render_error(percent), "yellow" if is_far else "")


def _loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"
