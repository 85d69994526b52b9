"""`tightfit train`: plan, show the plan, train, report."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from tightfit.api import train as api
from tightfit.api.train import OpenRun, TrainResult
from tightfit.api.training.hardware import read_limit
from tightfit.cli.flags.training import TrainFlags
from tightfit.cli.terminal.output import progress_bar, show_json, write_out
from tightfit.cli.terminal.run_display import Progress, open_display


def train(flags: TrainFlags) -> None:
    """From whatever names the job to a report."""
    with progress_bar() as progress:
        opened = api.open_run(replace(flags, progress=progress))
    if isinstance(opened, TrainResult):
        _show_finished(opened, flags)
        return
    _show_start(opened, flags)
    if flags.dry_run:
        return
    capacity = opened.plan.estimate.gpu.capacity_bytes
    display_state = Progress(
        num_steps=api.read_num_steps(opened.run),
        capacity_bytes=min(capacity, read_limit(flags, os.environ) or capacity),
    )
    with open_display(
        display_state,
        read_num_steps=lambda: api.read_num_steps(opened.run),
        is_silent=flags.as_json,
    ) as display:
        result = api.start_run(opened, flags, display)
    _show_end(result, flags)


def _show_finished(result: TrainResult, flags: TrainFlags) -> None:
    if flags.as_json:
        show_json(_describe(result))
        return
    where = f"; the result is in {result.artefact}" if result.artefact is not None else ""
    write_out(f"{result.run.path} is finished{where}.\nTrain once more: add --again\n")


def _show_start(opened: OpenRun, flags: TrainFlags) -> None:
    if not flags.as_json:
        from tightfit.cli.render.train import show_start

        show_start(
            opened.plan,
            folder=opened.run.path,
            free_bytes=opened.free_bytes,
            needed_bytes=opened.needed_bytes,
        )
    elif flags.dry_run:
        plan = opened.plan.model_dump(mode="json")
        show_json({"run": str(opened.run.path), "plan": plan, "free_bytes": opened.free_bytes})


def _show_end(result: TrainResult, flags: TrainFlags) -> None:
    """The report, then the run's error or exit code."""
    if not flags.as_json and result.report is not None:
        from tightfit.cli.render.train import show_end

        show_end(
            result.report,
            folder=_relative(result.run.path),
            artefact=result.artefact,
            notes=result.notes,
        )
    elif result.error is None:
        show_json(_describe(result))
    if result.error is not None:
        raise result.error
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _describe(result: TrainResult) -> dict[str, Any]:
    return {
        "run": str(result.run.path),
        "artefact": None if result.artefact is None else str(result.artefact),
        "exit_code": result.exit_code,
        "notes": list(result.notes),
        "report": None if result.report is None else result.report.model_dump(mode="json"),
    }


def _relative(path: Path) -> Path:
    """As it is typed from here."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
