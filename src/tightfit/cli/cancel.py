"""`tightfit cancel`: End a run's job; the run saves first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tightfit.api.cancel import CancelResult, CancelStatus
from tightfit.api.cancel import cancel as cancel_job
from tightfit.api.options.clusters import CancelOptions
from tightfit.api.options.common import Output
from tightfit.cli.terminal.screen import heading, plain, render_notes, show_output

if TYPE_CHECKING:
    from rich.console import RenderableType


def cancel(options: CancelOptions, output: Output) -> None:
    """Cancel, and say what was cancelled and how to go on."""
    result = cancel_job(options)
    show_output(_describe(result), _render(options, result), as_json=output.as_json)


def _describe(result: CancelResult) -> dict[str, object]:
    return {
        "status": result.status.value,
        "cluster": result.cluster,
        "job_id": None if result.job is None else result.job.job_id,
        "run": None if result.run is None else str(result.run.path),
        "run_status": None if result.state is None else result.state.status.value,
        "step": None if result.state is None else result.state.step,
        "next": result.next_command,
    }


def _render(options: CancelOptions, result: CancelResult) -> Iterator[RenderableType]:
    run = None if result.run is None else str(result.run.path)
    at = f" at step {result.state.step:,}" if result.state and result.state.step else ""
    if result.status is CancelStatus.CANCELLED:
        assert result.job is not None
        yield heading(f"Cancelled {result.job.label} on {result.cluster}")
        yield plain(f"{run or 'The run'} saves first where it has begun{at}.")
    elif run is not None and result.state is not None:
        yield heading("Nothing to cancel")
        yield plain(
            f"{run} is {result.state.status.value}{at}; {result.cluster} runs no job of it."
        )
    else:
        yield heading("Nothing to cancel")
        yield plain(f"Job {options.job} on {result.cluster} is over.")
    if result.next_command is not None:
        purpose = "To end it" if result.runs_elsewhere else "To go on with it"
        yield from render_notes(purpose, [result.next_command])
