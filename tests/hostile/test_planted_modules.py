"""No verb imports a module of the working folder, the model, the run or the shared folder."""

from __future__ import annotations

import os
import subprocess
import sys

from verb_tour import MODULES, Tour

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
