"""`tightfit train`: Plan, show the plan, tune, and report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tightfit.api import train as api
from tightfit.api.options.common import Output
from tightfit.api.options.training import TrainOptions
from tightfit.api.train import OpenRun, TrainResult
from tightfit.api.training.hardware import read_limit
from tightfit.cli.plan import describe_data
from tightfit.cli.runs import render_compared
from tightfit.cli.terminal.output import progress_bar, show_json, write_out
from tightfit.cli.terminal.run_display import open_display
from tightfit.cli.terminal.screen import heading, plain, render_notes, render_pairs, show
from tightfit.clusters.slurm.queue import read_job_file
from tightfit.core.text import count_of
from tightfit.core.units import GIB, render_bytes, render_count, render_seconds
from tightfit.estimation.result import Verdict
from tightfit.planning.describe import (
    count_examples,
    describe_epochs,
    describe_how,
    describe_levers,
)
from tightfit.planning.plan import Plan
from tightfit.runs.report import RunReport, list_results
from tightfit.runs.run_folder import RunFolder, RunStatus

if TYPE_CHECKING:
    from rich.console import RenderableType


def train(options: TrainOptions, output: Output) -> None:
    """From whatever names the job to a report."""
    with progress_bar() as progress:
        opened = api.open_run(replace(options, progress=progress))
    if isinstance(opened, TrainResult):
        if output.as_json:
            show_json(_describe(opened))
        else:
            write_out(describe_finished(opened.run, opened.artefact))
        return
    _show_start(opened, options, output)
    if options.dry_run:
        return
    capacity = opened.plan.estimate.gpu.capacity_bytes
    with open_display(
        min(capacity, read_limit(options, os.environ) or capacity),
        lambda: api.read_num_steps(opened.run),
        is_silent=output.as_json,
    ) as display:
        result = api.start_run(opened, options, display)
    if not output.as_json and result.report is not None:
        folder, artefact = result.run.path, result.artefact
        show(render_end(result.report, folder=folder, artefact=artefact, notes=result.notes))
    elif result.error is None:
        show_json(_describe(result))
    if result.error is not None:
        raise result.error
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def describe_finished(run: RunFolder, artefact: Path | None) -> str:
    where = f"; the result is in {artefact}" if artefact is not None else ""
    return f"{run.path} is finished{where}.\nTrain once more: add --again\n"


def _show_start(opened: OpenRun, options: TrainOptions, output: Output) -> None:
    folder, free = opened.run.path, opened.free_bytes
    if not output.as_json:
        needed = opened.needed_bytes
        show(render_start(opened.plan, folder=folder, free_bytes=free, needed_bytes=needed))
    elif options.dry_run:
        plan = opened.plan.model_dump(mode="json")
        show_json({"run": str(folder), "plan": plan, "free_bytes": free})


def _describe(result: TrainResult) -> dict[str, Any]:
    return {
        "run": str(result.run.path),
        "artefact": None if result.artefact is None else str(result.artefact),
        "exit_code": result.exit_code,
        "notes": list(result.notes),
        "report": None if result.report is None else result.report.model_dump(mode="json"),
    }


def render_start(
    plan: Plan, *, folder: Path, free_bytes: int, needed_bytes: int
) -> Iterator[RenderableType]:
    """The plan in brief and what is about to happen."""
    strategy, gpu = plan.strategy, plan.estimate.gpu
    name = plan.hardware.node.gpu.name
    yield heading(f"{plan.model.name} ({render_count(plan.model.num_params)} parameters)")
    if plan.data is not None:
        yield plain(describe_data(plan.data))
    yield ""
    rows = [
        ("how", f"{describe_how(strategy, name)}\n{describe_levers(strategy)}"),
        ("steps", _describe_steps(plan)),
        ("time", _describe_time(plan)),
        ("memory", _describe_memory(plan)),
        ("disk", f"{render_bytes(needed_bytes)} of {render_bytes(free_bytes)} free"),
        ("folder", str(relative_to_here(folder))),
    ]
    yield render_pairs(rows)
    yield from render_notes("Why so", plan.why)
    beware = list(plan.warnings)
    if plan.estimate.verdict is Verdict.TIGHT:
        beware.insert(0, f"tight: {plan.estimate.reason}")
    if gpu.capacity_bytes < GIB:
        beware.append("less than 1 GiB of memory is free")
    yield from render_notes("Beware", beware)
    yield ""


def _describe_steps(plan: Plan) -> str:
    steps = plan.num_steps
    summary = count_of(steps, "step") if steps else "not counted yet"
    epochs = describe_epochs(plan.num_epochs)
    rate = f", learning rate {plan.training.learning_rate:g}" if plan.training else ""
    batch = count_examples(plan.strategy, plan.effective_batch)
    return f"{summary} of {batch} up to {plan.strategy.seq_len:,} tokens, {epochs}{rate}"


def _describe_time(plan: Plan) -> str:
    time, steps = plan.estimate.time, plan.num_steps
    speed = f"{time.tokens_per_second:,.0f} tokens/s"
    if not steps:
        return speed
    total = render_seconds(time.seconds_per_step * steps)
    low = render_seconds(time.seconds_per_step_low * steps)
    high = render_seconds(time.seconds_per_step_high * steps)
    how = "" if time.tier == "closed-form" else f"{time.tier}: "
    return f"{how}{total} ({low} to {high}), {speed}"


def _describe_memory(plan: Plan) -> str:
    gpu, is_cpu = plan.estimate.gpu, plan.hardware.node.gpu.is_cpu
    what = "a process" if is_cpu else "per GPU"
    peak = f"{render_bytes(gpu.peak_reserved_bytes)} of {render_bytes(gpu.capacity_bytes)} {what}"
    return peak if is_cpu else f"{peak}, {render_bytes(plan.estimate.host.peak_bytes)} RAM"


def render_end(
    report: RunReport, *, folder: Path, artefact: Path | None, notes: Sequence[str]
) -> Iterator[RenderableType]:
    """Results, predicted beside measured, and what to do next."""
    folder = relative_to_here(folder)
    if report.status is RunStatus.FAILED and not report.num_tokens and not report.plan_changes:
        yield from render_notes("Notes", notes)  # it never began: there is nothing but the error
        return
    yield heading(f"{report.name}: {report.status.value} at step {report.step:,}")
    yield ""
    yield render_pairs((result.label, result.value) for result in list_results(report))
    if report.compared:
        yield ""
        yield render_compared(report.compared)
    yield from render_notes("Plan changed", [event.text for event in report.plan_changes])
    yield from render_notes("Notes", notes)
    yield from render_notes("Next", list(list_next(report, folder, artefact)))


def relative_to_here(path: Path) -> Path:
    """As it is typed from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def list_next(report: RunReport, folder: Path, artefact: Path | None) -> Iterator[str]:
    """Commands that go on from here."""
    name = shlex.quote(str(folder))
    if report.status is not RunStatus.FINISHED:
        verb = "train" if read_job_file(RunFolder(path=folder)) is None else "submit"
        yield f"tightfit {verb} {name}    (goes on from the last checkpoint)"
        return
    if artefact is not None:
        kind = "model" if artefact.name == "model" else "adapter"
        yield f"the tuned {kind} is in {relative_to_here(artefact)}"
    yield f"tightfit eval {name} --data FILE"
    yield f"tightfit runs {name}    (report: {name}/report.html)"
