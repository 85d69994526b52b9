"""A farm over two partitions of a real Slurm: its pace, and its answers when everything dies."""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import farm_trial
from small_models import make_llama
from tightfit.farming.folder import farm_path
from tightfit.farming.heartbeat import read_statuses
from tightfit.farming.submit import open_farm
from tightfit.farming.worker_pool import read_jobs_file

if TYPE_CHECKING:
    from slurm_lab import SlurmLab

pytest_plugins = ("slurm_lab",)

NUM_PROMPTS = 2000
LEAST_FRACTION = 0.9
"""Of the sum of the single nodes' rates."""
NUM_ROUNDS = 3
"""At most: something else may keep the machine busy for a while."""
WORKERS = {"gpu": 4, "cpu": 2}
TOKEN_SECONDS = farm_trial.PACES["gpu"][1]
"""On the other nodes too."""


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Where answers go; whatever the farm has started is ended."""
    yield tmp_path / "answers.jsonl"
    farms = tmp_path.glob(".*.farm")
    jobs = [name for farm in farms for job in read_jobs_file(farm) for name in job.names]
    subprocess.run(["scancel", *jobs], check=False, capture_output=True)


def submitter_words(out: Path) -> list[str]:
    words = [farm_trial.SELF, "submit", str(out), str(NUM_PROMPTS), "gpu,cpu"]
    return [sys.executable, *words]


def run_submitter(out: Path, *, seconds: float = 240) -> dict[str, Any]:
    done = subprocess.run(
        submitter_words(out), capture_output=True, text=True, check=False, timeout=seconds
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reported


def wait_until(is_so: Callable[[], bool], *, seconds: float) -> bool:
    from slurm_lab import wait_until as wait  # a plugin, which pytest wants to import first

    return wait(is_so, seconds=seconds)


def count_done(out: Path) -> int:
    """Chunks that are published."""
    return sum(1 for _ in farm_path(out).glob("done/*/*"))


@contextmanager
def killed_at(out: Path, num_chunks: int) -> Iterator[None]:
    """A submitter that is killed once so many chunks are there, whatever happens meanwhile."""
    process = subprocess.Popen(
        submitter_words(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
        assert wait_until(lambda: count_done(out) >= num_chunks, seconds=120)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not out.exists()


def find_workers(out: Path) -> list[psutil.Process]:
    """Of this farm, on whichever node: their processes are visible from here."""
    folder = str(farm_path(out))
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[:2] == [sys.executable, farm_trial.SELF] and words[2:3] == [folder]:
            found.append(process)
    return found


def test_a_farm_is_as_fast_as_its_nodes_together(lab: SlurmLab, out: Path) -> None:
    del lab
    together = sum(count * farm_trial.expected_rate(kind) for kind, count in WORKERS.items())
    fair = WORKERS["gpu"] * farm_trial.expected_rate("gpu") / together
    paces = []
    for number in range(NUM_ROUNDS):
        answers = out.with_name(f"{number}-{out.name}")
        with timed_tokens() as tokens:
            reported = run_submitter(answers)
        farm_trial.check_answers(answers, NUM_PROMPTS)
        assert reported["num_workers"] == sum(WORKERS.values())
        shares = dict.fromkeys(WORKERS, 0.0)
        for node in reported["nodes"]:
            shares[node["partition"]] += node["share"]
        possible = count_possible(answers, reported["seconds"]) / find_slowdown(tokens)
        pace = reported["num_answers"] / possible
        if pace >= LEAST_FRACTION and shares["gpu"] == pytest.approx(fair, abs=0.08):
            return
        paces.append((pace, shares["gpu"]))
    pytest.fail(f"of what the nodes can do, and of it the fast ones ({fair:.2f}): {paces}")


@contextmanager
def timed_tokens() -> Iterator[list[float]]:
    """How long waits of one token take meanwhile: a busy machine wakes everybody up late."""
    taken: list[float] = []
    is_over = threading.Event()

    def wait() -> None:
        began_s = time.monotonic()
        while not is_over.wait(TOKEN_SECONDS):
            now_s = time.monotonic()
            taken.append(now_s - began_s)
            began_s = now_s

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield taken
    finally:
        is_over.set()
        thread.join()


def find_slowdown(taken: list[float]) -> float:
    """Of the nodes by the machine they share; a pause of this process alone is none of theirs."""
    return statistics.fmean(s for s in taken if s < 10 * TOKEN_SECONDS) / TOKEN_SECONDS


def count_possible(out: Path, seconds: float) -> float:
    """Answers at the nodes' own rates. Slurm starts them one after the other: each counts from
    when it was there."""
    statuses = read_statuses(farm_path(out))
    starts = [(status.partition, status.loaded_s or 0.0) for status in statuses]
    end_s = min(start for _, start in starts) + seconds
    return sum(farm_trial.expected_rate(kind) * (end_s - start) for kind, start in starts)


def test_every_answer_once_whatever_dies(lab: SlurmLab, out: Path) -> None:
    chance = random.Random()
    with killed_at(out, 60):
        assert wait_until(lambda: len(find_workers(out)) >= 4, seconds=60)

    for victim in chance.sample(find_workers(out), 2):
        victim.kill()
    node = chance.choice(["gpu01", "gpu02"])
    lab.poweroff(node)
    try:
        frozen = chance.choice(find_workers(out))
        frozen.suspend()
        with killed_at(out, 160):
            time.sleep(1)
        time.sleep(7)  # longer than a lease: what it held is done by others
        frozen.resume()
        reported = run_submitter(out)
    finally:
        lab.poweron(node)

    farm_trial.check_answers(out, NUM_PROMPTS)
    assert reported["released"].get("dead", 0) > 0, "the dead held chunks, which others did"
    assert reported["num_answers"] == NUM_PROMPTS
    again = run_submitter_again(out)
    assert again == 0


def run_submitter_again(out: Path) -> int:
    """How many workers a command over finished answers starts."""
    before = len(read_jobs_file(farm_path(out)))
    folder, _, is_finished = open_farm(
        farm_trial.make_order(out, farm_trial.make_prompts(NUM_PROMPTS), num_workers=6)
    )
    assert is_finished
    return len(read_jobs_file(folder)) - before


def test_the_command_farms_a_real_model(lab: SlurmLab, tmp_path: Path) -> None:
    del lab
    model = tmp_path / "model"
    model.mkdir()
    make_llama(model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{number}: how many singers\n" for number in range(24)))
    asked = ["--prompts", str(prompts), "--max-new-tokens", "5", "--seed", "7", "--device", "cpu"]
    asked += ["--temperature", "0.8"]

    def run(verb: str, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "tightfit", verb, str(model), *asked, "--out", str(out)]
        return subprocess.run(
            [*words, *more], capture_output=True, text=True, check=False, timeout=240
        )

    whole, farmed = tmp_path / "whole.jsonl", tmp_path / "farmed.jsonl"
    done = run("generate", whole)
    assert done.returncode == 0, done.stderr
    done = run("farm", farmed, "--partitions", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    assert farmed.read_bytes() == whole.read_bytes()
    reported = json.loads(done.stdout)
    assert {node["partition"] for node in reported["nodes"]} == {"cpu"}
