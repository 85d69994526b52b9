"""kill -9 at any moment, then the same command again: the run that nobody disturbed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from chaos_jobs import Job, kill_tree, read_adapter, wait_for
from nursery import Nursery

NUM_KILLS = 20
NUM_STEPS = 60
WHOLE = re.compile(r"step-\d+")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Job:
    job = make_job(tmp_path_factory.mktemp("undisturbed"), model, data)
    job.finish()
    assert sorted(job.losses()) == list(range(1, NUM_STEPS + 1))
    return job


def make_job(home: Path, model: Path, data: Path) -> Job:
    """With dropout, whose random numbers must come back too, and evaluations in between."""
    return Job(
        home=home,
        model=model,
        data=data,
        changes={
            "max_steps": NUM_STEPS,
            "save_every": 2,
            "eval_every": 15,
            "eval_fraction": 0.1,
            "seed": 7,
            "lora": {"dropout": 0.1},
        },
    ).write()


def list_whole(job: Job) -> list[int]:
    return sorted(int(name[5:]) for name in job.checkpoints() if WHOLE.fullmatch(name))


def test_twenty_kills(tmp_path: Path, undisturbed: Job) -> None:
    job = make_job(tmp_path, undisturbed.model, undisturbed.data)
    rng = random.Random(20)
    num_half_written = 0
    nursery = Nursery(job)
    try:
        for number in range(NUM_KILLS):
            newest = max(list_whole(job), default=0)
            happened = choose_moment(job, rng, newest)
            if number % 10 == 0:
                kill_command(job, happened)
            else:
                kill_worker(job, nursery, happened)
            num_half_written += any(name.endswith(".partial") for name in job.checkpoints())
            check_resumed_from_whole(job, newest)
            if number == NUM_KILLS // 2:
                newest = cut_short(job)
    finally:
        nursery.close()
    assert max(list_whole(job)) < NUM_STEPS, "nothing was left to do for the last start"
    job.finish()

    assert num_half_written >= 3, "too few kills hit a checkpoint being written"
    assert job.losses() == undisturbed.losses()
    assert [(r["step"], r["loss"]) for r in job.records("eval")] == [
        (r["step"], r["loss"]) for r in undisturbed.records("eval")
    ]
    assert job.checkpoints() == undisturbed.checkpoints()
    ours, theirs = read_adapter(job.run), read_adapter(undisturbed.run)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert not list(job.run.rglob("*.partial")), "a half-written folder was left"


def choose_moment(job: Job, rng: random.Random, newest: int) -> Callable[[], bool]:
    """While starting, after some new step, or while a checkpoint is written."""
    kind = rng.choice(["starting", "step", "saving", "saving"])
    folder = job.run / "checkpoints"
    if kind == "step":
        target = newest + rng.randint(1, 4)
        return lambda: job.last_step() >= target
    if kind == "saving":
        size = rng.randint(0, 3)  # how many files are there already
        return lambda: any(
            len(os.listdir(path)) >= size
            for path in (folder.glob(f"step-*[{rng.choice('02468')}].partial"))
            if path.is_dir()
        )
    end = time.monotonic() + rng.uniform(0.2, 1.5)
    return lambda: time.monotonic() > end


def kill_worker(job: Job, nursery: Nursery, happened: Callable[[], bool]) -> None:
    pid = nursery.start(job.run)
    end = time.monotonic() + 60
    while not safely(happened):
        assert time.monotonic() < end, job.log()
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    assert nursery.wait() == -signal.SIGKILL, "it ended before the kill"


def kill_command(job: Job, happened: Callable[[], bool]) -> None:
    process = job.start()
    # The command itself takes a while to come to the worker.
    wait_for(lambda: (job.run / "state.json").exists(), process)
    assert wait_for(lambda: safely(happened), process)
    kill_tree(process)


def safely(happened: Callable[[], bool]) -> bool:
    """Folders come and go while they are listed."""
    try:
        return happened()
    except FileNotFoundError:
        return False


def check_resumed_from_whole(job: Job, newest: int) -> None:
    events = [r["step"] for r in job.records("event") if r["text"].startswith("resumed")]
    assert all(step % 2 == 0 for step in events)
    if events and newest:
        assert events[-1] <= newest


def cut_short(job: Job) -> int:
    """A disk that lost the end of a file: the checkpoint before it is the newest whole one."""
    whole = list_whole(job)
    folder = job.run / "checkpoints" / f"step-{whole[-1]:06d}"
    victim = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    return whole[-2]


def test_kill_of_the_launcher_alone(tmp_path: Path, undisturbed: Job) -> None:
    """Workers that lost their launcher are made to save and stop; two never run at once."""
    job = make_job(tmp_path, undisturbed.model, undisturbed.data)
    process = job.start()
    assert wait_for(lambda: job.last_step() >= 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()

    said = job.finish()

    assert "resumed after step" in job.run.joinpath("metrics.jsonl").read_text(), said
    assert job.losses() == undisturbed.losses()
