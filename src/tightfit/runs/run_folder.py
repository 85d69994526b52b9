"""RunFolder: the paths of one run, and its plan, state and token folders on disk."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, NonNegativeInt, ValidationError

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import Frozen
from tightfit.planning.plan import Plan

_Document = TypeVar("_Document", bound=BaseModel)


class RunStatus(str, Enum):
    """Where a run stands."""

    PREPARED = "prepared"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Asked to stop (a signal, Ctrl-C); it has saved and can be resumed."""
    OUT_OF_MEMORY = "out-of-memory"
    """Waiting for a smaller plan; the launcher picks the next one."""
    FAILED = "failed"
    DIED = "died"
    """Never written: said of a running run whose process is gone; see `past_run.py`."""


class RunState(Frozen):
    """What the run last said of itself."""

    status: RunStatus
    step: NonNegativeInt = 0
    """Optimizer steps done."""
    num_steps: NonNegativeInt = 0
    """Optimizer steps in all; 0 until the data has been counted."""
    problem: str | None = None
    remedy: str | None = None
    exit_code: int | None = None
    """What the command should exit with, where the run has ended."""
    pid: int | None = None
    host: str | None = None
    """Where `pid` runs; None: the host of `environment.json`."""
    updated_at: str
    """UTC, ISO 8601."""


class TokenFolders(Frozen):
    """Where the encoded data of this run lies; encoded again if it is gone."""

    train: str
    eval: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The layout. Only paths and whole-file reads and writes; no judgement."""

    path: Path

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def state_path(self) -> Path:
        return self.path / "state.json"

    @property
    def tokens_path(self) -> Path:
        return self.path / "tokens.json"

    @property
    def environment_path(self) -> Path:
        """Versions, machine and command line of the last start."""
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON line per optimizer step and per evaluation: see `metrics.py`."""
        return self.path / "metrics.jsonl"

    @property
    def report_path(self) -> Path:
        """Predicted beside measured: see `report.py`."""
        return self.path / "report.json"

    @property
    def html_path(self) -> Path:
        return self.path / "report.html"

    @property
    def log_path(self) -> Path:
        """What the workers wrote to stdout and stderr."""
        return self.path / "log.txt"

    @property
    def events_path(self) -> Path:
        """TensorBoard's folder."""
        return self.path / "events"

    @property
    def checkpoints_path(self) -> Path:
        """`step-000040/` each; `.partial` endings are unfinished and never read."""
        return self.path / "checkpoints"

    @property
    def adapter_path(self) -> Path:
        """The tuned adapter in peft's format, with tokenizer and template."""
        return self.path / "adapter"

    @property
    def model_path(self) -> Path:
        """The tuned model in the Hugging Face format, where the method is full."""
        return self.path / "model"

    def is_run(self) -> bool:
        return self.plan_path.is_file()

    def read_plan(self) -> Plan:
        return _read(self.plan_path, Plan)

    def write_plan(self, plan: Plan) -> None:
        write_atomic(self.plan_path, plan.model_dump_json(indent=2) + "\n")

    def read_state(self) -> RunState:
        return _read(self.state_path, RunState)

    def write_state(self, state: RunState) -> None:
        write_atomic(self.state_path, state.model_dump_json(indent=2) + "\n")

    def read_tokens(self) -> TokenFolders:
        return _read(self.tokens_path, TokenFolders)

    def write_tokens(self, tokens: TokenFolders) -> None:
        write_atomic(self.tokens_path, tokens.model_dump_json(indent=2) + "\n")


def _read(path: Path, kind: type[_Document]) -> _Document:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{path.parent} is no run folder: it has no {path.name}.",
            remedy="tightfit runs    (lists the runs there are)",
        ) from error
    except (OSError, ValidationError) as error:
        raise InvalidInputError(
            f"{path} cannot be read as a run's {path.stem}: {str(error).splitlines()[0]}.",
            remedy="bring the file back from a copy, or start over: tightfit train RUN --fresh",
        ) from error
