"""`tightfit runs`: list runs, show one, compare several, draw them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightfit.cli.flags.runs import RunsFlags
from tightfit.cli.terminal.harmless import shorten
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce
from tightfit.core.errors import UsageError
from tightfit.core.files import write_atomic
from tightfit.ledger.curves import COLOURS, ToldRun, tell_runs
from tightfit.ledger.find import (
    DEFAULT_FOLDER,
    FoundRun,
    find_run,
    find_runs,
    read_found,
    resolve_runs,
)
from tightfit.ledger.run_folder import RunFolder
from tightfit.ledger.settings import list_differing

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
        _write_files(flags, _tell_drawable(flags, folders))
    listed = read_found(folders)
    if flags.as_json:
        show_json({"runs": [_describe_found(found) for found in listed]})
        return
    from tightfit.cli.render.runs import show_list

    show_list(listed)


def _show_one(flags: RunsFlags, folder: RunFolder) -> None:
    told = tell_runs([folder])
    if flags.as_json:
        _write_files(flags, told)
        show_json(_describe(told[0]))
        return
    from tightfit.cli.render.runs import show_run

    show_run(told[0])
    _write_files(flags, told)


def _compare(flags: RunsFlags, folders: Sequence[RunFolder]) -> None:
    told = _tell_drawable(flags, folders)
    if flags.as_json:
        _write_files(flags, told)
        show_json(
            {
                "runs": [_describe(run) for run in told],
                "differing": list_differing([run.past.plan for run in told]),
            }
        )
        return
    from tightfit.cli.render.runs import show_comparison

    show_comparison(told)
    _write_files(flags, told)


def _tell_drawable(flags: RunsFlags, folders: Sequence[RunFolder]) -> Sequence[ToldRun]:
    """Refuse a picture of nothing, or of too many, before anything is read."""
    option = "--plot" if flags.plot is not None else "--html" if flags.html is not None else None
    if option is not None and not 1 <= len(folders) <= MOST_DRAWN:
        problem = f"{option} draws 1 to {MOST_DRAWN} runs; here are {len(folders)}."
        raise UsageError(problem, remedy=f"tightfit runs RUN RUN {option} FILE    (name some)")
    return tell_runs(folders)


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


def _write_files(flags: RunsFlags, told: Sequence[ToldRun]) -> None:
    if flags.plot is not None:
        _write_plot(told, flags.plot)
        announce(flags.plot)
    if flags.html is not None:
        from tightfit.ledger.report_html import render_report

        write_atomic(flags.html, render_report(told))
        announce(flags.html)


def _write_plot(told: Sequence[ToldRun], path: Path) -> None:
    if path.suffix.lower() == ".png":
        from tightfit.ledger.plots import write_plot

        write_plot([run.curves for run in told], path)
    else:
        from tightfit.ledger.report_html import render_plots

        write_atomic(path, render_plots(told))


def _describe(run: ToldRun) -> dict[str, Any]:
    return {"path": str(run.past.folder.path), **run.report.model_dump(mode="json")}


def _describe_found(found: FoundRun) -> dict[str, Any]:
    path = str(found.folder.path)
    if found.report is not None:
        return {"path": path, **found.report.model_dump(mode="json")}
    fault = found.fault
    return {"path": path, "error": fault and fault.problem, "remedy": fault and fault.remedy}
