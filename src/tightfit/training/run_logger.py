"""RunLogger: rank 0 writes metrics, state and trackers (TensorBoard, Weights & Biases, MLflow)."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Protocol

from tightfit.core.errors import SetupError
from tightfit.core.trackers import TRACKERS
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import (
    EvalRecord,
    EventRecord,
    Record,
    StepRecord,
    append_record,
    drop_after_step,
    read_records,
)
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus
from tightfit.training.distributed import DistContext


class RunLogger:
    """Writes metrics.jsonl, state.json and the trackers on rank 0; nothing on other ranks."""

    def __init__(self, run: RunFolder, plan: Plan, context: DistContext, *, num_steps: int) -> None:
        self._run = run
        self._plan = plan
        self._is_writing = context.is_first
        self._num_steps = num_steps
        self._trackers: list[Tracker] = []

    def open(self, *, step: int, damaged: Sequence[str] = ()) -> None:
        """Start, or resume after `step` steps: records of later steps are dropped.

        `damaged` are newer checkpoints that could not be used.
        """
        if not self._is_writing:
            return
        drop_after_step(self._run.metrics_path, step)
        names = self._plan.training.log_to if self._plan.training else ()
        self._trackers = open_trackers(names, self._run, self._plan)
        self.set_state(RunStatus.RUNNING, step)
        if step:
            passed_over = f"; damaged, and not used: {', '.join(damaged)}" if damaged else ""
            self.write(EventRecord(step=step, text=f"resumed after step {step}{passed_over}"))

    def write(self, record: Record) -> None:
        if not self._is_writing:
            return
        append_record(self._run.metrics_path, record)
        values = name_values(record)
        for tracker in self._trackers if values else ():
            tracker.log(values, record.step)

    def read_losses(self, step: int) -> list[float]:
        """The losses of steps up to `step`; any rank can read them."""
        records = read_records(self._run.metrics_path)
        return [r.loss for r in records if isinstance(r, StepRecord) and r.step <= step]

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation after `step` steps is recorded; False on other ranks than 0."""
        return self._is_writing and any(
            isinstance(record, EvalRecord) and record.step == step
            for record in read_records(self._run.metrics_path)
        )

    def set_state(self, status: RunStatus, step: int, *, exit_code: int | None = None) -> None:
        if self._is_writing:
            state = make_state(status, step, self._num_steps, exit_code=exit_code)
            self._run.write_state(state)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def make_state(
    status: RunStatus,
    step: int,
    num_steps: int,
    *,
    exit_code: int | None = None,
    problem: str | None = None,
    remedy: str | None = None,
) -> RunState:
    """The state of this process's run, now."""
    return RunState(
        status=status,
        step=step,
        num_steps=num_steps,
        problem=problem,
        remedy=remedy,
        exit_code=exit_code,
        pid=os.getpid(),
        host=socket.gethostname(),
        updated_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


# Trackers


class Tracker(Protocol):
    """Receives the named values of a step."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def open_trackers(names: Sequence[str], run: RunFolder, plan: Plan) -> list[Tracker]:
    """One tracker for each name; a missing package is an error before the first step."""
    found: list[Tracker] = []
    for name in names:
        record = TRACKERS[name]
        module, _, kind = record.factory.partition(":")
        try:
            found.append(getattr(importlib.import_module(module), kind)(run, plan))
        except ImportError as error:
            raise SetupError(
                f"Logging to {name} needs its package, which is not installed.",
                remedy=f"pip install {record.package}, or leave it out: --log-to none",
            ) from error
    return found


def name_values(record: Record) -> dict[str, float]:
    """A record's values by chart name."""
    if isinstance(record, EventRecord):
        return {}
    group = "eval" if isinstance(record, EvalRecord) else "train"
    rewards = {} if record.preference is None else record.preference.model_dump()
    found: dict[str, float | None] = {f"{group}/{key}": value for key, value in rewards.items()}
    if isinstance(record, EvalRecord):
        found |= {"eval/loss": record.loss, "eval/perplexity": record.perplexity}
        return {name: value for name, value in found.items() if value is not None}
    found |= {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "train/grad_norm": record.grad_norm,
        "train/router_loss": record.router_loss,
        "train/expert_load_max": record.expert_load_max,
        "train/idle_experts_fraction": record.idle_experts_fraction,
        "train/epoch": record.epoch,
        "speed/tokens_per_second": record.tokens_per_second,
        "speed/seconds_per_step": record.seconds,
        "speed/data_wait_seconds": record.data_wait_seconds,
        "speed/mfu_fraction": record.mfu_fraction,
        "memory/gpu_allocated_bytes": float(record.gpu_allocated_bytes),
        "memory/gpu_reserved_bytes": float(record.gpu_reserved_bytes),
        "memory/host_bytes": float(record.host_bytes),
    }
    return {name: value for name, value in found.items() if value is not None}


class TensorBoard:
    def __init__(self, run: RunFolder, plan: Plan) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.events_path))
        self._writer.add_text("plan", f"```\n{plan.strategy.model_dump_json(indent=1)}\n```")

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, run: RunFolder, plan: Plan) -> None:
        self._run: Any = importlib.import_module("wandb").init(
            project="tightfit",
            name=run.path.name,
            dir=str(run.path),
            config=plan.model_dump(mode="json"),
            resume="allow",
            id=run.path.name,
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, run: RunFolder, plan: Plan) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment("tightfit")
        self._mlflow.start_run(run_name=run.path.name)
        self._mlflow.log_params(plan.strategy.model_dump(mode="json", exclude={"quirks"}))

    def log(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self._mlflow.end_run()
