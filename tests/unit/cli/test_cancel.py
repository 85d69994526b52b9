"""`tightfit cancel` with stand-ins for Slurm's commands, and a run on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
from conftest import Run

import tightfit
from submit_world import Slurm
from tightfit.api.cancel import CancelStatus
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

pytest_plugins = ("submit_world",)
pytestmark = pytest.mark.usefixtures("own_world")


def test_a_slurm_job_by_its_run_and_once_more(run: Run, job: Path, slurm: Slurm) -> None:
    run("submit", str(job), "--no-follow")  # to the default cluster, which the run records
    answer = run("cancel", "out")

    assert answer.code == 0, answer.err
    assert slurm.calls.read_text().count("scancel 42") == 1
    assert "Cancelled job 42 on Slurm" in answer.out
    assert "tightfit submit" in answer.out.split("To go on")[1]

    again = run("cancel", "out", "--json")
    assert (again.code, again.json["status"]) == (0, "over")
    assert slurm.calls.read_text().count("scancel 42") == 1


def test_a_slurm_job_by_its_number(run: Run, job: Path, slurm: Slurm) -> None:
    run("submit", str(job), "--on", "slurm:cpu", "--no-follow")
    found = run("cancel", "42", "--json").json

    assert (found["status"], found["job_id"]) == ("cancelled", "42")
    assert found["next"] == f"tightfit submit {Path('out').absolute()}"
    assert "scancel 42" in slurm.calls.read_text()
    over = run("cancel", "42")
    assert over.code == 0
    assert "over" in over.out


def test_a_job_that_is_no_run_is_left_alone(run: Run, tmp_path: Path, slurm: Slurm) -> None:
    with slurm.calls.open("a") as calls:  # somebody's own script in the queue
        calls.write(f"--parsable {tmp_path}/mine.sh\n")
    answer = run("cancel", "42")

    assert answer.code == 2
    assert "scancel 42" in answer.err
    assert "scancel" not in slurm.calls.read_text()


def test_a_run_that_goes_on_elsewhere_is_not_to_be_started_again(
    submitted_here: RunFolder, run: Run, slurm: Slurm
) -> None:
    slurm.say("")
    state = RunState(
        status=RunStatus.RUNNING,
        pid=os.getpid(),
        host=socket.gethostname(),
        updated_at=datetime.now(timezone.utc).isoformat(),
    )
    submitted_here.write_state(state)
    path = str(submitted_here.path)
    answer = run("cancel", path, "--on", "slurm")
    assert answer.code == 0, answer.err
    assert "To end it" in answer.out
    found = run("cancel", path, "--on", "slurm", "--json").json
    assert (found["status"], found["next"]) == ("over", f"tightfit cancel {path}")


def test_what_is_no_job(run: Run, slurm: Slurm) -> None:
    slurm.say("")  # as squeue prints of a job that it does not know
    assert run("cancel", "42").code == 3
    assert run("cancel", "no-such-run").code == 3
    assert run("cancel", "42", "--on", "moon").code == 2


HELD = """
import signal, sys
from pathlib import Path
from tightfit.clusters.local.launcher import lock_path
from tightfit.core.files import open_locked, write_holder
from tightfit.runs.run_folder import RunFolder
handle = open_locked(lock_path(RunFolder(path=Path(sys.argv[1])), None))
write_holder(handle)
print("ready", flush=True)
signal.pause()
"""


def test_a_run_on_this_machine(submitted_here: RunFolder) -> None:
    """Of `train` as well: its launcher holds the lock, and saves at SIGTERM."""
    path = str(submitted_here.path)
    with subprocess.Popen([sys.executable, "-c", HELD, path], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        result = tightfit.cancel(path)
        assert launcher.wait(10) == -signal.SIGTERM
    assert result.status is CancelStatus.CANCELLED
    assert result.job is not None
    assert result.job.job_id == str(launcher.pid)
    assert result.next_command == f"tightfit train {path}"

    state = RunState(status=RunStatus.FINISHED, updated_at="2026-01-01T00:00:00+00:00")
    submitted_here.write_state(state)
    over = tightfit.cancel(path)
    assert (over.status, over.next_command) == (CancelStatus.OVER, None)


@pytest.fixture
def submitted_here(tmp_path: Path) -> RunFolder:
    from made_runs import make_plan

    run = RunFolder(path=tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.write_plan(make_plan())
    return run
