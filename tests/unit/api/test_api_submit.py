"""submit as a Python call, with stand-ins for Slurm's commands, and to this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from submit_world import Slurm
from tightfit.api.submit import SubmitStatus, submit
from tightfit.core.errors import UsageError
from tightfit.runs.metrics import Record

pytest_plugins = ("submit_world",)
pytestmark = pytest.mark.usefixtures("own_world")


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def record(self, record: Record) -> None: ...

    def line(self, line: str) -> None: ...

    def say(self, text: str) -> None:
        self.texts.append(text)

    def tick(self) -> None: ...


def test_drafted_submitted_found_and_cancelled(job: Path, slurm: Slurm) -> None:
    drafted = submit(str(job), on="slurm:cpu", dry_run=True)
    assert drafted.status is SubmitStatus.DRAFTED
    assert drafted.draft is not None
    assert "#SBATCH --partition=cpu" in drafted.draft.text
    assert slurm.num_submitted == 0

    result = submit(str(job), on="slurm:cpu")
    assert result.status is SubmitStatus.SUBMITTED
    assert result.job is not None
    assert (result.job.job_id, result.job.label) == ("42", "job 42")
    assert result.plan is not None
    assert result.run is not None
    assert result.run.read_plan() == result.plan

    again = submit(str(job), on="slurm:cpu")
    assert again.status is SubmitStatus.FOUND
    assert slurm.num_submitted == 1
    again.cancel()
    notes = Notes()
    end = again.follow(notes)
    assert end.state == "CANCELLED"
    assert end.error is not None
    assert "was cancelled" in end.error.problem
    assert notes.texts == ["job 42: cancelled, restart 1"]


def test_what_no_cluster_takes(job: Path) -> None:
    with pytest.raises(UsageError, match="no cluster that takes jobs"):
        submit(str(job), on="2xT4")
    with pytest.raises(UsageError, match="`--namespace` is for Kubernetes"):
        submit(str(job), on="slurm:cpu", namespace="team")
    with pytest.raises(UsageError, match="`--account` is for Slurm"):
        submit(str(job), on="local", account="me")
