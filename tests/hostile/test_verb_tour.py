"""No verb imports a module of the working folder, the model, the run or the shared folder, and none
writes a secret of the environment to a file, its output or a command line.

One file: another one would be a worker of its own, which would do the tour again.
"""

from __future__ import annotations

import os
import subprocess
import sys

from verb_tour import MARK_OF_SECRETS, MODULES, Tour

pytest_plugins = ("verb_tour",)


def test_no_planted_module_was_imported(tour: Tour) -> None:
    assert sorted(path.name for path in tour.marks.iterdir()) == []


def test_planted_modules_do_leave_marks(tour: Tour) -> None:
    """Where Python is started as usual: the test above can fail."""
    for folder in (tour.work, tour.model, tour.shared, tour.run):
        subprocess.run(
            [sys.executable, "-c", f"import {MODULES[0]}"],
            cwd=folder,
            env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
            check=True,
        )
        mark = tour.marks / f"{folder.name}.{MODULES[0]}"
        assert mark.exists()
        mark.unlink()


def test_no_verb_wrote_or_showed_a_secret(tour: Tour) -> None:
    mark = MARK_OF_SECRETS.encode()
    files = [path for path in tour.home.rglob("*") if path.is_file()]

    assert tour.home / "said" / "answer" in files
    assert len(files) > 50
    assert [path for path in files if mark in path.read_bytes()] == []
    assert any("torch.distributed.run" in command for command in tour.commands)
    assert [command for command in tour.commands if MARK_OF_SECRETS in command] == []
