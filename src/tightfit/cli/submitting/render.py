"""What `tightfit submit` prints before it follows a job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tightfit.cli.render.train import show_start
from tightfit.cli.submitting.prepare import Prepared
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.notes import heading, plain, render_notes
from tightfit.cli.terminal.output import write_out
from tightfit.cli.terminal.screen import show
from tightfit.launch.space import check_space, estimate_run_bytes


def show_draft(prepared: Prepared, *, script: str, notes: Sequence[str], said: str | None) -> None:
    """The plan, the script as it would be submitted, and Slurm's word on it."""
    _show_plan(prepared)
    show([heading("Batch script"), ""])
    write_out("".join(f"{harmless(line)}\n" for line in script.splitlines()))  # never wrapped
    show(
        [
            *render_notes("Notes", list(notes)),
            *render_notes("Slurm says", [said] if said else []),
            "",
            plain("Nothing was submitted: --dry-run."),
        ]
    )


def show_submitted(prepared: Prepared, *, job_id: str, script: Path, notes: Sequence[str]) -> None:
    """The plan, the job's number, and what can be done about it."""
    _show_plan(prepared)
    run = shlex.quote(str(prepared.run.path))
    commands = [
        f"tightfit submit {run} --follow    (follows it again)",
        f"squeue -j {job_id}; scancel {job_id}    (ends it; it saves first)",
        f"less {shlex.quote(str(script))}    (what was submitted)",
    ]
    show(
        [
            heading(f"Submitted as job {job_id} to {prepared.group.name}"),
            *render_notes("Notes", list(notes)),
            *render_notes("Next", commands),
            "",
        ]
    )


def _show_plan(prepared: Prepared) -> None:
    run, plan = prepared.run, prepared.plan
    free = check_space(run.path, plan)
    show_start(plan, folder=run.path, free_bytes=free, needed_bytes=estimate_run_bytes(plan))
