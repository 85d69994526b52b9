"""report.json: what a run did and how far its prediction was off, as numbers and as lines.

Also finds runs: folders with a plan, here or one level further in.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from pydantic import ValidationError

from tightfit.core.errors import NotFoundError, UserError
from tightfit.core.files import read_holder, write_atomic
from tightfit.core.frozen import FiniteFrozen
from tightfit.core.packages import __version__
from tightfit.core.reading import read_bytes
from tightfit.core.text import did_you_mean
from tightfit.core.units import render_bytes, render_count, render_seconds
from tightfit.planning.describe import name_method
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import (
    PLAN_CHANGE,
    EvalRecord,
    EventRecord,
    PreferenceRecord,
    Record,
    Speed,
    StepRecord,
    keep_finite,
    measure_last,
    measure_losses,
    measure_speed,
    read_records,
)
from tightfit.runs.run_folder import Environment, RunFolder, RunState, RunStatus

CLOCK_SLACK_SECONDS = 5.0
"""A process that began this long after the state was written is another one with the same id."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One run as it stands."""

    name: str
    """The folder's; of runs shown together, one that no other has."""
    folder: RunFolder
    plan: Plan
    state: RunState
    environment: Environment | None
    steps: tuple[StepRecord, ...]
    """By step, each once: the last line wins where a resumed run did it again."""
    evals: tuple[EvalRecord, ...]
    events: tuple[EventRecord, ...]
    current_steps: tuple[StepRecord, ...]
    """Those under the plan that is in force now; all of them if it has none yet."""

    @cached_property
    def report(self) -> RunReport:
        return report_run(self)


def read_run(run: RunFolder) -> PastRun:
    """Everything in the folder; only a plan must be there."""
    if not run.is_run():
        raise NotFoundError(
            f"{run.path} is no run folder: it has no plan.json.",
            remedy="tightfit runs    (lists the runs there are)",
        )
    plan = run.read_plan()
    records = read_records(run.metrics_path)
    changes = [place for place, record in enumerate(records) if is_plan_change(record)]
    steps = _last_of_each(records)
    evals = {record.step: record for record in records if isinstance(record, EvalRecord)}
    return PastRun(
        name=run.path.resolve().name,
        folder=run,
        plan=plan,
        state=probe_state(run),
        environment=run.read_environment(),
        steps=steps,
        evals=tuple(evals[step] for step in sorted(evals)),
        events=tuple(record for record in records if isinstance(record, EventRecord)),
        current_steps=_last_of_each(records[changes[-1] :]) or steps if changes else steps,
    )


def is_plan_change(record: Record) -> bool:
    return isinstance(record, EventRecord) and record.text.startswith(PLAN_CHANGE)


def _last_of_each(records: Sequence[Record]) -> tuple[StepRecord, ...]:
    steps = {record.step: record for record in records if isinstance(record, StepRecord)}
    return tuple(steps[step] for step in sorted(steps))


def probe_state(run: RunFolder) -> RunState:
    """The run's last state, or `died` where the process that runs or starts it is gone."""
    try:
        state = run.read_state()
    except NotFoundError:
        return RunState(status=RunStatus.PREPARED, updated_at=_changed_at(run.plan_path))
    except UserError as error:
        return RunState(
            status=RunStatus.FAILED,
            problem=error.problem,
            remedy=error.remedy,
            updated_at=_changed_at(run.state_path),
        )
    what = "process"
    if state.status is RunStatus.PREPARED:
        state, what = _add_launcher(run, state), "launcher"
    if state.status not in (RunStatus.RUNNING, RunStatus.PREPARED) or not _is_gone(run, state):
        return state
    return state.model_copy(
        update={
            "status": RunStatus.DIED,
            "problem": state.problem or f"Its {what} {state.pid} is gone.",
            "remedy": state.remedy or "start it again with the same command: it resumes",
        }
    )


def _add_launcher(run: RunFolder, state: RunState) -> RunState:
    """With the launcher that its lock names: a run that only waits for its start has none."""
    holder = read_holder(run.lock_path)
    if holder is None:
        return state
    return state.model_copy(
        update={"pid": holder[0], "host": holder[1], "updated_at": _changed_at(run.lock_path)}
    )


def _is_gone(run: RunFolder, state: RunState) -> bool:
    """Known only of a process on this host."""
    host = state.host
    if host is None:
        environment = run.read_environment()
        host = environment.hostname if environment is not None else None
    if state.pid is None or host != socket.gethostname():
        return False
    try:
        process = psutil.Process(state.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        began = process.create_time()
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False
    written = parse_time(state.updated_at)
    return written is not None and began > written.timestamp() + CLOCK_SLACK_SECONDS


def parse_time(text: str) -> datetime | None:
    """ISO 8601, also with the `Z` that Python before 3.11 does not read; UTC by default."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def _changed_at(path: Path) -> str:
    try:
        seconds = path.stat().st_mtime
    except OSError:
        seconds = 0.0
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


# report.json: what a run did, and how far its prediction was off.

SCHEMA_VERSION = 1


class Unit(str, Enum):
    """Of a compared quantity; rendered by `render_quantity`."""

    BYTES = "bytes"
    SECONDS = "seconds"
    TOKENS_PER_SECOND = "tokens_per_second"
    FRACTION = "fraction"


class Comparison(FiniteFrozen):
    """One quantity, predicted beside measured."""

    name: str
    unit: Unit
    predicted: float | None
    measured: float | None
    error_percent: float | None
    """Of what was measured; above 0: predicted too much. None: one side is not known."""


class EvalPoint(FiniteFrozen):
    """One pass over the held-back rows. None: it was not finite."""

    step: int
    loss: float | None
    perplexity: float | None
    preference: PreferenceRecord | None = None


class Event(FiniteFrozen):
    step: int
    text: str


class RunReport(FiniteFrozen):
    """One run in numbers. A None was not measured, or was not finite."""

    schema_version: int = SCHEMA_VERSION
    tightfit_version: str
    name: str
    status: RunStatus
    problem: str | None
    remedy: str | None
    updated_at: str
    model: str
    num_params: int
    num_trainable_params: int
    method: str
    """`lora`, `qlora`, `full`: see `planning.describe.name_method`."""
    strategy: str
    """The whole strategy in one line."""
    hardware: str
    is_cpu: bool
    """`gpu` memory is then the process's."""
    step: int
    num_steps: int
    """0: not counted yet."""
    num_epochs: float | None
    """Passes over the data that were done."""
    num_tokens: int
    num_trained_tokens: int
    total_seconds: float
    """All steps together, with what lay between them."""
    seconds_per_epoch: float | None
    seconds_per_step: float | None
    """Median of the settled steps."""
    tokens_per_second: float | None
    mfu_fraction: float | None
    data_wait_fraction: float | None
    first_loss: float | None
    """Smoothed over the first few steps."""
    last_loss: float | None
    num_nonfinite_losses: int
    last_router_loss: float | None = None
    """Mean of the last few steps, as `last_loss`; so the next two."""
    last_expert_load_max: float | None = None
    last_idle_experts_fraction: float | None = None
    last_preference: PreferenceRecord | None = None
    """The same of every reward; None where no preferences are learnt."""
    eval_before: EvalPoint | None
    eval_after: EvalPoint | None
    peak_gpu_allocated_bytes: int | None
    peak_gpu_reserved_bytes: int | None
    peak_host_bytes: int | None
    """Resident memory of rank 0."""
    num_alloc_retries: int
    compared: tuple[Comparison, ...]
    plan_changes: tuple[Event, ...]
    """Plans given up for want of memory, and what followed."""
    events: tuple[Event, ...]
    """The others."""
    disk_bytes: int


def make_report(run: RunFolder) -> RunReport:
    """From whatever the folder holds by now; touches nothing."""
    return read_run(run).report


def write_report(run: RunFolder, report: RunReport) -> None:
    write_atomic(run.report_path, report.model_dump_json(indent=2) + "\n")


def read_report(run: RunFolder) -> RunReport:
    """The written report where it is newer than all it was made from, else a fresh one."""
    try:
        written = run.report_path.stat().st_mtime_ns
        sources = (run.plan_path, run.state_path, run.metrics_path)
        if all(written >= path.stat().st_mtime_ns for path in sources if path.exists()):
            report = RunReport.model_validate_json(read_bytes(run.report_path))
            if report.status is probe_state(run).status:
                return report
    except (OSError, ValidationError):
        pass
    return make_report(run)


def report_run(past: PastRun) -> RunReport:
    plan, steps = past.plan, past.steps
    speed = measure_speed(past.current_steps)
    first, last = measure_losses(steps)
    epochs = keep_finite(steps[-1].epoch) if steps else None
    seconds = sum(r.seconds for r in steps if isfinite(r.seconds) and r.seconds > 0)
    evals = [
        EvalPoint(
            step=r.step,
            loss=keep_finite(r.loss),
            perplexity=keep_finite(r.perplexity),
            preference=r.preference,
        )
        for r in past.evals
    ]
    events = [Event(step=record.step, text=record.text) for record in past.events]
    return RunReport(
        tightfit_version=__version__,
        name=past.name,
        status=past.state.status,
        problem=past.state.problem,
        remedy=past.state.remedy,
        updated_at=past.state.updated_at,
        model=plan.model.name,
        num_params=plan.estimate.parameters.total,
        num_trainable_params=plan.estimate.parameters.trainable,
        method=name_method(plan.strategy),
        strategy=plan.summary,
        hardware=describe_hardware(plan),
        is_cpu=is_cpu_plan(plan),
        step=max(past.state.step, steps[-1].step if steps else 0),
        num_steps=past.state.num_steps,
        num_epochs=epochs,
        num_tokens=sum(record.num_tokens for record in steps),
        num_trained_tokens=sum(record.num_trained_tokens for record in steps),
        total_seconds=seconds if isfinite(seconds) else 0.0,
        seconds_per_epoch=keep_finite(seconds / epochs) if epochs and epochs > 0 else None,
        seconds_per_step=speed.seconds_per_step,
        tokens_per_second=speed.tokens_per_second,
        mfu_fraction=speed.mfu_fraction,
        data_wait_fraction=speed.data_wait_fraction,
        first_loss=first,
        last_loss=last,
        num_nonfinite_losses=sum(not isfinite(record.loss) for record in steps),
        last_router_loss=measure_last(record.router_loss for record in steps),
        last_expert_load_max=measure_last(record.expert_load_max for record in steps),
        last_idle_experts_fraction=measure_last(record.idle_experts_fraction for record in steps),
        last_preference=_measure_rewards(steps),
        # The one before the first step, and the last one.
        eval_before=evals[0] if evals and evals[0].step == 0 else None,
        eval_after=evals[-1] if evals and evals[-1].step > 0 else None,
        peak_gpu_allocated_bytes=_peak(past.current_steps, "gpu_allocated_bytes"),
        peak_gpu_reserved_bytes=_peak(past.current_steps, "gpu_reserved_bytes"),
        peak_host_bytes=_peak(past.current_steps, "host_bytes"),
        num_alloc_retries=max((record.num_alloc_retries for record in steps), default=0),
        compared=compare(plan, past.current_steps, speed),
        plan_changes=tuple(event for event in events if event.text.startswith(PLAN_CHANGE)),
        events=tuple(event for event in events if not event.text.startswith(PLAN_CHANGE)),
        disk_bytes=measure_disk(past.folder.path),
    )


def _measure_rewards(steps: tuple[StepRecord, ...]) -> PreferenceRecord | None:
    found = [record.preference for record in steps if record.preference is not None]
    if not found:
        return None
    return PreferenceRecord(
        **{
            name: measure_last(getattr(one, name) for one in found)
            for name in PreferenceRecord.model_fields
        }
    )


def compare(plan: Plan, steps: tuple[StepRecord, ...], speed: Speed) -> tuple[Comparison, ...]:
    """Like beside like: torch's reserved memory has no CUDA context in it, so neither side has."""
    gpu, host, time = plan.estimate.gpu, plan.estimate.host, plan.estimate.time
    allocated, reserved = _peak(steps, "gpu_allocated_bytes"), _peak(steps, "gpu_reserved_bytes")
    resident = _peak(steps, "host_bytes")
    if is_cpu_plan(plan):
        memory = [("process memory", Unit.BYTES, gpu.peak_reserved_bytes, allocated)]
    else:
        # Rank 0 was looked at; the prediction is for all ranks of a node.
        of_node = None if resident is None else resident * plan.strategy.gpus_per_node
        inside = gpu.peak_reserved_bytes - gpu.context_bytes
        memory = [
            ("GPU memory, allocated", Unit.BYTES, gpu.peak_allocated_bytes, allocated),
            ("GPU memory, reserved", Unit.BYTES, inside, reserved),
            ("host memory of a node", Unit.BYTES, host.peak_bytes, of_node),
        ]
    tokens = Unit.TOKENS_PER_SECOND
    pace = [
        ("time per step", Unit.SECONDS, time.seconds_per_step, speed.seconds_per_step),
        ("tokens per second", tokens, time.tokens_per_second, speed.tokens_per_second),
    ]
    return tuple(compare_one(*row) for row in (*memory, *pace))


def compare_one(
    name: str, unit: Unit, predicted: float | None, measured: float | None
) -> Comparison:
    percent = None
    if predicted is not None and measured:
        percent = keep_finite(100.0 * (predicted - measured) / measured)
    return Comparison(
        name=name, unit=unit, predicted=predicted, measured=measured, error_percent=percent
    )


def is_cpu_plan(plan: Plan) -> bool:
    return plan.hardware.node.gpu.is_cpu


def describe_hardware(plan: Plan) -> str:
    """`2 nodes of 4 x Tesla T4`."""
    cards = f"{plan.strategy.gpus_per_node} x {plan.hardware.node.gpu.name}"
    nodes = plan.strategy.num_nodes
    return cards if nodes == 1 else f"{nodes} nodes of {cards}"


def measure_disk(folder: Path) -> int:
    """Bytes of all files below; links are not followed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(place) / name).lstat().st_size
            except OSError:
                continue  # a checkpoint that is being put away
    return total


def _peak(steps: tuple[StepRecord, ...], field: str) -> int | None:
    return max((int(getattr(record, field)) for record in steps), default=None) or None


# The settings of a run as flat names and values, and what differs between runs.

NOT_SET = "-"


def list_settings(plan: Plan) -> dict[str, str]:
    """What was chosen, by the names that recipes and `--set` use."""
    found = {
        "model": plan.model.name,
        "hardware": describe_hardware(plan),
        "data": NOT_SET if plan.data is None else plan.data.source,
        "epochs": f"{plan.num_epochs:g}",
        "effective_batch": str(plan.effective_batch),
    }
    found |= _flatten(plan.strategy.model_dump(mode="json"))
    if plan.training is not None:
        found |= _flatten(plan.training.model_dump(mode="json", exclude={"data"}))
        found["data"] = ", ".join(source.path for source in plan.training.data) or found["data"]
    found["tightfit_version"] = plan.tightfit_version
    return found


def list_differing(plans: Sequence[Plan]) -> dict[str, tuple[str, ...]]:
    """Name to one value per plan, for names whose values are not all the same."""
    settings = [list_settings(plan) for plan in plans]
    names = dict.fromkeys(name for found in settings for name in found)
    rows = {name: tuple(found.get(name, NOT_SET) for found in settings) for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = _render(value)
    return flat


def _render(value: Any) -> str:
    if value is None:
        return NOT_SET
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_render, value)) or NOT_SET
    return f"{value:g}" if isinstance(value, float) else str(value)


# A run's report as labelled lines, the same on the terminal and in the HTML page.

UNKNOWN = "-"


class ResultLine(NamedTuple):
    """One line of a report."""

    label: str
    value: str
    meaning: str
    """For whoever sees the word for the first time."""


def list_results(report: RunReport) -> list[ResultLine]:
    """Every result, in the same order for every run, so that runs can stand side by side."""
    bad = report.num_nonfinite_losses
    broken = f" ({bad:,} not finite)" if bad else ""
    before, after = report.eval_before, report.eval_after
    what = "process memory" if report.is_cpu else "GPU memory"
    seconds, size = Unit.SECONDS, Unit.BYTES
    total = render_quantity(report.total_seconds or None, seconds)
    speed = render_quantity(report.tokens_per_second, Unit.TOKENS_PER_SECOND)
    mfu = render_quantity(report.mfu_fraction, Unit.FRACTION)
    waited = render_quantity(report.data_wait_fraction, Unit.FRACTION)
    epochs = UNKNOWN if report.num_epochs is None else f"{report.num_epochs:,.2f}"
    rows = [
        ("steps", render_progress(report), "times the weights were changed"),
        ("epochs", epochs, "passes over the training rows"),
        ("tokens", render_count(report.num_tokens),
         "pieces of words that were read, padding left out"),
        ("trained tokens", render_count(report.num_trained_tokens),
         "those among them that the model learnt to write"),
        ("train loss, first", _loss(report.first_loss), "mean of the first few steps"),
        ("train loss, last", _loss(report.last_loss) + broken,
         "mean of the last few steps; lower is better"),
        *_list_routing(report),
        *_list_rewards(report),
        ("eval loss, before", _eval_loss(before),
         "on rows held back from training, before the first step"),
        ("eval loss, after", _eval_loss(after), "on the same rows at the end: what counts"),
        ("perplexity, before", _perplexity(before),
         "e to the eval loss: how many words it hesitates between"),
        ("perplexity, after", _perplexity(after), "the same at the end"),
        ("time", total, "all steps, with what lay between them"),
        ("time per epoch", render_quantity(report.seconds_per_epoch, seconds),
         "one pass over the training rows"),
        ("time per step", render_quantity(report.seconds_per_step, seconds),
         "median, without warm-up"),
        ("tokens per second", speed, "over all devices, padding left out"),
        ("MFU", mfu, "share of the card's peak arithmetic that went into the model"),
        ("data wait", waited, "share of the time spent waiting for rows; near 0 is well"),
        (f"{what}, peak", render_quantity(report.peak_gpu_allocated_bytes, size),
         "most that was allocated at once on rank 0"),
    ]  # fmt: skip
    if not report.is_cpu:
        rows += [
            (f"{what}, reserved", render_quantity(report.peak_gpu_reserved_bytes, size),
             "with what the allocator kept for reuse"),
            ("host memory, peak", render_quantity(report.peak_host_bytes, size),
             "RAM of rank 0's process"),
            ("allocator retries", f"{report.num_alloc_retries:,}",
             "times the card was nearly full and cached memory had to be freed"),
        ]  # fmt: skip
    rows += [
        ("plan changes", f"{len(report.plan_changes):,}",
         "times it ran out of memory and went on with a smaller plan"),
        ("disk", render_bytes(report.disk_bytes), "all files of the run folder"),
    ]  # fmt: skip
    return [ResultLine(*row) for row in rows]


def _list_routing(report: RunReport) -> list[tuple[str, str, str]]:
    """Lines that only mixtures of experts have."""
    rows = []
    if report.last_router_loss is not None:
        rows.append(
            (
                "router loss, last",
                _loss(report.last_router_loss),
                "mean of the last few steps; the experts per token where all have the same load",
            )
        )
    if report.last_expert_load_max is not None:
        rows += [
            ("expert load, max", f"{report.last_expert_load_max:,.2f}x",
             "tokens of the most loaded expert of any layer over that layer's mean, at the end"),
            ("idle experts", render_quantity(report.last_idle_experts_fraction, Unit.FRACTION),
             "share of all layers' experts without a token in a step, at the end"),
        ]  # fmt: skip
    return rows


def _list_rewards(report: RunReport) -> list[tuple[str, str, str]]:
    """Lines that only runs on preferences have."""
    last = report.last_preference
    if last is None:
        return []
    before, after = (
        None if point is None else point.preference
        for point in (report.eval_before, report.eval_after)
    )
    rows = [
        ("reward margin, last", _loss(last.reward_margin),
         "chosen over rejected answers, mean of the last few steps"),
        ("chosen NLL, last", _loss(last.chosen_nll),
         "cross-entropy per token of chosen answers; rises where they get less likely too"),
    ]  # fmt: skip
    if last.kl is not None:
        rows.append(("KL, last", _loss(last.kl), "from the reference, over mismatched answers"))
    for when, found in (("before", before), ("after", after)):
        if found is not None and found.reward_accuracy is not None:
            rows.append(
                (f"eval accuracy, {when}",
                 render_quantity(found.reward_accuracy, Unit.FRACTION),
                 "share of held-back pairs whose chosen answer has the higher reward")
            )  # fmt: skip
    return rows


def align_results(reports: Sequence[RunReport]) -> list[tuple[str, ...]]:
    """Label and one value per run; a run on a CPU has other lines than one on a GPU."""
    found = [{result.label: result.value for result in list_results(r)} for r in reports]
    labels = dict.fromkeys(label for values in found for label in values)
    return [(label, *(values.get(label, UNKNOWN) for values in found)) for label in labels]


def render_quantity(value: float | None, unit: Unit) -> str:
    if value is None:
        return UNKNOWN
    if unit is Unit.BYTES:
        return render_bytes(value)
    if unit is Unit.SECONDS:
        return render_short_seconds(value)
    if unit is Unit.FRACTION:
        return f"{100 * value:.1f}%"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def render_short_seconds(seconds: float) -> str:
    """Like `render_seconds`, but a fast step does not read 0.00 s."""
    return f"{seconds * 1000:,.3g} ms" if seconds < 0.1 else render_seconds(seconds)


def render_error(percent: float | None) -> str:
    """`+3.1%`: predicted 3.1% too much."""
    return UNKNOWN if percent is None else f"{percent:+.1f}%"


def render_progress(report: RunReport) -> str:
    """`40 of 120`."""
    return f"{report.step:,} of {report.num_steps:,}" if report.num_steps else f"{report.step:,}"


def render_time(text: str) -> str:
    """`2026-07-01 10:00 UTC`; what is no time, as it is."""
    found = parse_time(text)
    return text if found is None else f"{found.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


def _loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.4f}"


def _eval_loss(point: EvalPoint | None) -> str:
    if point is None:
        return UNKNOWN
    return "not finite" if point.loss is None else _loss(point.loss)


def _perplexity(point: EvalPoint | None) -> str:
    if point is None or (point.perplexity is None and point.preference is not None):
        return UNKNOWN
    if point.perplexity is None:
        return "not finite"
    return f"{point.perplexity:,.4g}" if point.perplexity < 1000 else render_count(point.perplexity)


# Find runs: folders with a plan, here or one level further in.

DEFAULT_FOLDER = Path("runs")
LIST_COMMAND = "tightfit runs    (lists the runs there are)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run in a list: its report, or why it cannot be read."""

    folder: RunFolder
    report: RunReport | None
    error: UserError | None = None


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
    """Newest first; one that is broken stays in the list with its error."""
    found = []
    for run in {run.path.resolve(): run for run in folders}.values():
        try:
            found.append(FoundRun(folder=run, report=read_report(run)))
        except UserError as error:
            found.append(FoundRun(folder=run, report=None, error=error))
    return sorted(found, key=_last_change, reverse=True)


def _last_change(found: FoundRun) -> tuple[float, str]:
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
