"""What every worker tells of itself, for progress and statistics; nothing depends on it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError

from tightfit.farm.leases import Why
from tightfit.farm.store import Store


class WorkerStatus(BaseModel):
    """workers/<name>.json. Times ending in `_s` are of the file server's clock."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str
    node: str
    partition: str
    job: str | None = None
    """The scheduler's name for the process: `123_4` of a Slurm array, or a process id."""
    state: str = "loading"
    """`loading`, `working`, `waiting`, `ended`, `stopped` or `broken`."""
    engine: str | None = None
    device: str | None = None
    num_slots: int | None = None
    joined_s: float
    loaded_s: float | None = None
    told_s: float
    """When this was written."""
    last_commit_s: float | None = None
    load_seconds: NonNegativeFloat = 0.0
    busy_seconds: NonNegativeFloat = 0.0
    idle_seconds: NonNegativeFloat = 0.0
    num_leases: NonNegativeInt = 0
    """Held now."""
    num_chunks: NonNegativeInt = 0
    num_answers: NonNegativeInt = 0
    num_failed: NonNegativeInt = 0
    num_prompt_tokens: NonNegativeInt = 0
    num_new_tokens: NonNegativeInt = 0
    num_discarded: NonNegativeInt = 0
    """Chunks that another had published first."""
    taken_over: dict[Why, int] = Field(default_factory=dict)
    fault: str | None = None


def status_path(worker: str) -> str:
    return f"workers/{worker}.json"


def write_status(store: Store, status: WorkerStatus) -> None:
    store.replace(status_path(status.worker), status.model_dump_json().encode())


def read_statuses(folder: Path) -> list[WorkerStatus]:
    """Of all workers that ever joined; what cannot be read is left out."""
    found = []
    for path in sorted((folder / "workers").glob("*.json")):
        try:
            found.append(WorkerStatus.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            continue
    return found
