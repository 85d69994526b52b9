"""Atomic files and folders: whole under their own name, or not there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tightfit.core.files import atomic_file, atomic_folder, remove_stale_partials


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


def test_only_old_leftovers_are_removed(tmp_path: Path) -> None:
    for name in ("old.partial", "new.partial", "whole"):
        (tmp_path / name).mkdir()
    long_ago = time.time() - 1000
    os.utime(tmp_path / "old.partial", (long_ago, long_ago))
    remove_stale_partials(tmp_path, age_seconds=500)
    assert names(tmp_path) == ["new.partial", "whole"]
