"""After the workers have ended: the report, the stored outcome, the exit code."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from tightfit.cli.terminal.output import show_json
from tightfit.core.errors import UserError
from tightfit.planning.plan import Plan
from tightfit.runs.report import RunReport
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus


def finish_run(
    run: RunFolder,
    state: RunState,
    *,
    num_kept_before: int,
    is_limited: bool,
    as_json: bool,
    is_first: bool = True,
) -> None:
    """Write the report, remember the outcome, show both, and leave with the run's exit code.

    Of several nodes that ran it, only the first remembers.
    """
    report, notes = _write_reports(run)
    if is_first:
        notes += _store_outcome(run, state, report, num_kept_before, is_limited=is_limited)
    code = state.exit_code if state.exit_code is not None else 70
    artefact = find_artefact(run)
    if as_json and state.status is not RunStatus.FAILED:
        show_json(
            {
                "run": str(run.path),
                "artefact": None if artefact is None else str(artefact),
                "exit_code": code,
                "notes": notes,
                "report": report.model_dump(mode="json"),
            }
        )
    elif not as_json:
        from tightfit.cli.render.train import show_end

        show_end(report, folder=_short(run.path), artefact=artefact, notes=notes)
    if state.status is RunStatus.FAILED:
        raise _as_error(run, state, code)
    if code:
        raise typer.Exit(code)


def _write_reports(run: RunFolder) -> tuple[RunReport, list[str]]:
    """The page is a convenience: a run is not lost where it cannot be drawn."""
    from tightfit.runs.report import make_report, write_report
    from tightfit.runs.report_html import write_html

    try:
        report = write_report(run)
        write_html(run)
    except UserError as fault:
        return make_report(run), [f"No report was written: {fault.problem}"]
    return report, []


def _store_outcome(
    run: RunFolder, state: RunState, report: RunReport, num_before: int, *, is_limited: bool
) -> list[str]:
    """One row for each plan that was given up, and one for the last.

    Under a memory limit a failure says nothing about the card.
    """
    from tightfit.runs.store import make_outcome, record_outcome

    told: list[str | None] = []
    if not is_limited:
        for failed in list_kept_plans(run)[num_before:]:
            told.append(record_outcome(make_outcome(failed, RunStatus.OUT_OF_MEMORY)))
    if state.status is RunStatus.FINISHED:
        told.append(record_outcome(make_outcome(run.read_plan(), state.status, report)))
    return list(dict.fromkeys(sentence for sentence in told if sentence is not None))


def list_kept_plans(run: RunFolder) -> list[Plan]:
    """Plans given up, oldest first; one that cannot be read is passed over."""
    numbers = [path.name.split(".")[1] for path in run.path.glob("plan.*.json")]
    found = []
    for number in sorted(int(word) for word in numbers if word.isdecimal()):
        try:
            found.append(Plan.model_validate_json((run.path / f"plan.{number}.json").read_bytes()))
        except (OSError, ValueError):
            continue
    return found


def find_artefact(run: RunFolder) -> Path | None:
    return next((path for path in (run.adapter_path, run.model_path) if path.is_dir()), None)


def _as_error(run: RunFolder, state: RunState, code: int) -> UserError:
    fault = UserError(
        state.problem or f"The run in {run.path} failed.",
        remedy=state.remedy or f"less {shlex.quote(str(run.log_path))}",
    )
    fault.exit_code = code
    return fault


def _short(path: Path) -> Path:
    """As it is typed from here."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
