"""`tightfit runs`: list runs, show one, compare several, plot them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from tightfit.cli.flags.catalogue import RunsFlags
from tightfit.cli.terminal.output import announce, show_json
from tightfit.cli.terminal.screen import Column, heading, make_table, plain, render_notes, show
from tightfit.core.errors import UsageError
from tightfit.core.files import write_atomic
from tightfit.core.text import count_of, sanitize, shorten
from tightfit.core.units import render_count
from tightfit.runs.charts import COLOURS, RunView, load_run_views
from tightfit.runs.find import (
    DEFAULT_FOLDER,
    FoundRun,
    find_run,
    find_runs,
    read_found_runs,
    resolve_runs,
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
from tightfit.runs.run_folder import RunFolder, RunStatus

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


MOST_DRAWN = len(COLOURS)
"""Runs in one picture; more cannot be told apart."""


def runs(flags: RunsFlags) -> None:
    """One run is shown, several are compared, a folder is listed."""
    _check_endings(flags)
    names = flags.names or ()
    folders = [run for name in names for run in resolve_runs(name)]
    if not names:
        folders = find_runs(DEFAULT_FOLDER)
    if not names or any(find_run(name) is None for name in names):
        _list(flags, folders)
    elif len({run.path.resolve() for run in folders}) == 1:
        _show_one(flags, folders[0])
    else:
        _compare(flags, folders)


def _list(flags: RunsFlags, folders: Sequence[RunFolder]) -> None:
    if flags.plot is not None or flags.html is not None:
        _write_files(flags, _report_drawable(flags, folders))
    listed = read_found_runs(folders)
    if flags.as_json:
        show_json({"runs": [_describe_found(found) for found in listed]})
        return

    show_list(listed)


def _show_one(flags: RunsFlags, folder: RunFolder) -> None:
    reported = load_run_views([folder])
    if flags.as_json:
        _write_files(flags, reported)
        show_json(_describe(reported[0]))
        return

    show_run(reported[0])
    _write_files(flags, reported)


def _compare(flags: RunsFlags, folders: Sequence[RunFolder]) -> None:
    reported = _report_drawable(flags, folders)
    if flags.as_json:
        _write_files(flags, reported)
        show_json(
            {
                "runs": [_describe(run) for run in reported],
                "differing": list_differing([run.past.plan for run in reported]),
            }
        )
        return

    show_comparison(reported)
    _write_files(flags, reported)


def _report_drawable(flags: RunsFlags, folders: Sequence[RunFolder]) -> Sequence[RunView]:
    """Refuse a picture of nothing, or of too many, before anything is read."""
    option = "--plot" if flags.plot is not None else "--html" if flags.html is not None else None
    if option is not None and not 1 <= len(folders) <= MOST_DRAWN:
        problem = f"{option} draws 1 to {MOST_DRAWN} runs; here are {len(folders)}."
        raise UsageError(problem, remedy=f"tightfit runs RUN RUN {option} FILE    (name some)")
    return load_run_views(folders)


def _check_endings(flags: RunsFlags) -> None:
    """Refuse an ending we cannot write, before any work is done."""
    for option, path, endings in (
        ("--plot", flags.plot, (".png", ".html", ".htm")),
        ("--html", flags.html, (".html", ".htm")),
    ):
        if path is not None and path.suffix.lower() not in endings:
            instead = path.parent / f"{path.stem.strip('.') or 'runs'}{endings[0]}"
            raise UsageError(
                f"`{option} {shorten(path)}` does not end in {' or '.join(endings[:2])}.",
                remedy=f"{option} {shlex.quote(str(instead))}",
            )


def _write_files(flags: RunsFlags, told: Sequence[RunView]) -> None:
    if flags.plot is not None:
        _write_plot(told, flags.plot)
        announce(flags.plot)
    if flags.html is not None:
        from tightfit.runs.report_html import render_report

        write_atomic(flags.html, render_report(told))
        announce(flags.html)


def _write_plot(told: Sequence[RunView], path: Path) -> None:
    if path.suffix.lower() == ".png":
        from tightfit.runs.charts import write_plot

        write_plot([run.curves for run in told], path)
    else:
        from tightfit.runs.report_html import render_plots

        write_atomic(path, render_plots(told))


def _describe(run: RunView) -> dict[str, Any]:
    return {"path": str(run.past.folder.path), **run.report.model_dump(mode="json")}


def _describe_found(found: FoundRun) -> dict[str, Any]:
    path = str(found.folder.path)
    if found.report is not None:
        return {"path": path, **found.report.model_dump(mode="json")}
    error = found.fault
    return {"path": path, "error": error and error.problem, "remedy": error and error.remedy}
