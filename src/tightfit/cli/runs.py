"""`tightfit runs`: list runs, show one, compare several, plot them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightfit.cli.flags.catalogue import RunsFlags
from tightfit.cli.terminal.output import announce, show_json
from tightfit.core.errors import UsageError
from tightfit.core.files import write_atomic
from tightfit.core.text import shorten
from tightfit.runs.charts import COLOURS, RunView, load_run_views
from tightfit.runs.find import (
    DEFAULT_FOLDER,
    FoundRun,
    find_run,
    find_runs,
    read_found_runs,
    resolve_runs,
)
from tightfit.runs.report import list_differing
from tightfit.runs.run_folder import RunFolder

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

    from tightfit.cli.render.runs import show_list

    show_list(listed)


def _show_one(flags: RunsFlags, folder: RunFolder) -> None:
    reported = load_run_views([folder])
    if flags.as_json:
        _write_files(flags, reported)
        show_json(_describe(reported[0]))
        return

    from tightfit.cli.render.runs import show_run

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

    from tightfit.cli.render.runs import show_comparison

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
