"""Workers as real processes and threads: stopped, killed, poisoned; the answers stay whole."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import farm_trial
from farm_trial import TrialEngine, check_answers, make_order, make_prompts, run_trial
from tightfit.core.errors import EXIT_REQUEUE, SetupError, UsageError
from tightfit.engines.protocol import Listener, Request
from tightfit.farming.folder import FarmFile, farm_path
from tightfit.farming.heartbeat import read_statuses
from tightfit.farming.leases import FINISHED, LeaseReason, Leases
from tightfit.farming.results import collect_output
from tightfit.farming.statistics import ProgressReader, sum_farm
from tightfit.farming.store import FolderStore
from tightfit.farming.submit import open_farm
from tightfit.farming.worker import run_worker
from tightfit.farming.worker_pool import make_local_group

LOCAL = make_local_group(num_gpus=0, num_workers=2, gpu=None)
PAUSE_SECONDS = 3.0


def begin(tmp_path: Path, count: int, **more: object) -> tuple[Path, FarmFile, Path]:
    out = tmp_path / "answers.jsonl"
    folder, farm, is_finished = open_farm(
        make_order(out, make_prompts(count), num_workers=2, **more)
    )
    assert not is_finished
    return folder, farm, out


def work_here(folder: Path, partition: str = "fast") -> int:
    return run_worker(folder, partition=partition, open_engine=lambda _: TrialEngine(partition))


def start(folder: Path, partition: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, farm_trial.SELF, str(folder), "--partition", partition]
    return subprocess.Popen(words)


def wait_for(is_so: object, seconds: float = 60) -> None:
    ends = time.monotonic() + seconds
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_one_worker_does_everything_and_says_so(tmp_path: Path) -> None:
    folder, farm, out = begin(tmp_path, 300)

    assert work_here(folder) == 0

    assert (folder / FINISHED).exists()
    collected = collect_output(folder, farm, out)
    check_answers(out, 300)
    assert sum(head.num_answers for head in collected.heads) == 300
    (status,) = read_statuses(folder)
    assert status.state == "ended"
    assert status.num_answers == 300
    assert ProgressReader(folder, farm).look().is_finished


class _GatedEngine(TrialEngine):
    """Answers nothing before every other engine has something to answer."""

    def __init__(self, gate: threading.Barrier) -> None:
        super().__init__("local")
        self._gate: threading.Barrier | None = gate

    def submit(self, request: Request, listener: Listener) -> Any:
        if self._gate is not None:
            self._gate.wait()
            self._gate = None
        return super().submit(request, listener)


def test_threads_share_the_work(tmp_path: Path) -> None:
    folder, farm, out = begin(tmp_path, 300, lease_seconds=600.0)
    # All have a chunk before any answers: a thread that starts late would find nothing left.
    gate = threading.Barrier(4, timeout=60)

    def work() -> None:
        run_worker(folder, open_engine=lambda _: _GatedEngine(gate))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    collect_output(folder, farm, out)
    check_answers(out, 300)
    statuses = read_statuses(folder)
    assert sum(status.num_answers for status in statuses) == 300
    assert sum(status.num_answers > 0 for status in statuses) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stopped_worker_gives_back_at_once(tmp_path: Path, number: signal.Signals) -> None:
    folder, farm, out = begin(tmp_path, 400, lease_seconds=600.0)
    process = start(folder, "slow")
    wait_for(lambda: any(folder.glob("done/*/*")))
    process.send_signal(number)

    assert process.wait(60) == EXIT_REQUEUE
    assert not (folder / FINISHED).exists()
    assert work_here(folder) == 0
    collected = collect_output(folder, farm, out)
    check_answers(out, 400)
    whys = {head.why for head in collected.heads}
    assert whys <= {LeaseReason.FRESH, LeaseReason.RETURNED}, (
        "no lease of ten minutes stood in the way"
    )


def test_a_killed_worker_is_replaced_after_its_lease(tmp_path: Path) -> None:
    folder, farm, out = begin(tmp_path, 200, lease_seconds=2.0)
    process = start(folder, "slow")
    wait_for(lambda: any(folder.glob("done/*/*")))
    process.kill()
    process.wait()

    assert work_here(folder) == 0
    collected = collect_output(folder, farm, out)
    check_answers(out, 200)
    whys = {head.why.value for head in collected.heads}
    assert {"dead", "slow"} & whys, "the first to come takes it over, before or after the lease"


def test_a_prompt_that_kills_is_found_and_reported(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    prompts = make_prompts(40, {17: "kill me", 23: "refuse me", 30: "?"})
    order = make_order(out, prompts, num_workers=2, lease_seconds=1.0)

    end = run_trial(order, [LOCAL])

    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["prompt_index"] for row in rows] == [
        number for number in range(40) if number not in (17, 23, 30)
    ]
    failed = [json.loads(s) for s in Path(f"{out}.failed.jsonl").read_text("utf-8").splitlines()]
    assert [row["prompt_index"] for row in failed] == [17, 23, 30]
    assert "died" in failed[0]["reason"]
    assert failed[0]["place"] == "line 18"
    assert end.statistics.num_failed == 3


def test_a_farm_goes_on_where_it_was_and_refuses_another_job(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    order = make_order(out, make_prompts(60), num_workers=2)
    run_trial(order, [LOCAL])
    check_answers(out, 60)
    before = out.read_bytes()

    assert open_farm(order)[2], "finished"
    with pytest.raises(UsageError, match="other settings"):
        open_farm(make_order(out, make_prompts(61), num_workers=2))
    out.write_text("changed\n")
    with pytest.raises(UsageError, match="changed since"):
        open_farm(order)
    out.unlink()
    run_trial(order, [LOCAL])
    assert out.read_bytes() == before


def test_a_model_that_no_worker_loads_ends_the_farm(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    order = make_order(out, make_prompts(10), num_workers=2)
    (tmp_path / "model" / "tokenizer.json").unlink()

    with pytest.raises(SetupError, match=r"No worker could load .* has no tokenizer"):
        run_trial(order, [LOCAL])
    assert not list(farm_path(out).glob("lease/*/*"))


def test_an_output_that_is_not_ours_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text("mine\n")
    order = make_order(out, make_prompts(10), num_workers=1)

    with pytest.raises(UsageError, match="exists already"):
        open_farm(order)
    assert out.read_text() == "mine\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_pause_between_two_commands_is_no_working_time(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder, farm, out = begin(tmp_path, 300, lease_seconds=1.0)
    process = start(folder, "slow")
    wait_for(lambda: sum(1 for _ in folder.glob("done/*/*")) >= 5)
    process.send_signal(number)
    process.wait()
    time.sleep(PAUSE_SECONDS)
    assert work_here(folder) == 0
    collected = collect_output(folder, farm, out)
    statuses = read_statuses(folder)

    last_start_s = max(status.joined_s for status in statuses)
    reported = sum_farm(
        collected.heads,
        statuses,
        farm=farm,
        num_failed=0,
        commits_s=collected.commits_s,
        began_s=last_start_s - PAUSE_SECONDS / 2,
    )

    loading = max(status.loaded_s or 0.0 for status in statuses) - last_start_s
    assert reported.start_seconds == pytest.approx(PAUSE_SECONDS / 2 + loading, abs=0.1)

    whole = max(collected.commits_s) - min(status.loaded_s or 0.0 for status in statuses)
    assert whole > PAUSE_SECONDS
    assert 0 < reported.seconds <= whole - 0.9 * PAUSE_SECONDS
    assert reported.new_tokens_per_second == pytest.approx(
        reported.num_new_tokens / reported.seconds
    )
    assert reported.num_answers == 300


def test_what_is_left_is_told_by_the_chunks_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, farm, _ = begin(tmp_path, 400)
    chance, now = random.Random(7), 1000.0
    # By a clock of our own: a machine that stands still for seconds is no pace of a worker.
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("tightfit.farming.statistics.time", clock)
    lookout = ProgressReader(folder, farm)
    leases = Leases(FolderStore(folder), farm.shape, "by hand", seconds=600, rng=chance)

    def publish_one() -> None:
        nonlocal now
        now += chance.uniform(0.05, 0.15)
        lease = leases.claim_fresh()
        assert lease is not None
        assert leases.commit(lease, b"an answer")

    assert lookout.look().seconds_left is None
    now += 30
    assert lookout.look().seconds_left is None, "time that passes is no pace"
    publish_one()
    assert lookout.look().seconds_left is None, "nor is the first, which waited for a model"
    while (progress := lookout.look()).num_done <= farm.shape.num_chunks / 2:
        publish_one()
    left, then = progress.seconds_left, now
    while not lookout.look().is_finished:
        publish_one()

    assert left is not None
    assert 0 < left.low <= now - then <= left.high
    assert left.high < 2 * left.low, "so wide that it would say nothing"
