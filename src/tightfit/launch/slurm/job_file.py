"""slurm.json in a run folder: the job that it was last submitted as."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from tightfit.core.files import write_atomic
from tightfit.ledger.run_folder import RunFolder

JOB_FILE = "slurm.json"


class SubmittedJob(BaseModel):
    """By it the job is found again, from another terminal or another day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    partition: str
    submitted_at: str
    """UTC, ISO 8601."""


def read_job_file(run: RunFolder) -> SubmittedJob | None:
    """None where the run was never submitted."""
    try:
        return SubmittedJob.model_validate_json((run.path / JOB_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write_job_file(run: RunFolder, job: SubmittedJob) -> None:
    write_atomic(run.path / JOB_FILE, job.model_dump_json(indent=2) + "\n")
