"""`tightfit submit`: Plan for a cluster, submit the job, follow it, and report."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer

from tightfit.api.options.clusters import SubmitOptions
from tightfit.api.options.common import Output
from tightfit.cli.terminal.output import announce, show_json, write_err, write_out
from tightfit.cli.terminal.run_display import open_display
from tightfit.cli.terminal.screen import heading, plain, render_notes, show
from tightfit.cli.train import describe_finished, render_end, render_start
from tightfit.core.errors import EXIT_INTERRUPTED, UserError
from tightfit.core.text import count_of, sanitize

if TYPE_CHECKING:
    from tightfit.api.submit import SubmitResult
    from tightfit.clusters.protocol import JobEnd


def submit(options: SubmitOptions, output: Output) -> None:
    """Submit, show what was done, and follow the job to its end."""
    from tightfit.api.submit import SubmitStatus
    from tightfit.api.submit import submit as submit_job

    result = submit_job(options)
    if result.kept_run is not None:
        write_err(f"the old run is kept in {result.kept_run}\n")
    if result.status is SubmitStatus.FINISHED:
        _show_finished(result, as_json=output.as_json)
        return
    if result.status is SubmitStatus.DRAFTED:
        _show_draft(result, as_json=output.as_json)
        return
    if result.status is SubmitStatus.WRITTEN:
        assert options.write is not None
        announce(options.write)
        if output.as_json:
            show_json({**_describe_draft(result), "wrote": str(options.write)})
        else:
            _show_plan(result)
            show(render_notes("Notes", list(result.notes)))
        return
    if result.status is SubmitStatus.SUBMITTED:
        _show_submitted(result, as_json=output.as_json, is_last=options.follow is False)
    if options.follow is not False:
        _follow(result, as_json=output.as_json)


def _show_finished(result: SubmitResult, *, as_json: bool) -> None:
    from tightfit.api.train import find_artefact

    assert result.run is not None
    artefact = find_artefact(result.run)
    if as_json:
        show_json(
            {
                "run": str(result.run.path),
                "artefact": None if artefact is None else str(artefact),
                "exit_code": 0,
                "notes": ["finished before; nothing was submitted"],
            }
        )
        return
    write_out(describe_finished(result.run, artefact))


def _describe_draft(result: SubmitResult) -> dict[str, object]:
    assert result.draft is not None
    assert result.plan is not None
    return {
        "run": None if result.run is None else str(result.run.path),
        "plan": result.plan.model_dump(mode="json"),
        **result.draft.details,
        "notes": list(result.notes),
    }


def _show_draft(result: SubmitResult, *, as_json: bool) -> None:
    """The plan, the script or manifest, and what the scheduler would do with it."""
    assert result.draft is not None
    answer, scheduler = result.scheduler_answer, result.backend.title
    if as_json:
        answers = {} if answer is None else {scheduler.lower(): answer}
        show_json({**_describe_draft(result), **answers})
        return
    _show_plan(result)
    show([heading(result.draft.title), ""])
    # Never wrapped: it is copied from the screen.
    write_out("".join(f"{sanitize(line)}\n" for line in result.draft.text.splitlines()))
    show(
        [
            *render_notes("Notes", list(result.notes)),
            *render_notes(f"{scheduler} says", [answer] if answer else []),
            "",
            plain("Nothing was submitted: --dry-run."),
        ]
    )


def _show_submitted(result: SubmitResult, *, as_json: bool, is_last: bool) -> None:
    assert result.job is not None
    if as_json:
        if is_last:  # else the report is the one document
            run = None if result.run is None else str(result.run.path)
            show_json({"run": run, **result.job.details, "notes": list(result.notes)})
        return
    _show_plan(result)
    show(
        [
            heading(result.job.title),
            *render_notes("Notes", list(result.notes)),
            *render_notes("Next", list(result.job.commands)),
            "",
        ]
    )


def _show_plan(result: SubmitResult) -> None:
    from tightfit.clusters.requirements import check_space, estimate_run_bytes

    if result.run is not None and result.plan is not None:
        free = check_space(result.run.path, result.plan)
        needed = estimate_run_bytes(result.plan)
        folder = result.run.path
        show(render_start(result.plan, folder=folder, free_bytes=free, needed_bytes=needed))


def _follow(result: SubmitResult, *, as_json: bool) -> None:
    """Show the job to its end and exit with its code; Ctrl-C asks whether to cancel it."""
    assert result.job is not None
    is_cancelled = False
    while True:
        try:
            end = _display(result, as_json=as_json)
            break
        except KeyboardInterrupt:
            if is_cancelled or not _ask_to_cancel(result.job.label):
                _leave(result)
            is_cancelled = True
            result.cancel()
    error = None if is_cancelled else end.error
    code = EXIT_INTERRUPTED if is_cancelled else end.exit_code
    if error is None or not as_json:
        _show_end(result, end, code=code, as_json=as_json)
    if error is not None:
        raise error
    if code:
        raise typer.Exit(code)


def _display(result: SubmitResult, *, as_json: bool) -> JobEnd:
    run = result.run

    def read_num_steps() -> int:
        try:
            return 0 if run is None else run.read_state().num_steps
        except UserError:
            return 0

    capacity = 0 if run is None else run.read_plan().estimate.gpu.capacity_bytes
    with open_display(capacity, read_num_steps, is_silent=as_json) as display:
        return result.follow(display)


def _ask_to_cancel(label: str) -> bool:
    """Only a clear yes; where nobody can answer, the job is left alone."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    write_err(f"\nCancel {label}? It saves first. [y/N] ")
    try:
        return input().strip().casefold() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


def _leave(result: SubmitResult) -> None:
    assert result.job is not None
    again = "the same command follows it again"
    if result.run is not None:
        again = f"follow it again: tightfit submit {shlex.quote(str(result.run.path))} --follow"
    write_err(f"\n{result.job.label} goes on; {again}; {result.job.cancel_command} ends it\n")
    raise typer.Exit(EXIT_INTERRUPTED)


def _show_end(result: SubmitResult, end: JobEnd, *, code: int, as_json: bool) -> None:
    from tightfit.api.train import find_artefact
    from tightfit.runs.report import make_report

    run = result.run
    try:
        report = None if run is None else make_report(run)
    except UserError:
        report = None
    artefact = None if run is None else find_artefact(run)
    if as_json:
        show_json(
            {
                "run": None if run is None else str(run.path),
                **end.details,
                "job_state": end.state,
                "artefact": None if artefact is None else str(artefact),
                "exit_code": code,
                "report": None if report is None else report.model_dump(mode="json"),
            }
        )
    elif report is not None and run is not None:
        count = count_of(end.num_restarts, "time")
        notes = [f"queued again {count}"] if end.num_restarts else []
        show(render_end(report, folder=run.path, artefact=artefact, notes=notes))
