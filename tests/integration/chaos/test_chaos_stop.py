"""Asked to stop: save, leave with 75, go on with the same command on any number of processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tiny_jobs import PATIENCE_SECONDS, Job, list_tree, wait_for

pytest_plugins = ("chaos_fixtures",)

NUM_STEPS = 40
REQUEUE = 75


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Job:
    job = make_job(tmp_path_factory.mktemp("undisturbed"), model, data)
    job.finish()
    return job


def make_job(home: Path, model: Path, data: Path) -> Job:
    """No checkpoint but the one of the stop.

    The rate is one at which no gradient spikes: a spike makes rounding, which differs with the
    number of processes, a thousand times larger.
    """
    changes = {"max_steps": NUM_STEPS, "save_every": 1000, "learning_rate": 1e-3}
    return Job(home=home, model=model, data=data, changes=changes).write()


def stop(job: Job, kind: signal.Signals, *options: str, after: int, everyone: bool = False) -> None:
    """`everyone`: as batch systems do, which signal each process of a job."""
    slow = job.slow_from(after)  # or a run of seconds may be over before it has heard of the wish
    process = job.start(*options)
    assert wait_for(lambda: job.last_step() >= after, process), job.log()
    for pid in list_tree(process.pid) if everyone else [process.pid]:
        os.kill(pid, kind)
    said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    slow.end()

    assert process.returncode == REQUEUE, said + job.log()
    state = job.state()
    assert state["status"] == "stopped"
    assert state["exit_code"] == REQUEUE
    assert after <= state["step"] < NUM_STEPS, "it was to be stopped on its way"
    assert state["step"] == job.last_step()
    assert job.checkpoints()[-1] == f"step-{state['step']:06d}"


def test_one_process(tmp_path: Path, undisturbed: Job) -> None:
    job = make_job(tmp_path, undisturbed.model, undisturbed.data)

    stop(job, signal.SIGTERM, after=2)
    stop(job, signal.SIGUSR1, after=job.last_step() + 2)
    job.finish()

    assert job.losses() == undisturbed.losses()
    assert job.state()["status"] == "finished"


def test_two_then_one_then_two_in_shards(tmp_path: Path, undisturbed: Job) -> None:
    """DDP, one process, FSDP: another number of processes deals the same rows differently."""
    job = make_job(tmp_path, undisturbed.model, undisturbed.data)

    stop(job, signal.SIGUSR1, "--on", "2xcpu", after=2, everyone=True)
    assert read_strategy(job)["sharding"] == "ddp"
    stop(job, signal.SIGTERM, "--on", "cpu", after=job.last_step() + 2)
    assert read_strategy(job)["sharding"] == "single"
    stop(job, signal.SIGTERM, "--on", "2xcpu", after=job.last_step() + 2, everyone=True)
    assert read_strategy(job)["sharding"] == "ddp"
    shard(job)
    job.finish("--on", "2xcpu")

    assert read_strategy(job)["sharding"] == "fsdp"
    assert sorted(job.losses()) == list(range(1, NUM_STEPS + 1))
    assert job.losses() == pytest.approx(undisturbed.losses(), abs=1e-4)
    assert "DTensor" not in job.log()


def read_strategy(job: Job) -> dict[str, object]:
    found: dict[str, object] = json.loads((job.run / "plan.json").read_text())["strategy"]
    return found


def shard(job: Job) -> None:
    """As the launcher does it when memory runs out on both ranks."""
    path = job.run / "plan.json"
    plan = json.loads(path.read_text())
    plan["strategy"]["sharding"] = "fsdp"
    path.write_text(json.dumps(plan))
