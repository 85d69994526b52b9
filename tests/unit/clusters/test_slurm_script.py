"""The batch script run for real, with stand-ins for Slurm's commands and for the training."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from slurm_cases import make

from tightfit.clusters.protocol import JobSpec
from tightfit.clusters.site import Site, SlurmSite
from tightfit.clusters.slurm.script import (
    BatchJob,
    GpuRequest,
    find_resources,
    make_batch_job,
    render_time,
    write_script,
)
from tightfit.core.errors import UsageError
from tightfit.core.import_path import module_words

SRUN = """#!/bin/bash
for word; do echo "srun|$word" >>"$LOG"; done
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@" &
trap 'kill -USR1 $!' USR1
wait $!; code=$?
if [ $code -gt 128 ]; then wait $!; code=$?; fi
exit $code
"""
PYTHON = """#!/bin/bash
for word; do echo "python|$word" >>"$LOG"; done
if [ "$3" = tightfit.clusters.nodes ]; then echo 10.0.0.1 eth7; exit 0; fi
if [ "$TRAIN" = wait ]; then trap 'exit 75' USR1; echo ready >>"$LOG"; sleep 60 & wait $!; fi
exit $TRAIN
"""
SCONTROL = """#!/bin/bash
echo "scontrol|$*" >>"$LOG"
if [ "$1" = show ]; then echo n1; echo n2; else kill -9 $PPID; fi
"""
SQUEUE = '#!/bin/bash\necho "$STATE"\n'
APPTAINER = '#!/bin/bash\nshift 2; exec "$@"\n'
REQUEUED = -signal.SIGKILL
"""Slurm ends the script that asked to be queued again."""


class Stage:
    """A folder of stand-ins first in PATH, and a script to run among them."""

    def __init__(self, folder: Path, case: str, site: Site | None = None) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.write_text("")
        commands = {"srun": SRUN, "python": PYTHON, "scontrol": SCONTROL, "squeue": SQUEUE}
        for name, text in {**commands, "apptainer": APPTAINER}.items():
            path = folder / name
            path.write_text(text)
            path.chmod(0o755)
        run = folder / "it's a run"
        run.mkdir()
        (run / "state.json").write_text('{"status": "finished"}')
        self.run_folder = run
        made = make(case)
        site = site or Site(python=str(folder / "python"))
        job = make_batch_job(
            JobSpec(plan=made.plan, run=run),
            site,
            partition="p",
            gpu=GpuRequest(),
            resources=made.resources,
        )
        self.script = folder / "job.sbatch"
        self.script.write_text(write_script(job, site))

    def start(
        self, *, train: str, state: str = "RUNNING", restarts: int = 0
    ) -> subprocess.Popen[str]:
        own = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "LOG": str(self.log),
            "TRAIN": train,
            "STATE": state,
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        return subprocess.Popen(["bash", self.script], env={**os.environ, **own}, text=True)

    def run(self, *, train: str, state: str = "RUNNING", restarts: int = 0) -> int:
        process = self.start(train=train, state=state, restarts=restarts)
        return process.wait(timeout=60)

    @property
    def is_requeued(self) -> bool:
        return "scontrol|requeue 12345" in self.log.read_text()


@pytest.mark.parametrize(
    ("train", "state", "restarts", "code"),
    [
        ("0", "RUNNING", 0, 0),
        ("75", "RUNNING", 0, REQUEUED),
        ("75", "RUNNING", 9, REQUEUED),
        ("75", "RUNNING", 10, 1),
        ("75", "COMPLETING", 0, 75),
        ("5", "RUNNING", 0, 5),
        ("70", "RUNNING", 0, 70),
        ("1", "RUNNING", 0, 1),
        ("137", "RUNNING", 0, REQUEUED),
        ("137", "RUNNING", 5, 1),
    ],
)
def test_what_goes_back_to_the_queue(
    tmp_path: Path, train: str, state: str, restarts: int, code: int
) -> None:
    stage = Stage(tmp_path, "7b-on-one-v100")

    assert stage.run(train=train, state=state, restarts=restarts) == code
    assert stage.is_requeued == (code == REQUEUED)


def test_several_nodes_meet_at_the_first_and_a_lost_one_is_another_try(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "13b-on-two-nodes-of-three")

    assert stage.run(train="1") == REQUEUED
    said = stage.log.read_text()
    wanted = [*module_words("tightfit", "train"), str(stage.run_folder), "--as-planned",
              "--nodes", "2",
              "--rendezvous", "10.0.0.1:22345", "--node-rank", "0",
              "--local-addr", "10.0.0.1", "--interface", "eth7"]  # fmt: skip
    assert "".join(f"python|{word}\n" for word in wanted) in said
    assert "scontrol|show hostnames n[1-2]" in said


def test_of_several_nodes_saved_and_stopped_is_no_bad_exit(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "13b-on-two-nodes-of-three")
    assert stage.run(train="75") == 0  # finished, says its state

    (stage.run_folder / "state.json").write_text('{\n  "status": "stopped"\n}')
    assert stage.run(train="75") == REQUEUED


@pytest.mark.parametrize("failing", ["module load cuda/99", "modul load cuda", "source gone.sh"])
def test_a_set_up_that_fails_ends_the_job_before_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], failing: str
) -> None:
    inner = tmp_path / "activate"
    inner.write_text("false\ntrue\n")  # what a sourced file does inside is its own affair
    site = Site(
        python=str(tmp_path / "python"),
        setup=(
            "module() { echo no module $2 >&2; return 3; }",
            f"source '{inner}'",
            "module load optional || true",
            "if false; then true; fi",
            failing,
        ),
    )
    stage = Stage(tmp_path, "7b-on-one-v100", site)
    code = stage.run(train="0")

    assert code == {"module": 3, "modul": 127, "source": 1}[failing.split(maxsplit=1)[0]]
    assert "python" not in stage.log.read_text()
    assert f"set-up of site.yaml failed with {code}: {failing}\n" in capfd.readouterr().out


def test_a_set_up_that_works_is_over_when_training_starts(tmp_path: Path) -> None:
    site = Site(python=str(tmp_path / "python"), setup=("true",))
    stage = Stage(tmp_path, "7b-on-one-v100", site)

    assert stage.run(train="75") == REQUEUED


def test_a_container_with_spaces_in_its_name_gets_through(tmp_path: Path) -> None:
    site = Site(python=str(tmp_path / "python"), container="apptainer exec '/my images/it.sif'")
    stage = Stage(tmp_path, "13b-on-two-nodes-of-three", site)

    assert stage.run(train="0") == 0
    assert "python|train\n" in stage.log.read_text()


def test_the_warning_of_the_limit_is_passed_on_and_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "7b-on-one-v100")
    process = stage.start(train="wait")
    ends = time.monotonic() + 30
    while "ready" not in stage.log.read_text() and time.monotonic() < ends:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # seen through
    process.send_signal(signal.SIGUSR1)

    assert process.wait(timeout=60) == REQUEUED
    assert stage.is_requeued


def test_every_option_can_stand_in_the_script() -> None:
    job = BatchJob(
        name="a job: with/odd name",
        partition=None,
        log="/my runs/%A-%a.out",
        body=("true",),
        array_size=8,
        gpu=GpuRequest(constraint="a100"),
    )
    slurm = SlurmSite(partition="gpu", constraint="ib", extra=("--exclusive",))
    script = write_script(job, Site(slurm=slurm))

    assert "#SBATCH --job-name=a-job-with-odd-name\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert "#SBATCH --constraint=ib&a100\n" in script
    assert "#SBATCH --array=0-7\n" in script
    assert "#SBATCH --output='/my runs/%A-%a.out'\n" in script
    assert "#SBATCH --exclusive\n" in script
    assert "--mem" not in script


def test_a_line_break_in_a_folder_is_refused() -> None:
    job = BatchJob(name="x", partition=None, log="/a\nb", body=())
    with pytest.raises(UsageError, match="line break"):
        write_script(job, Site())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "0-00:01:00"), (3600, "0-01:00:00"), (86_400 * 2 + 61, "2-00:02:00")],
)
def test_times_are_whole_minutes_rounded_up(seconds: float, text: str) -> None:
    assert render_time(seconds) == text


def test_a_short_limit_leaves_time_to_train_in() -> None:
    plan = make("7b-on-one-v100").plan
    found = find_resources(plan, max_seconds=None, asked_seconds=120, warn=120)

    assert found.warn_seconds == 30

    endless = plan.model_copy(update={"training": None, "num_epochs": 0.0})
    assert endless.num_steps == 0, "its length is not known"
    assert find_resources(endless, max_seconds=7200, asked_seconds=None, warn=120).seconds == 7200
