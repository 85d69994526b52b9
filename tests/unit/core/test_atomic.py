"""Atomic files and folders: whole under their own name, or not there."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tightfit.core.errors import SetupError
from tightfit.core.files import atomic_file, atomic_folder, write_atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_text("old")
    with atomic_file(target) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    with pytest.raises(ZeroDivisionError), atomic_file(target) as partial:
        partial.write_text(str(1 / 0))
    assert target.read_text() == "new"
    assert names(tmp_path) == ["model.gguf"]


def test_a_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for content in ("old", "new"):
        with atomic_folder(target) as folder:
            (folder / "weights").write_text(content)
            (folder / "weights").chmod(0o600)
    assert (target / "weights").read_text() == "new"
    assert (target / "weights").stat().st_mode & 0o044, "others can read a published model"
    with pytest.raises(RuntimeError), atomic_folder(target) as folder:
        raise RuntimeError
    assert names(tmp_path) == ["model"]


def test_of_several_makers_the_first_to_finish_wins(tmp_path: Path) -> None:
    target = tmp_path / "key"
    with atomic_folder(target, is_shared=True) as slow:
        with atomic_folder(target, is_shared=True) as fast:
            (fast / "by").write_text("fast")
        (slow / "by").write_text("slow")
    assert (target / "by").read_text() == "fast"
    with atomic_folder(target, is_shared=True, is_whole=lambda _: False) as again:
        (again / "by").write_text("again")
    assert (target / "by").read_text() == "again"
    assert names(tmp_path) == ["key"]


def test_only_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    """Of a file, a shared folder and a temporary folder; a living process's are not touched."""
    child = subprocess.run(
        [sys.executable, "-c", LEAVE, str(tmp_path)], check=False, stdout=subprocess.DEVNULL
    )
    assert child.returncode == -signal.SIGKILL
    left = names(tmp_path)
    assert len(left) == 3, left
    (tmp_path / "mine.partial").mkdir()
    living = [re.sub(r"-\d+-(\w+)-\d+", rf"-{os.getppid()}-\1-0", name) for name in left]
    for name in living:
        (tmp_path / name).touch()
    foreign = re.sub(r"\w{6}-(\d+-\w+-\d+)", r"ffffff-\1", left[0])
    for name, age_seconds in ((foreign + "0", 3600), (foreign + "1", 2 * 86400)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_seconds,) * 2)

    write_atomic(tmp_path / "new", "")

    assert names(tmp_path) == sorted([*living, "mine.partial", "new", foreign + "0"])


LEAVE = """
import os, signal, sys
from pathlib import Path
from tightfit.core import files
home = Path(sys.argv[1])
files.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
with files.temporary_folder(home), files.atomic_folder(home / "shared", is_shared=True):
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    files.Path.replace = os.replace
    files.write_atomic(home / "file", "text")
"""


def test_a_full_disk_is_told_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "plan.json").write_text("old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SetupError) as caught:
        write_atomic(tmp_path / "plan.json", bytes(3 * 1024))
    assert "No space left on device" in caught.value.problem
    assert f"{tmp_path} has" in caught.value.problem
    assert "3.0 KiB are needed" in caught.value.problem
    assert (tmp_path / "plan.json").read_text() == "old"
    assert names(tmp_path) == ["plan.json"]
