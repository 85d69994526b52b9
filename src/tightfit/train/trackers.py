"""Where a run's numbers also go: TensorBoard, and W&B or MLflow where they are named."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from tightfit.core.errors import EnvironmentFaultError
from tightfit.ledger.metrics import EvalRecord, Record, StepRecord
from tightfit.ledger.run_folder import RunFolder
from tightfit.planning.plan import Plan


class Tracker(Protocol):
    """Takes named numbers of a step."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, run: RunFolder, plan: Plan) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.events_path))
        self._writer.add_text("plan", f"```\n{plan.strategy.model_dump_json(indent=1)}\n```")

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: RunFolder, plan: Plan) -> None:
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
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


class _Mlflow:
    def __init__(self, run: RunFolder, plan: Plan) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment("tightfit")
        self._mlflow.start_run(run_name=run.path.name)
        self._mlflow.log_params(plan.strategy.model_dump(mode="json", exclude={"quirks"}))

    def log(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_KINDS: dict[str, type[_TensorBoard] | type[_Wandb] | type[_Mlflow]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def open_trackers(names: Sequence[str], run: RunFolder, plan: Plan) -> list[Tracker]:
    """One for each name; a package that is missing is said before the first step."""
    found: list[Tracker] = []
    for name in names:
        try:
            found.append(_KINDS[name](run, plan))
        except ImportError as fault:
            raise EnvironmentFaultError(
                f"Logging to {name} needs its package, which is not installed.",
                remedy=f"pip install {name}, or leave it out: --log-to none",
            ) from fault
    return found


def name_values(record: Record) -> dict[str, float]:
    """A record's numbers under the names that charts are grouped by."""
    if isinstance(record, StepRecord):
        found = {
            "train/loss": record.loss,
            "train/learning_rate": record.learning_rate,
            "train/grad_norm": record.grad_norm,
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
    if isinstance(record, EvalRecord):
        return {"eval/loss": record.loss, "eval/perplexity": record.perplexity}
    return {}
