"""submit as a Python call, with stand-ins for Slurm's commands, and to this machine."""

from __future__ import annotations

import sys
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


FINISHING_WORKER = """
import sys
from pathlib import Path
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus
run = RunFolder(path=Path(sys.argv[sys.argv.index("train") + 1]))
assert sys.argv[-1] == "--as-planned"
now = "2026-01-01T00:00:00+00:00"
run.write_state(RunState(status=RunStatus.FINISHED, updated_at=now, step=6, num_steps=6))
"""


def test_this_machine_runs_it_in_the_background(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(FINISHING_WORKER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{worker}" "$@"\n')
    python.chmod(0o755)
    result = submit(str(job), on="here", dry_run=True)
    assert result.draft is not None
    assert result.draft.text.endswith("/out --as-planned\n")

    monkeypatch.setattr("tightfit.clusters.local.backend.PYTHON", str(python))
    result = submit(str(job), on="here")
    assert result.status is SubmitStatus.SUBMITTED
    end = result.follow(Notes())
    assert (end.state, end.exit_code, end.error) == ("finished", 0, None)
    assert submit(str(job), on="here").status is SubmitStatus.FINISHED


def test_what_no_cluster_takes(job: Path) -> None:
    with pytest.raises(UsageError, match="no cluster that takes jobs"):
        submit(str(job), on="2xT4")
    with pytest.raises(UsageError, match="`--namespace` is for Kubernetes"):
        submit(str(job), on="slurm:cpu", namespace="team")
    with pytest.raises(UsageError, match="`--account` is for Slurm"):
        submit(str(job), on="here", account="me")
