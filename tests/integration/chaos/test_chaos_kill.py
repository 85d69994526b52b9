"""kill -9 at any moment, then the same command again: the run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from nursery import WORKER, Nursery
from tiny_jobs import PATIENCE_SECONDS, Job, kill_tree, read_adapter, wait_for

pytest_plugins = ("chaos_fixtures",)

NUM_KILLS = 20
NUM_STEPS = 100
MOST_STEPS_PER_KILL = 4
"""A moment that a busy machine lets slip is not waited for until the run is over."""
NUM_TRIES = 3
EVAL_EVERY = 4
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
            "eval_every": EVAL_EVERY,
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
    num_half_written, events = 0, 0
    slow = job.slow_from(NUM_STEPS)
    nursery = Nursery(job.surroundings())
    try:
        for number in range(NUM_KILLS):
            newest = find_newest(job)
            slow.begin(newest + MOST_STEPS_PER_KILL + 1)  # a late kill is not many steps late
            happened = not_later(job, newest, choose_moment(job, rng, newest))
            if number % 10 == 0:
                kill_command(job, happened)
            else:
                kill_worker(job, nursery, happened)
            num_half_written += any(name.endswith(".partial") for name in job.checkpoints())
            resumed = list_resumed(job)
            assert all(step == newest for step in resumed[events:]), "a half-written one was used"
            events = len(resumed)
            if number == NUM_KILLS // 2:
                cut_short(job)
        assert max(list_whole(job)) < NUM_STEPS, "nothing was left to do after the kills"
        slow.end()
        kill_at_the_result(job, nursery)
    finally:
        nursery.close()
    job.finish()

    assert num_half_written, "no kill hit a checkpoint being written"
    assert any("damaged" in r["text"] for r in job.records("event")), "passed over in silence"
    assert job.losses() == undisturbed.losses()
    assert [(r["step"], r["loss"]) for r in job.records("eval")] == [
        (r["step"], r["loss"]) for r in undisturbed.records("eval")
    ]
    assert job.checkpoints() == undisturbed.checkpoints()
    ours, theirs = read_adapter(job.run), read_adapter(undisturbed.run)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert not list(job.run.rglob("*.partial")), "a half-written folder was left"


def not_later(job: Job, newest: int, happened: Callable[[], bool]) -> Callable[[], bool]:
    latest = newest + MOST_STEPS_PER_KILL
    return lambda: happened() or max(list_whole(job), default=0) >= latest


def choose_moment(job: Job, rng: random.Random, newest: int) -> Callable[[], bool]:
    """While starting, after some new step, while a checkpoint is written, or while evaluating."""
    kind = rng.choice(["starting", "step", "saving", "saving", "evaluating"])
    folder = job.run / "checkpoints"
    if kind == "step":
        target = newest + rng.randint(1, 4)
        return lambda: job.last_step() >= target
    if kind == "saving":
        size = rng.randint(0, 3)  # how many files are there already
        return lambda: any(
            len(list(path.iterdir())) >= size
            for path in (folder.glob(f"step-*[{rng.choice('02468')}].partial"))
            if path.is_dir()
        )
    if kind == "evaluating":  # which comes right after the checkpoint of the same step
        return lambda: any(step > newest and step % EVAL_EVERY == 0 for step in list_whole(job))
    end = time.monotonic() + rng.uniform(0.2, 1.5)
    return lambda: time.monotonic() > end


def kill_at_the_result(job: Job, nursery: Nursery) -> None:
    """The moment is short: one that comes too late finds the result, and is tried again."""
    for _ in range(NUM_TRIES):
        for path in job.run.glob("adapter*"):
            shutil.rmtree(path)
        if kill_worker_if(job, nursery, lambda: any(job.run.glob("adapter*"))):
            return
    pytest.fail("it ended before each kill")


def kill_worker(job: Job, nursery: Nursery, happened: Callable[[], bool]) -> None:
    assert kill_worker_if(job, nursery, happened), "it ended before the kill"


def kill_worker_if(job: Job, nursery: Nursery, happened: Callable[[], bool]) -> bool:
    """False where it had finished before."""
    pid = nursery.start(WORKER, job.run, log=job.run / "log.txt")
    end = time.monotonic() + PATIENCE_SECONDS
    while not safely(happened):
        assert time.monotonic() < end, job.log()
        time.sleep(0.0005)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    code = nursery.wait()
    assert code in (-signal.SIGKILL, 0), job.log()
    return code != 0


def kill_command(job: Job, happened: Callable[[], bool]) -> None:
    process = job.start()
    # The command itself takes a while to come to the worker.
    wait_for((job.run / "state.json").exists, process)
    assert wait_for(lambda: safely(happened), process)
    kill_tree(process)


def safely(happened: Callable[[], bool]) -> bool:
    """Folders come and go while they are listed."""
    try:
        return happened()
    except FileNotFoundError:
        return False


def list_resumed(job: Job) -> list[int]:
    return [r["step"] for r in job.records("event") if r["text"].startswith("resumed")]


def find_newest(job: Job) -> int:
    """By the sizes that its last file names: a second reading, not the worker's."""
    for step in reversed(list_whole(job)):
        folder = job.run / "checkpoints" / f"step-{step:06d}"
        sizes = json.loads((folder / "progress.json").read_text())["files"]
        if all((folder / name).stat().st_size == size for name, size in sizes.items()):
            return step
    return 0


def cut_short(job: Job) -> None:
    """A disk that lost the end of a file: the checkpoint before it is the newest whole one."""
    whole = list_whole(job)
    folder = job.run / "checkpoints" / f"step-{whole[-1]:06d}"
    victim = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)


def test_kill_of_the_launcher_alone(tmp_path: Path, undisturbed: Job) -> None:
    """Workers that lost their launcher are made to save and stop; two never run at once."""
    job = make_job(tmp_path, undisturbed.model, undisturbed.data)
    job.slow_from(3)  # or its worker may be done before the next launcher is there
    process = job.start()
    assert wait_for(lambda: job.last_step() >= 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()

    job.environment.clear()  # which leaves the worker as slow as it is
    said = job.finish()

    assert "resumed after step" in job.run.joinpath("metrics.jsonl").read_text(), said
    assert job.losses() == undisturbed.losses()
