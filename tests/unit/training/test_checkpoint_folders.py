"""Checkpoint folders: whole or not there, whatever interrupts the writing."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.settings import Sharding
from tightfit.runs.run_folder import RunFolder
from tightfit.training.checkpoint import (
    Progress,
    find_checkpoint,
    list_damaged,
    read_progress,
    write_checkpoint,
)
from tightfit.training.distributed import DistContext

NUM_KILLS = 20
MOST_KILLS = 100
MOST_SECONDS = 2.0
"""Until a kill, on a disk so slow that in less no checkpoint gets written."""


class Toy:
    """An engine whose whole state is one number in a file."""

    def __init__(self, number: int = 0, num_bytes: int = 64) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.error: BaseException | None = None

    def save_state(self, folder: Path, *, alone: bool = False) -> None:
        del alone
        (folder / "inner").mkdir()
        (folder / "inner" / "state").write_bytes(b"%08d" % self.number + b"x" * self.num_bytes)
        if self.error is not None:
            raise self.error

    def load_state(self, folder: Path) -> None:
        self.number = int((folder / "inner" / "state").read_bytes()[:8])


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(path=tmp_path)


def _context(rank: int = 0) -> DistContext:
    return DistContext(
        rank=rank, local_rank=rank, world_size=1, local_world_size=1, device=torch.device("cpu")
    )


def _write(run: RunFolder, engine: Any, step: int, *, keep: int = 2, **more: Any) -> Path:
    progress = Progress(step=step, num_steps=99, world_size=1, sharding=Sharding.SINGLE)
    context = more.pop("context", _context())
    return write_checkpoint(run, engine, progress, context, keep, **more)


def _names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints_path.iterdir())


def test_no_run_has_no_checkpoint(run: RunFolder) -> None:
    assert find_checkpoint(run) is None


def test_the_newest_is_found_and_the_oldest_are_dropped(run: RunFolder) -> None:
    for step in (9, 10, 11, 1_000_000):
        folder = _write(run, Toy(step), step)
        assert find_checkpoint(run) == folder

    assert _names(run) == ["step-000011", "step-1000000"]
    assert read_progress(folder).step == 1_000_000
    assert read_progress(folder).sharding is Sharding.SINGLE
    loaded = Toy()
    loaded.load_state(folder)
    assert loaded.number == 1_000_000


def test_one_that_is_there_is_not_written_again(run: RunFolder) -> None:
    _write(run, Toy(1), 5)
    engine = Toy(2)
    engine.error = AssertionError("written again")

    folder = _write(run, engine, 5)

    engine.load_state(folder)
    assert engine.number == 1


@pytest.mark.parametrize("harm", ["no progress", "torn progress", "short file", "missing file"])
def test_a_damaged_one_is_passed_over_and_replaced(run: RunFolder, harm: str) -> None:
    _write(run, Toy(1), 5)
    folder = _write(run, Toy(2), 6)
    if harm == "no progress":
        (folder / "progress.json").unlink()
    elif harm == "torn progress":
        (folder / "progress.json").write_text('{"step": 6')
    elif harm == "short file":
        (folder / "inner" / "state").write_bytes(b"0000")
    else:
        (folder / "inner" / "state").unlink()

    found = find_checkpoint(run)
    assert found is not None
    assert found.name == "step-000005"
    assert list_damaged(run, after_step=5) == ["step-000006"]

    assert find_checkpoint(run) != _write(run, Toy(3), 6)
    loaded = Toy()
    loaded.load_state(run.checkpoints_path / "step-000006")
    assert loaded.number == 3


def test_a_damaged_one_is_not_torn_further_by_a_kill(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(run, Toy(1), 5)
    damaged = _write(run, Toy(2), 6)
    (damaged / "inner" / "state").write_bytes(b"0000")
    remove = shutil.rmtree

    def remove_one_file(folder: Path, ignore_errors: bool = False) -> None:
        if not (folder / "progress.json").exists():
            return remove(folder, ignore_errors=ignore_errors)
        (folder / "progress.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", remove_one_file)
    with pytest.raises(KeyboardInterrupt):
        _write(run, Toy(3), 6)

    for folder in run.checkpoints_path.glob("step-??????"):
        assert read_progress(folder).step
    monkeypatch.undo()
    _write(run, Toy(4), 7)
    assert _names(run) == ["step-000006", "step-000007"]


def test_unfinished_folders_are_never_used_and_are_cleared_away(run: RunFolder) -> None:
    folder = _write(run, Toy(1), 5)
    for name in ("step-000007.partial", "step-000003.old.partial", "step-000008.rank1.partial"):
        shutil.copytree(folder, folder.with_name(name))

    assert find_checkpoint(run) == folder
    _write(run, Toy(2), 6)
    assert _names(run) == ["step-000005", "step-000006"]


def test_a_rank_writes_alone(run: RunFolder) -> None:
    """And a second one, which runs out of memory as well, does not spoil it."""
    folder = _write(run, Toy(1), 5, alone=True, context=_context(1))
    assert find_checkpoint(run) == folder

    assert _write(run, Toy(2), 5, alone=True, context=_context(0)) == folder
    loaded = Toy()
    loaded.load_state(folder)
    assert loaded.number == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_leaves_the_one_before(run: RunFolder, number: int) -> None:
    before = _write(run, Toy(1), 5)
    engine = Toy(2)
    engine.error = OSError(number, os.strerror(number))

    with pytest.raises(SetupError, match=os.strerror(number)) as caught:
        _write(run, engine, 6)

    assert "intact" in caught.value.problem
    assert "df -h" in caught.value.remedy
    assert find_checkpoint(run) == before
    assert _names(run) == ["step-000005"]


def test_a_write_that_the_system_cuts_off_is_the_disks_error(run: RunFolder) -> None:
    """The real thing: a limit on the size of files, as a quota would have it."""
    _write(run, Toy(1), 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(SetupError, match="File too large"):
            _write(run, Toy(2, num_bytes=1_000_000), 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)

    assert _names(run) == ["step-000005"]


def test_an_error_of_the_engine_comes_through(run: RunFolder) -> None:
    engine = Toy()
    engine.error = RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        _write(run, engine, 6)
    assert _names(run) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_at_any_moment_it_leaves_the_last_whole_one(run: RunFolder) -> None:
    """SIGKILL while checkpoints are written without pause, again and again on the same folder."""
    draw = random.Random(5)
    num_steps = num_kills = 0
    longest_s = 0.15
    while num_kills < NUM_KILLS or num_steps < NUM_KILLS:
        assert num_kills < MOST_KILLS, f"only {num_steps} checkpoints"
        num_kills += 1
        num_before = num_steps
        promised = _write_until_killed(run, draw.uniform(0.01, longest_s))
        found = find_checkpoint(run)
        if promised:
            # What was reported as written is there; the one in the making may be.
            assert found is not None
            assert promised <= read_progress(found).step <= promised + 1
        if found is not None:
            loaded = Toy()
            loaded.load_state(found)
            assert loaded.number == read_progress(found).step >= num_steps
            assert (found / "inner" / "state").stat().st_size == 200_008
            num_steps = loaded.number
        if num_steps == num_before:  # the disk may be slow just now
            longest_s = min(1.5 * longest_s, MOST_SECONDS)
    assert sum(not name.endswith(".partial") for name in _names(run)) <= 3


def _write_until_killed(run: RunFolder, seconds: float) -> int:
    """The last step that a child process said it had written before it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _write_for_ever(run, writing)
    os.close(writing)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        reported = stream.read().split()
    return int(reported[-1]) if reported else 0


def _write_for_ever(run: RunFolder, told: int) -> None:
    found = find_checkpoint(run)
    step = 0 if found is None else read_progress(found).step
    while True:
        step += 1
        _write(run, Toy(step, num_bytes=200_000), step)
        os.write(told, b"%d\n" % step)


def test_where_all_are_damaged_it_does_not_start_over(run: RunFolder) -> None:
    """It would train from step 1 without a word, and remove what may yet be mended."""
    for folder in [_write(run, Toy(step), step) for step in (5, 6)]:
        (folder / "inner" / "state").write_bytes(b"0000")

    with pytest.raises(InvalidInputError, match="step-000006") as caught:
        find_checkpoint(run)

    assert "--fresh" in caught.value.remedy
    assert _names(run) == ["step-000005", "step-000006"]
