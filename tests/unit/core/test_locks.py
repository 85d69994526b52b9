"""File locks: one holder, released with the process, found again after a replacement."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tightfit.core.files import locked_file, open_locked, take_lock

HOLD = """
import sys, time
from pathlib import Path
from tightfit.core.files import locked_file
with locked_file(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def hold(path: Path, seconds: float) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_process_does_not_get_the_lock_until_the_first_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    with hold(path, 60) as holder:
        assert open_locked(path) is None
        with pytest.raises(BlockingIOError), locked_file(path):
            pass
        holder.kill()
    with locked_file(path):
        assert open_locked(path) is None


def test_waiting_ends_when_the_holder_ends(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    with hold(path, 0.5):
        start = time.monotonic()
        with locked_file(path, wait_seconds=30):
            assert time.monotonic() - start < 20
    with hold(path, 0.3), locked_file(path, wait_seconds=None):
        pass


def test_a_file_that_was_replaced_meanwhile_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.lock"
    real, calls = fcntl.flock, []

    def replace_once(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
            path.touch()

    monkeypatch.setattr(fcntl, "flock", replace_once)
    with locked_file(path) as descriptor:
        assert os.path.samestat(os.fstat(descriptor), path.stat())
    assert len(calls) == 2


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "one.lock").open("w") as stream:
        assert take_lock(stream.fileno(), is_required=False)
        with pytest.raises(OSError, match="not implemented"):
            take_lock(stream.fileno())
