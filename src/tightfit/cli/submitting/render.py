"""What `tightfit submit` prints before it follows a job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tightfit.cli.render.train import show_start
from tightfit.cli.submitting.kubernetes_follow import delete_command, log_command
from tightfit.cli.submitting.prepare import PreparedRun
from tightfit.cli.terminal.output import write_out
from tightfit.cli.terminal.screen import heading, plain, render_notes, show
from tightfit.clusters.kubernetes.pod import Document
from tightfit.clusters.requirements import check_space, estimate_run_bytes
from tightfit.core.text import sanitize
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder


def show_slurm_draft(
    prepared: PreparedRun, *, script: str, notes: Sequence[str], said: str | None
) -> None:
    """The plan, the script as it would be submitted, and Slurm's word on it."""
    _show_slurm_plan(prepared)
    show([heading("Batch script"), ""])
    write_out("".join(f"{sanitize(line)}\n" for line in script.splitlines()))  # never wrapped
    show(
        [
            *render_notes("Notes", list(notes)),
            *render_notes("Slurm says", [said] if said else []),
            "",
            plain("Nothing was submitted: --dry-run."),
        ]
    )


def show_submitted(
    prepared: PreparedRun, *, job_id: str, script: Path, notes: Sequence[str]
) -> None:
    """The plan, the job's number, and what can be done about it."""
    _show_slurm_plan(prepared)
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


def _show_slurm_plan(prepared: PreparedRun) -> None:
    run, plan = prepared.run, prepared.plan
    free = check_space(run.path, plan)
    show_start(plan, folder=run.path, free_bytes=free, needed_bytes=estimate_run_bytes(plan))


# What `tightfit submit --on k8s` prints before it follows a job.


def show_kubernetes_draft(
    plan: Plan, *, run: RunFolder | None, manifest: str, notes: Sequence[str]
) -> None:
    """The plan, and the objects as they would be applied."""
    _show_kubernetes_plan(plan, run)
    show(
        [
            heading("Objects"),
            "",
            *(plain(line) for line in manifest.splitlines()),
            *render_notes("Notes", list(notes)),
            "",
            plain("Nothing was applied: --dry-run."),
        ]
    )


def show_applied(
    plan: Plan, *, run: RunFolder | None, leader: Document, notes: Sequence[str]
) -> None:
    """The plan, the job's name, and what can be done about it."""
    _show_kubernetes_plan(plan, run)
    meta = leader["metadata"]
    commands = [
        f"{log_command(leader)}    (what its pods say)",
        f"{delete_command(leader)}    (ends it; it saves first)",
    ]
    show(
        [
            heading(f"{leader['kind']} {meta['name']} in namespace {meta['namespace']}"),
            *render_notes("Notes", list(notes)),
            *render_notes("Next", commands),
            "",
        ]
    )


def _show_kubernetes_plan(plan: Plan, run: RunFolder | None) -> None:
    if run is None:
        return
    free = check_space(run.path, plan)
    show_start(plan, folder=run.path, free_bytes=free, needed_bytes=estimate_run_bytes(plan))
