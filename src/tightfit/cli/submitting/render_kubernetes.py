"""What `tightfit submit --on k8s` prints before it follows a job."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.cli.render.train import show_start
from tightfit.cli.submitting.kubernetes_follow import delete_command, log_command
from tightfit.cli.terminal.notes import heading, plain, render_notes
from tightfit.cli.terminal.screen import show
from tightfit.launch.kubernetes.pod import Document
from tightfit.launch.space import check_space, estimate_run_bytes
from tightfit.ledger.run_folder import RunFolder
from tightfit.planning.plan import Plan


def show_draft(plan: Plan, *, run: RunFolder | None, manifest: str, notes: Sequence[str]) -> None:
    """The plan, and the objects as they would be applied."""
    _show_plan(plan, run)
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
    _show_plan(plan, run)
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


def _show_plan(plan: Plan, run: RunFolder | None) -> None:
    if run is None:
        return
    free = check_space(run.path, plan)
    show_start(plan, folder=run.path, free_bytes=free, needed_bytes=estimate_run_bytes(plan))
