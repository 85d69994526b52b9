"""What goes wrong around a farm: two commands at once, --fresh under workers, a full disk."""

from __future__ import annotations

import errno
import random
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farm_trial import TrialEngine, check_answers, make_order, make_prompts, open_trial, run_trial
from tightfit.core.errors import SetupError, UsageError
from tightfit.farming import submit
from tightfit.farming.backends.local import LocalStarter
from tightfit.farming.folder import farm_path, make_farm, read_farm
from tightfit.farming.leases import Lease, LeaseReason, LeaseRecord, Leases
from tightfit.farming.results import collect_output
from tightfit.farming.store import FolderStore
from tightfit.farming.submit import Submitter, open_farm
from tightfit.farming.worker import MAX_SOLO_ATTEMPTS, InFlightChunks, _record_attempt, run_worker
from tightfit.farming.worker_pool import StartedWorkers, make_local_group

LOCAL = make_local_group(num_gpus=0, num_workers=1, gpu=None)


def pretend_to_be(monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]) -> None:
    reported = {"host": socket.gethostname(), "pid": process.pid}
    reported["began"] = submit._process_start_time(process.pid)
    monkeypatch.setattr(submit, "_this_process", lambda: reported)


@pytest.fixture
def another() -> Any:
    """A process that lives."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_of_two_submitters_the_second_is_refused_until_the_first_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: subprocess.Popen[bytes]
) -> None:
    order = make_order(tmp_path / "answers.jsonl", make_prompts(10), num_workers=1)
    with monkeypatch.context() as patch:
        pretend_to_be(patch, another)
        open_trial(order, [LOCAL])

    with pytest.raises(UsageError, match=f"process {another.pid} .* watches over"):
        open_trial(order, [LOCAL])
    with pytest.raises(UsageError, match="watches over"):
        open_trial(replace(order, is_fresh=True), [LOCAL])
    assert farm_path(order.out).is_dir(), "--fresh took nothing away from it"
    another.kill()
    another.wait()
    run_trial(order, [LOCAL])
    check_answers(order.out, 10)


def test_who_comes_while_another_finishes_does_nothing_to_the_output(tmp_path: Path) -> None:
    order = make_order(tmp_path / "answers.jsonl", make_prompts(10), num_workers=1)
    folder, farm, _ = open_farm(order)
    run_trial(order, [LOCAL])

    with pytest.raises(UsageError, match="just finished"):
        Submitter(folder, farm, [LOCAL], {LOCAL.kind: LocalStarter(folder)})
    assert open_farm(order)[2], "and the output is known as finished all the same"


def test_who_begins_second_joins_what_the_first_began(tmp_path: Path) -> None:
    order = make_order(tmp_path / "answers.jsonl", make_prompts(10), num_workers=1)
    folder, farm, _ = open_farm(order)

    assert not make_farm(folder, farm, order.job.prompts)
    assert not list(tmp_path.glob(f"{folder.name}.*")), "no litter"


def test_what_answers_do_not_depend_on_follows_the_command(tmp_path: Path) -> None:
    """`--context` is the remedy where prompts were too long: it must reach the workers."""
    order = make_order(tmp_path / "answers.jsonl", make_prompts(10), num_workers=1)
    folder, _, _ = open_farm(order)
    larger = replace(order, request=replace(order.request, context=8192), lease_seconds=3.0)

    open_trial(larger, [LOCAL])

    farm = read_farm(folder)
    assert farm is not None
    assert farm.engine.context == 8192
    assert farm.lease_seconds == 3.0


def test_a_context_that_no_worker_loads_is_told_at_once_though_others_had_loaded(
    tmp_path: Path,
) -> None:
    order = make_order(tmp_path / "a.jsonl", make_prompts(3, {1: "refuse me"}), num_workers=1)
    assert run_trial(order, [LOCAL]).statistics.num_failed == 1
    (tmp_path / "model" / "tokenizer.json").unlink()

    with pytest.raises(SetupError, match="No worker could load"):
        run_trial(order, [LOCAL])


def test_a_removed_folder_ends_the_command_and_its_workers(tmp_path: Path) -> None:
    order = make_order(tmp_path / "answers.jsonl", make_prompts(5000), num_workers=1)
    submitter = open_trial(order, [LOCAL])
    folder = farm_path(order.out)

    def take_away(_: object) -> None:
        if any(folder.glob("done/*/*")):
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(SetupError, match="was removed while workers ran"):
        submitter.run(take_away, lambda _: None)
    assert not submitter._pool.count_alive(LOCAL)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = make_order(tmp_path / "answers.jsonl", make_prompts(20), num_workers=1)
    folder, farm, _ = open_farm(order)
    publish, num_tries = FolderStore.publish, 0

    def publish_on_a_full_disk(self: FolderStore, path: str, content: bytes) -> bool:
        nonlocal num_tries
        num_tries += 1
        if 3 < num_tries < 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(self, path, content)

    monkeypatch.setattr(FolderStore, "publish", publish_on_a_full_disk)

    assert run_worker(folder, open_engine=lambda _: TrialEngine("fast")) == 0
    heads = collect_output(folder, farm, order.out).heads
    check_answers(order.out, 20)
    assert {head.why for head in heads} == {LeaseReason.FRESH}, "nobody had to do it again"


def test_a_disk_that_stays_full_makes_no_prompt_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = make_order(tmp_path / "a.jsonl", make_prompts(4), num_workers=1, lease_seconds=0.2)
    folder, farm, _ = open_farm(order)

    def refuse(*_: object) -> bool:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "publish", refuse)
        with pytest.raises(OSError, match="quota"):
            run_worker(folder, open_engine=lambda _: TrialEngine("fast"))
    later = Leases(FolderStore(folder), farm.shape, "later", seconds=60, rng=random.Random(0))
    later.join()
    lease = later.claim_left()
    assert lease is not None
    while lease is not None and lease.note.why is LeaseReason.FRESH:
        lease = later.claim_left()
    assert lease is not None
    assert (lease.note.why, lease.note.deaths) == (LeaseReason.RETURNED, 0)


def test_a_worker_told_to_stop_has_not_died_of_its_prompt(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / "suspect").mkdir()
    for _ in range(5):
        note = _record_attempt(store, "suspect/0/7")
        assert note is not None
        store.create(f"{note}.stopped")

    assert [
        _record_attempt(store, "suspect/0/7") is None for _ in range(MAX_SOLO_ATTEMPTS + 1)
    ] == [
        False,
        False,
        True,
    ]


def test_a_chunk_that_comes_back_to_its_first_worker_is_closed_twice(tmp_path: Path) -> None:
    """Frozen for longer than its lease, it may be given what it still has open."""
    order = make_order(tmp_path / "answers.jsonl", make_prompts(1), num_workers=1)
    _, farm, _ = open_farm(order)
    engine = TrialEngine("fast")
    work = InFlightChunks(engine, farm, lambda _: list(order.job.prompts))
    note = LeaseRecord(worker="me")
    committed: list[int] = []

    first = work.begin(Lease(chunk=0, generation=0, note=note), list(order.job.prompts))
    second = work.begin(Lease(chunk=0, generation=2, note=note), list(order.job.prompts))
    for chunk in (first, second):
        work.close(chunk, lambda done: committed.append(done.lease.generation))
    engine.close()

    assert committed == [0, 2]
    assert not work.open


def test_a_worker_that_died_is_replaced_on_its_own_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    (tmp_path / "logs").mkdir()
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(60)")
    place = make_local_group(num_gpus=3, num_workers=None, gpu=None)
    starter = LocalStarter(tmp_path, (str(script),))
    job = StartedWorkers(
        group=place.name,
        kind=place.kind,
        names=starter.start(place, 3),
        num_workers=3,
        host=socket.gethostname(),
    )
    try:
        time.sleep(0.3)
        starter._children[1].kill()
        starter._children[1].wait()
        assert starter._free_gpus(place, 2) == ["5", "4"]
    finally:
        starter.stop([job])
