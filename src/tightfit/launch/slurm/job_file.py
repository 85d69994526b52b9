"""slurm.json in a run folder: the job that it was last submitted as."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pydantic import BaseModel, ConfigDict, ValidationError

from tightfit.core.files import write_atomic
from tightfit.ledger.run_folder import RunFolder

JOB_FILE = "slurm.json"
_LOCK_FILE = "submit.lock"


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


@contextmanager
def one_at_a_time(run: RunFolder) -> Iterator[None]:
    """Between looking for the run's job and noting a new one; the kernel lets go if we die."""
    handle = os.open(run.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # a file system that knows no locks guards nothing
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
