"""What `tightfit train` prints before it starts and after it ends."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType

from tightfit.cli.render.plan import describe_data
from tightfit.cli.terminal.screen import (
    Column,
    heading,
    make_table,
    plain,
    render_notes,
    render_pairs,
    show,
)
from tightfit.clusters.slurm.queue import read_job_file
from tightfit.core.text import count_of
from tightfit.core.units import GIB, render_bytes, render_count, render_seconds
from tightfit.estimation.result import Verdict
from tightfit.planning.describe import describe_how, describe_levers
from tightfit.planning.plan import Plan
from tightfit.runs.report import RunReport
from tightfit.runs.report_words import list_results, render_error, render_quantity
from tightfit.runs.run_folder import RunFolder, RunStatus


def show_start(plan: Plan, *, folder: Path, free_bytes: int, needed_bytes: int) -> None:
    """The plan in brief and what is about to happen."""
    show(_render_start(plan, folder, free_bytes, needed_bytes))


def _render_start(
    plan: Plan, folder: Path, free_bytes: int, needed_bytes: int
) -> Iterator[RenderableType]:
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
        ("folder", str(folder)),
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
    epochs = "1 epoch" if plan.num_epochs == 1 else f"{plan.num_epochs:,.3g} epochs"
    rate = f", learning rate {plan.training.learning_rate:g}" if plan.training else ""
    batch = count_of(plan.effective_batch, "sequence")
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


def show_end(
    report: RunReport, *, folder: Path, artefact: Path | None, notes: Sequence[str]
) -> None:
    """Results, predicted beside measured, and what to do next."""
    show(_render_end(report, folder, artefact, notes))


def _render_end(
    report: RunReport, folder: Path, artefact: Path | None, notes: Sequence[str]
) -> Iterator[RenderableType]:
    if report.status is RunStatus.FAILED and not report.num_tokens and not report.plan_changes:
        yield from render_notes("Notes", notes)  # it never began: there is nothing but the error
        return
    yield heading(f"{report.name}: {report.status.value} at step {report.step:,}")
    yield ""
    results = [(result.label, result.value) for result in list_results(report)]
    yield render_pairs(results)
    compared = [
        (
            item.name,
            render_quantity(item.predicted, item.unit),
            render_quantity(item.measured, item.unit),
            render_error(item.error_percent),
        )
        for item in report.compared
    ]
    if compared:
        columns = (
            Column(title=""),
            Column(title="predicted", right=True),
            Column(title="measured", right=True),
            Column(title="off by", right=True),
        )
        yield ""
        yield make_table(columns, compared)
    yield from render_notes("Plan changed", [event.text for event in report.plan_changes])
    yield from render_notes("Notes", notes)
    yield from render_notes("Next", list(list_next(report, folder, artefact)))


def list_next(report: RunReport, folder: Path, artefact: Path | None) -> Iterator[str]:
    """Commands that go on from here."""
    name = shlex.quote(str(folder))
    if report.status is not RunStatus.FINISHED:
        verb = "train" if read_job_file(RunFolder(path=folder)) is None else "submit"
        yield f"tightfit {verb} {name}    (goes on from the last checkpoint)"
        return
    if artefact is not None:
        yield f"the tuned {'model' if artefact.name == 'model' else 'adapter'} is in {artefact}"
    yield f"tightfit eval {name} --data FILE"
    yield f"tightfit runs {name}    (report: {name}/report.html)"
