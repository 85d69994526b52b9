"""Trials: one plan, once, in a folder that is gone afterwards, whoever was killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import local_cases
from local_cases import Notes, make_plan, make_run, stand_in_command
from tightfit.clusters.local import launcher
from tightfit.clusters.local.launcher import lock_path
from tightfit.clusters.local.workers import RUN_VARIABLE, find_leftovers
from tightfit.core.errors import SetupError
from tightfit.core.settings import Sharding
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

HERE = Path(local_cases.__file__).parent
PATIENT_WORKER = """
import os, sys, time
from pathlib import Path
def main(argv):
    (Path(argv[0]) / f"here-{os.getpid()}").touch()
    time.sleep(600)
if __name__ == "__main__":
    main(sys.argv[1:])
"""
LAUNCHER = """
import sys
from pathlib import Path
from local_cases import Notes
from tightfit.clusters.local.workers import worker_command
from tightfit.clusters.local.launcher import run_job
from tightfit.runs.run_folder import RunFolder
run = RunFolder(path=Path(sys.argv[1]))
command = worker_command(run.read_plan(), run.path, worker="patient_worker")
run_job(run, observer=Notes(), command=command, is_trial=True)
"""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def try_it(run: RunFolder, notes: Notes | None = None) -> RunState:
    command = stand_in_command(run)
    return launcher.run_job(run, observer=notes or Notes(), command=command, is_trial=True)


def test_out_of_memory_is_the_answer_and_no_smaller_plan_is_tried(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", at={"2": "oom"})
    before = run.read_plan()
    state = try_it(run)

    assert (state.status, state.exit_code) == (RunStatus.OUT_OF_MEMORY, 76)
    assert run.read_plan() == before
    assert (run.path / "starts").read_text() == "1"


def test_a_wish_to_stop_ends_a_worker_that_would_not_hear_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=3000, hears=False)
    notes = Notes()

    def interrupt() -> None:
        while len(notes.steps) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    state = try_it(run, notes)

    assert (state.status, state.exit_code) == (RunStatus.STOPPED, 130)
    assert find_leftovers(str(lock_path(run, None))) == []


def fail_at_home(seen: list[Path]) -> None:
    with launcher.open_trial_folder() as home:
        seen.append(home)
        (home / "run").mkdir()
        raise ValueError("ours")


def be_terminated_at_home(seen: list[Path]) -> None:
    with launcher.open_trial_folder() as home:
        seen.append(home)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_the_home_is_gone_after_a_error() -> None:
    seen: list[Path] = []
    with pytest.raises(ValueError, match="ours"):
        fail_at_home(seen)
    assert [home.exists() for home in seen] == [False]


def test_sigterm_removes_the_home_too() -> None:
    seen: list[Path] = []
    with pytest.raises(SystemExit) as leaving:
        be_terminated_at_home(seen)
    assert leaving.value.code == 128 + signal.SIGTERM
    assert [home.exists() for home in seen] == [False]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def fill_the_disk_at_home(seen: list[Path]) -> None:
    with launcher.open_trial_folder() as home:
        seen.append(home)
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_temporary_folder_is_no_bug(tmp_path: Path) -> None:
    seen: list[Path] = []
    with pytest.raises(SetupError, match=f"{tmp_path} is full") as reported:
        fill_the_disk_at_home(seen)
    assert "TMPDIR" in reported.value.remedy
    assert [home.exists() for home in seen] == [False]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_launcher_takes_its_workers_with_it(tmp_path: Path, num_ranks: int) -> None:
    run, plan = make_run(tmp_path / "run"), make_plan()
    (tmp_path / "patient_worker.py").write_text(PATIENT_WORKER)
    sharding = Sharding.DDP if num_ranks > 1 else Sharding.SINGLE
    spread = {"gpus_per_node": num_ranks, "sharding": sharding}
    run.write_plan(plan.model_copy(update={"strategy": plan.strategy.model_copy(update=spread)}))
    mark = str(lock_path(run, None))
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run.path)],
        env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{tmp_path}"},
    )
    try:
        wait_for(lambda: len(list(run.path.glob("here-*"))) == num_ranks)
        launcher.kill()
        wait_for(lambda: not find_leftovers(mark))
    finally:
        launcher.kill()
        launcher.wait()
        for process in find_leftovers(mark):
            process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_what_a_killed_launcher_left_is_cleared_with_its_worker(tmp_path: Path) -> None:
    left = tmp_path / f"{launcher.TRIAL_PREFIX}left"
    (left / "run").mkdir(parents=True)
    (left / launcher.TRIAL_LOCK).touch()
    mark = str(lock_path(RunFolder(path=left / "run"), None))
    worker = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"],
        env={**os.environ, RUN_VARIABLE: mark},
    )
    try:
        with launcher.open_trial_folder():
            assert left.exists()  # it is young: somebody may be making it
        os.utime(left, (0, 0))
        with launcher.open_trial_folder() as held:
            os.utime(held, (0, 0))
            assert not left.exists()
            assert worker.wait(timeout=10) == -signal.SIGKILL
            with launcher.open_trial_folder():
                assert held.exists()  # old, but its holder lives
    finally:
        worker.kill()
        worker.wait()


def test_what_only_bears_such_a_name_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / f"{launcher.TRIAL_PREFIX}results"
    mine.mkdir()
    (mine / "figures.csv").write_text("1,2\n")
    os.utime(mine, (0, 0))
    with launcher.open_trial_folder():
        pass

    assert [path.name for path in mine.iterdir()] == ["figures.csv"]
