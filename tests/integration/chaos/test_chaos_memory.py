"""Out of memory for real: the run goes on by itself with a smaller plan and the same losses."""

from __future__ import annotations

import json
import resource
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiny_jobs import PATIENCE_SECONDS, Job, make_data, make_model, wait_for

NUM_STEPS = 40
MICRO_BATCH = 16
VOCABULARY = 16_000
MIB = 1 << 20
TO_SAVE_WITH = 24 * MIB
SWING = 36 * MIB
"""A step of two processes takes 30 to 70 MiB, one of one process 90 to 190."""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logits that dwarf everything else: half the micro-batch is half the memory."""
    return make_model(tmp_path_factory.mktemp("wide"), vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def long_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("long") / "train.jsonl", num_rows=48, most_words=40)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, wide_model: Path, long_data: Path) -> Job:
    """The run that had the memory from the start."""
    job = make_job(tmp_path_factory.mktemp("roomy"), wide_model, long_data)
    job.finish()
    assert not job.records("event")
    return job


def make_job(home: Path, model: Path, data: Path) -> Job:
    return Job(
        home=home,
        model=model,
        data=data,
        changes={
            "seq_len": 256,
            "max_steps": NUM_STEPS,
            "effective_batch": MICRO_BATCH,
            "save_every": 1000,
            "learning_rate": 1e-3,
        },
        strategy={"micro_batch": MICRO_BATCH, "loss": "plain"},
    ).write()


def read_plan(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def check_same_training(job: Job, roomy: Job) -> None:
    strategy = read_plan(job.run / "plan.json")["strategy"]
    assert strategy["micro_batch"] < MICRO_BATCH
    world = strategy["gpus_per_node"]
    assert strategy["micro_batch"] * strategy["grad_accum"] * world == MICRO_BATCH
    assert sorted(job.losses()) == list(range(1, NUM_STEPS + 1))
    assert job.losses() == pytest.approx(roomy.losses(), abs=1e-5)


def list_changes(job: Job) -> list[dict[str, Any]]:
    return [r for r in job.records("event") if r["text"].startswith("out of memory")]


PROBE = """
import os, resource, sys
import tightfit.training.loop as loop
from tightfit.runtime.libraries import is_out_of_memory
from tightfit.training.worker import main

warm_up_step = loop.warm_up_step

def fits(limit, *given):
    # In a process of its own, which no other try has left in pieces: as a run meets its limit.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
            warm_up_step(*given)
            code = 0
        except BaseException as error:
            code = 1 if is_out_of_memory(error) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != 2
    return code == 0

def find_least(*given):
    least, most = 100 << 20, 4 << 30
    assert fits(most, *given)
    while most - least > 4 << 20:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle, *given) else (middle, most)
    return most

def measure(engine, batch, context):
    half = {name: tensor[: len(tensor) // 2] for name, tensor in batch.items()}
    print(find_least(engine, half, context), find_least(engine, batch, context), flush=True)
    os._exit(0)

loop.warm_up_step = measure
main([sys.argv[1]])
"""


def find_limit(job: Job) -> int:
    """A little less than the whole micro-batch needs at its first try, which is the same in every
    process. Half of it gets all the rest: over many steps memory falls in pieces, and it needs
    more than its first try did."""
    reported = subprocess.check_output(
        [sys.executable, "-c", PROBE, str(job.run)], text=True, env=job.surroundings()
    )
    half, whole = map(int, reported.split()[-2:])
    assert whole - half > 60 * MIB
    return whole - 8 * MIB


@pytest.fixture(scope="module")
def limit(roomy: Job) -> int:
    return find_limit(roomy)


def test_too_much_from_the_start(tmp_path: Path, roomy: Job, limit: int) -> None:
    """The limit is the shell's, of which the planner knows nothing."""
    job = make_job(tmp_path, roomy.model, roomy.data)

    said = job.finish(command=["prlimit", f"--data={limit}", *job.command()])

    check_same_training(job, roomy)
    (change,) = list_changes(job)
    assert "micro-batch" in change["text"]
    assert change["text"] in said
    kept = read_plan(job.run / "plan.1.json")
    assert kept["strategy"]["micro_batch"] == MICRO_BATCH
    assert read_ledger(job) == [("out-of-memory", MICRO_BATCH), ("finished", MICRO_BATCH // 2)]


def test_too_much_by_a_limit_of_ours(tmp_path: Path, roomy: Job, limit: int) -> None:
    """The variable, on a run whose plan was made before it was set."""
    job = make_job(tmp_path, roomy.model, roomy.data)
    slow = job.slow_from(2)  # or it may be over before it is stopped
    process = job.start()
    assert wait_for(lambda: job.last_step() >= 2, process)
    process.terminate()
    process.communicate(timeout=PATIENCE_SECONDS)
    slow.end()
    step = job.state()["step"]

    job.environment["TIGHTFIT_MEMORY_LIMIT_BYTES"] = str(limit)
    job.finish()

    check_same_training(job, roomy)
    (change,) = list_changes(job)
    assert change["step"] == step
    assert read_ledger(job)[0][0] == "finished", "a limit of ours says nothing about the machine"


@pytest.mark.parametrize("on", ["cpu", "2xcpu"])
def test_too_much_on_the_way(tmp_path: Path, roomy: Job, on: str) -> None:
    """Memory that is taken away between two steps: not one step is lost, checkpoint or not."""
    job = make_job(tmp_path, roomy.model, roomy.data)
    if on == "2xcpu":
        job.strategy["micro_batch"] = MICRO_BATCH // 2
        job.write()
    process = job.start("--on", on)
    assert wait_for(lambda: job.last_step() >= 5, process), job.log()
    assert job.checkpoints() == []
    victim = find_workers(process.pid)[-1]
    starve(victim, job)
    done = job.last_step()
    said, _ = process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode == 0, said + job.log()
    check_same_training(job, roomy)
    (change,) = list_changes(job)
    assert change["step"] >= done, "steps were lost"
    assert change["text"] in said


def find_workers(pid: int) -> list[int]:
    import psutil

    found = []
    for child in psutil.Process(pid).children(recursive=True):
        words = child.cmdline()
        if "tightfit.training.worker" in words and "torch.distributed.run" not in words:
            found.append(child.pid)
    return found


def starve(pid: int, job: Job) -> None:
    """Leave it what it holds between two steps, and a little to save with.

    A busy machine may look at it in the midst of steps alone: until it was seen with far less.
    """
    held: list[int] = []
    end, seen = time.monotonic() + 1.0, job.last_step()
    while time.monotonic() < end or job.last_step() < seen + 2 or max(held) - min(held) < SWING:
        text = Path(f"/proc/{pid}/status").read_text()
        held.append(int(text.split("VmData:")[1].split()[0]) * 1024)
    limit = min(held) + TO_SAVE_WITH
    _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, hard))


def read_ledger(job: Job) -> list[tuple[str, int]]:
    with sqlite3.connect(job.home / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT status, strategy FROM outcomes ORDER BY id").fetchall()
    return [(status, json.loads(strategy)["micro_batch"]) for status, strategy in rows]
