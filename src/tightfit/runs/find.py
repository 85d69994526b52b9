"""Find runs: folders with a plan, here or one level further in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tightfit.core.errors import NotFoundError, UserError
from tightfit.core.suggest import did_you_mean
from tightfit.runs.report import RunReport, parse_time, read_report
from tightfit.runs.run_folder import RunFolder

DEFAULT_FOLDER = Path("runs")
LIST_COMMAND = "tightfit runs    (lists the runs there are)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run in a list: its report, or why it cannot be read."""

    folder: RunFolder
    report: RunReport | None
    fault: UserError | None = None


def find_runs(folder: Path) -> list[RunFolder]:
    """The folder's own runs, and those of the folders in it."""
    found = []
    for child in _list_folders(folder):
        inner = [child] if _is_run(child) else list(_list_folders(child))
        found += [RunFolder(path=path) for path in inner if _is_run(path)]
    return found


def find_run(name: str) -> RunFolder | None:
    """One run, by path or by its name in `runs/`; None where the word is no single run."""
    path = _expanded(name)
    places = (place for place in (path, DEFAULT_FOLDER / path) if _is_run(place))
    return next((RunFolder(path=place) for place in places), None)


def resolve_runs(name: str) -> list[RunFolder]:
    """What a word means: one run, or the runs in a folder."""
    single, path = find_run(name), _expanded(name)
    if single is not None:
        return [single]
    if _is_folder(path):
        found = find_runs(path)
        if found:
            return found
        raise NotFoundError(f"There is no run in {name}.", remedy=LIST_COMMAND)
    known = [run.path.name for run in find_runs(DEFAULT_FOLDER)]
    raise NotFoundError(
        f"There is no run {name}, here or in {DEFAULT_FOLDER}/.{did_you_mean(name, known)}",
        remedy=LIST_COMMAND,
    )


def read_found_runs(folders: Iterable[RunFolder]) -> list[FoundRun]:
    """Newest first; one that is broken stays in the list and says why."""
    distinct = {run.path.resolve(): run for run in folders}
    found = [_read(run) for run in distinct.values()]
    return sorted(found, key=_changed_at, reverse=True)


def _read(run: RunFolder) -> FoundRun:
    try:
        return FoundRun(folder=run, report=read_report(run))
    except UserError as error:
        return FoundRun(folder=run, report=None, fault=error)


def _changed_at(found: FoundRun) -> tuple[float, str]:
    when = parse_time(found.report.updated_at) if found.report is not None else None
    return (when.timestamp() if when is not None else 0.0, found.folder.path.name)


def _list_folders(folder: Path) -> Iterator[Path]:
    try:
        children = sorted(folder.iterdir())
    except (OSError, ValueError):
        return
    yield from (child for child in children if _is_folder(child))


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # `~somebody` without such a user
        return Path(name)


def _is_run(path: Path) -> bool:
    try:
        return RunFolder(path=path).is_run()
    except (OSError, ValueError):  # a name too long, a folder closed to us, a NUL byte
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
