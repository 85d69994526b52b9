"""The stand-in under real torchrun: two ranks on one node, and two nodes with one lost."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import local_cases
from local_cases import Notes, make_plan, make_run
from tightfit.clusters.local.launcher import run_job
from tightfit.clusters.local.workers import end_all, is_final, worker_command
from tightfit.core.settings import Sharding
from tightfit.runs.metrics import read_records
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

HERE = Path(local_cases.__file__).parent
LAUNCHER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from local_cases import Notes
from tightfit.clusters.local.workers import worker_command
from tightfit.clusters.local.launcher import run_job
from tightfit.clusters.nodes import Rendezvous
from tightfit.runs.run_folder import RunFolder
run = RunFolder(path=Path(sys.argv[2]))
meet = None
if len(sys.argv) > 3:
    meet = Rendezvous(endpoint=sys.argv[3], node_rank=int(sys.argv[4]), local_address="127.0.0.1")
command = worker_command(run.read_plan(), run.path, meet, worker="stand_in_worker")
sys.exit(run_job(run, observer=Notes(), rendezvous=meet, command=command).exit_code)
"""


@pytest.fixture(autouse=True)
def _find_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def spread_run(folder: Path, *, num_nodes: int, gpus_per_node: int, num_steps: int) -> RunFolder:
    run = make_run(folder, num_steps=num_steps, seconds_per_step=0.05)
    plan = make_plan()
    where = {"num_nodes": num_nodes, "gpus_per_node": gpus_per_node, "sharding": Sharding.DDP}
    run.write_plan(plan.model_copy(update={"strategy": plan.strategy.model_copy(update=where)}))
    return run


def pace_run(run: RunFolder, **behaviour: float) -> None:
    """For ranks that start from now on; a lost one is soon missed, one that pauses is not."""
    path = run.path / "behaviour.json"
    path.write_text(json.dumps({**behaviour, "lost_seconds": 12.0}))


def launch(run: RunFolder, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, str(HERE), str(run.path), *more])


def wait_or_kill(launcher: subprocess.Popen[bytes], *, seconds: float = 120) -> int:
    try:
        return launcher.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        end_all(launcher.pid)
        return launcher.wait()


def wait_for(condition: Callable[[], object], *, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_caught(pid: int, kind: signal.Signals) -> bool:
    """Whether the process has a handler for the signal, as its kernel says."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (kind - 1) & 1)


def last_step(run: RunFolder) -> int:
    return max((record.step for record in read_records(run.metrics_path)), default=0)


def test_two_ranks_finish(tmp_path: Path) -> None:
    run = spread_run(tmp_path / "run", num_nodes=1, gpus_per_node=2, num_steps=5)
    notes = Notes()
    command = worker_command(run.read_plan(), run.path, worker="stand_in_worker")
    state = run_job(run, observer=notes, command=command)

    assert (state.status, state.exit_code) == (RunStatus.FINISHED, 0)
    assert notes.steps == [1, 2, 3, 4, 5]


def test_a_stop_reaches_the_ranks_and_not_torchrun(tmp_path: Path) -> None:
    run = spread_run(tmp_path / "run", num_nodes=1, gpus_per_node=2, num_steps=2000)
    launcher = launch(run)
    # A start of workers sets the signal aside until the launcher listens again.
    wait_for(lambda: last_step(run) and is_caught(launcher.pid, signal.SIGUSR1))
    launcher.send_signal(signal.SIGUSR1)

    assert wait_or_kill(launcher) == 75
    assert run.read_state().status is RunStatus.STOPPED
    assert int((run.path / "saved_step").read_text()) == run.read_state().step


def test_a_killed_rank_is_named_although_torchrun_says_1(tmp_path: Path) -> None:
    run = spread_run(tmp_path / "run", num_nodes=1, gpus_per_node=2, num_steps=2000)
    launcher = launch(run)
    wait_for(lambda: last_step(run))
    psutil.Process(run.read_state().pid).kill()

    assert wait_or_kill(launcher) == 1
    state = run.read_state()
    assert state.status is RunStatus.FAILED
    assert "SIGKILL" in (state.problem or "")


def test_no_rank_goes_on_without_torchrun(tmp_path: Path) -> None:
    run = spread_run(tmp_path / "run", num_nodes=1, gpus_per_node=2, num_steps=2000)
    launcher = launch(run)
    wait_for(lambda: last_step(run))
    ranks = psutil.Process(run.read_state().pid).parent().children()  # type: ignore[union-attr]
    assert len(ranks) == 2
    ranks[0].parent().kill()  # type: ignore[union-attr]

    assert wait_or_kill(launcher) == 1
    assert psutil.wait_procs(ranks, timeout=5)[1] == []


def test_a_lost_node_comes_back_with_the_same_command(tmp_path: Path) -> None:
    run = spread_run(tmp_path / "run", num_nodes=2, gpus_per_node=1, num_steps=300)
    # Slow, so that it is not over when the node is lost; those that resume it need not be.
    pace_run(run, num_steps=300, seconds_per_step=0.5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"127.0.0.1:{port}"
    first = launch(run, endpoint, "0")
    wait_for(lambda: is_open(port))  # so that the store is on the node that stays
    second = launch(run, endpoint, "1")
    wait_for(lambda: last_step(run) > 4)
    pace_run(run, num_steps=300, seconds_per_step=0.02)
    end_all(second.pid)
    second.wait()
    again = launch(run, endpoint, "1")

    codes = [wait_or_kill(first), wait_or_kill(again)]

    assert codes == [0, 0]
    assert run.read_state().status is RunStatus.FINISHED
    done = [record.step for record in read_records(run.metrics_path) if record.kind == "step"]
    assert done == list(range(1, 301))


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (RunStatus.OUT_OF_MEMORY, 76, True),
        (RunStatus.FAILED, 4, True),
        (RunStatus.FAILED, 70, False),
        (RunStatus.FAILED, 1, False),
        (RunStatus.RUNNING, None, False),
        (RunStatus.STOPPED, 75, True),
    ],
)
def test_what_a_restart_cannot_change(status: RunStatus, code: int | None, expected: bool) -> None:
    assert is_final(RunState(status=status, exit_code=code, updated_at="now")) is expected
