"""Runs: find, read, compare and draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.api.catalogue import RunsOptions
from tightfit.core.errors import UsageError
from tightfit.core.figures import RUN_COLOURS, write_figure
from tightfit.core.files import write_atomic
from tightfit.runs.report import (
    DEFAULT_FOLDER,
    FoundRun,
    PastRun,
    find_run,
    find_runs,
    read_found_runs,
    resolve_runs,
)
from tightfit.runs.report_html import (
    describe_runs,
    draw_runs,
    load_runs,
    render_plots,
    render_report,
)

MOST_DRAWN = len(RUN_COLOURS)
"""Runs in one picture; more cannot be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsResult:
    """Runs named one by one, read in full; or a folder's runs as a list."""

    shown: tuple[PastRun, ...] = ()
    listed: tuple[FoundRun, ...] | None = None


def list_runs(folder: str | Path = DEFAULT_FOLDER) -> list[FoundRun]:
    """The runs in a folder and in the folders below it, newest first."""
    return read_found_runs(find_runs(Path(folder)))


def read_runs(*names: str) -> tuple[PastRun, ...]:
    """Runs by folder or by name in `runs/`, with their reports."""
    return load_runs(run for name in names for run in resolve_runs(name))


def read_or_list_runs(options: RunsOptions) -> RunsResult:
    """Read the named runs, or list a folder; a picture that is asked for is written too."""
    names = options.names or []
    folders = [run for name in names for run in resolve_runs(name)]
    folders = folders if names else find_runs(DEFAULT_FOLDER)
    option = "--plot" if options.plot is not None else "--html" if options.html else None
    if option is not None and not 1 <= len(folders) <= MOST_DRAWN:
        raise UsageError(
            f"{option} draws 1 to {MOST_DRAWN} runs; here are {len(folders)}.",
            remedy=f"tightfit runs RUN RUN {option} FILE    (name some)",
        )
    is_list = not names or any(find_run(name) is None for name in names)
    if not is_list and len({run.path.resolve() for run in folders}) == 1:
        folders = folders[:1]
    shown = () if is_list and option is None else load_runs(folders)
    if options.plot is not None:
        plot_runs(shown, options.plot)
    if options.html is not None:
        write_atomic(options.html, render_report(shown))
    if is_list:
        return RunsResult(listed=tuple(read_found_runs(folders)))
    return RunsResult(shown=shown)


def plot_runs(runs: Sequence[PastRun], path: Path) -> None:
    """Loss, memory and predictions as a PNG or an HTML page, by the file's ending."""
    if path.suffix.lower() == ".png":
        figure, _ = draw_runs(runs)
        write_figure(figure, path, title=describe_runs(runs))
    else:
        write_atomic(path, render_plots(runs))
