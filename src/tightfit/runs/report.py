"""report.json: a run folder read once, what the run did, and how far its prediction was off."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from tightfit.core.errors import NotFoundError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import FiniteFrozen
from tightfit.core.version import __version__
from tightfit.planning.plan import Plan
from tightfit.planning.request import name_method
from tightfit.runs.environment import Environment, read_environment
from tightfit.runs.metrics import (
    PLAN_CHANGE,
    EvalRecord,
    EventRecord,
    Record,
    Speed,
    StepRecord,
    keep_finite,
    measure_losses,
    measure_speed,
    read_records,
)
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

CLOCK_SLACK_SECONDS = 5.0
"""A process that began this long after the state was written is another one with the same id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """One run as it stands."""

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

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def plan_changes(self) -> tuple[EventRecord, ...]:
        return tuple(event for event in self.events if is_plan_change(event))


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
        folder=run,
        plan=plan,
        state=probe_state(run),
        environment=read_environment(run),
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
    """What the run last said, and `died` where it says `running` and its process is gone."""
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
    if state.status is not RunStatus.RUNNING or not _is_gone(run, state):
        return state
    return state.model_copy(
        update={
            "status": RunStatus.DIED,
            "problem": state.problem or f"Its process {state.pid} is gone.",
            "remedy": state.remedy or "start it again with the same command: it resumes",
        }
    )


def _is_gone(run: RunFolder, state: RunState) -> bool:
    """Only of a process on this host can that be said."""
    host = state.host
    if host is None:
        environment = read_environment(run)
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
    """ISO 8601, also with the `Z` that Python before 3.11 does not read; UTC where none is said."""
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
    """Of a compared quantity; rendered by `words.py`."""

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
    """`lora`, `qlora`, `full`: see `planning.request.name_method`."""
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
    return report_run(read_run(run))


def write_report(run: RunFolder) -> RunReport:
    report = make_report(run)
    write_atomic(run.report_path, report.model_dump_json(indent=2) + "\n")
    return report


def read_report(run: RunFolder) -> RunReport:
    """The written report where it is newer than all it was made from, else a fresh one."""
    try:
        written = run.report_path.stat().st_mtime_ns
        sources = (run.plan_path, run.state_path, run.metrics_path)
        if all(written >= path.stat().st_mtime_ns for path in sources if path.exists()):
            report = RunReport.model_validate_json(run.report_path.read_bytes())
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
    before, after = _pick_evals(past.evals)
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
        eval_before=before,
        eval_after=after,
        peak_gpu_allocated_bytes=_peak(past.current_steps, "gpu_allocated_bytes"),
        peak_gpu_reserved_bytes=_peak(past.current_steps, "gpu_reserved_bytes"),
        peak_host_bytes=_peak(past.current_steps, "host_bytes"),
        num_alloc_retries=max((record.num_alloc_retries for record in steps), default=0),
        compared=compare(plan, past.current_steps, speed),
        plan_changes=_as_events(past.plan_changes),
        events=_as_events(event for event in past.events if not is_plan_change(event)),
        disk_bytes=measure_disk(past.folder.path),
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
    pace = [
        ("time per step", Unit.SECONDS, time.seconds_per_step, speed.seconds_per_step),
        (
            "tokens per second",
            Unit.TOKENS_PER_SECOND,
            time.tokens_per_second,
            speed.tokens_per_second,
        ),
    ]
    return tuple(compare_one(*row) for row in (*memory, *pace))


def compare_one(
    name: str, unit: Unit, predicted: float | None, measured: float | None
) -> Comparison:
    return Comparison(
        name=name,
        unit=unit,
        predicted=predicted,
        measured=measured,
        error_percent=None if predicted is None else _error_percent(predicted, measured),
    )


def _error_percent(predicted: float, measured: float | None) -> float | None:
    return keep_finite(100.0 * (predicted - measured) / measured) if measured else None


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


def _pick_evals(evals: tuple[EvalRecord, ...]) -> tuple[EvalPoint | None, EvalPoint | None]:
    """The one before the first step, and the last one."""
    points = [
        EvalPoint(
            step=record.step,
            loss=keep_finite(record.loss),
            perplexity=keep_finite(record.perplexity),
        )
        for record in evals
    ]
    before = points[0] if points and points[0].step == 0 else None
    after = points[-1] if points and points[-1].step > 0 else None
    return before, after


def _as_events(records: Iterable[EventRecord]) -> tuple[Event, ...]:
    return tuple(Event(step=record.step, text=record.text) for record in records)


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
