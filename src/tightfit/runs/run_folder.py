"""RunFolder: the paths of one run, and its plan, state, environment and token folders on disk."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, NonNegativeInt, ValidationError

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.packages import __version__
from tightfit.core.reading import read_bytes
from tightfit.core.secrets import hide_secret_options
from tightfit.hardware.machine import (
    DriverReading,
    read_driver,
    read_machine,
    read_torch_build,
    read_version,
)
from tightfit.planning.plan import Plan

_Document = TypeVar("_Document", bound=BaseModel)


class RunStatus(str, Enum):
    PREPARED = "prepared"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Asked to stop (a signal, Ctrl-C); it has saved and can be resumed."""
    OUT_OF_MEMORY = "out-of-memory"
    """Waiting for a smaller plan; the launcher picks the next one."""
    FAILED = "failed"
    DIED = "died"
    """Never written: a run that runs, or starts, whose process is gone; see `probe_state`."""


class RunState(Frozen):
    """The run's own last state."""

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
    def lock_path(self) -> Path:
        """Held by the launcher, which it names; emptied when it ends in its own way."""
        return self.path / "launcher.lock"

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

    def read_environment(self) -> Environment | None:
        """None where it is missing or another version wrote it: nothing depends on it."""
        try:
            return Environment.model_validate_json(read_bytes(self.environment_path))
        except (OSError, ValidationError):
            return None

    def write_environment(self, environment: Environment) -> None:
        write_atomic(self.environment_path, environment.model_dump_json(indent=2) + "\n")

    def read_tokens(self) -> TokenFolders:
        return _read(self.tokens_path, TokenFolders)

    def write_tokens(self, tokens: TokenFolders) -> None:
        write_atomic(self.tokens_path, tokens.model_dump_json(indent=2) + "\n")


def _read(path: Path, kind: type[_Document]) -> _Document:
    try:
        return kind.model_validate_json(read_bytes(path))
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


# environment.json: versions, machine and command line of a run's last start.

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "bitsandbytes",
    "deepspeed",
    "liger-kernel",
    "flash-attn",
)
_CPUINFO = Path("/proc/cpuinfo")


class Environment(Frozen):
    """What the run stood on. Read by metadata and NVML; torch is never imported for it."""

    tightfit: str
    python: str
    platform: str
    packages: dict[str, str]
    """Name to version; what is not installed is not there."""
    torch_cuda: str | None = None
    """The CUDA that torch was built for; None where it was built for the CPU."""
    driver: str | None = None
    driver_cuda: str | None = None
    """The newest CUDA that the driver runs."""
    gpus: tuple[str, ...] = ()
    hostname: str
    cpu: str
    num_cores: NonNegativeInt
    memory_bytes: NonNegativeInt
    """RAM, or the container's limit where that is lower."""
    argv: tuple[str, ...]
    started_at: str
    """UTC, ISO 8601."""


def probe_environment(
    argv: Sequence[str], *, read_gpus: Callable[[], DriverReading] = read_driver
) -> Environment:
    """Look at this machine, at what is installed, and keep the command line."""
    machine, driver, build = read_machine(), read_gpus(), read_torch_build()
    found = {name: read_version(name) for name in PACKAGES}
    return Environment(
        tightfit=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: version for name, version in found.items() if version is not None},
        torch_cuda=_dotted(build.cuda) if build is not None else None,
        driver=driver.driver_version,
        driver_cuda=_dotted(driver.cuda_version),
        gpus=tuple(gpu.name for gpu in driver.gpus),
        hostname=socket.gethostname(),
        cpu=_name_cpu(),
        num_cores=machine.num_usable_cores,
        memory_bytes=machine.memory_limit_bytes or machine.memory_bytes,
        # A file name need not be text; JSON must be.
        argv=tuple(
            word.encode("utf-8", "backslashreplace").decode() for word in hide_secret_options(argv)
        ),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _dotted(version: tuple[int, int] | None) -> str | None:
    return f"{version[0]}.{version[1]}" if version else None


def _name_cpu() -> str:
    """The model's name where the kernel tells one, else the architecture."""
    try:
        text = _CPUINFO.read_text("utf-8", "replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()
