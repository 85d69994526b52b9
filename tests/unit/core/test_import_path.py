"""Python starts modules without the folder in which somebody types a command."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tightfit
from tightfit.core.import_path import SAFE_PATH_VARIABLE, module_words

SOURCE = Path(tightfit.__file__).parent
OPTION = re.compile(r"^-m$|(?<!python)(?<!python3) -m [a-z]")
"""Not the `python -m` of a text that people read."""
EXCEPT = {"__init__.py", "import_path.py"}
"""Of the package, which asks whether it was started so; and the one way itself."""


@pytest.mark.parametrize("words", [["-m", "tightfit"], module_words("tightfit")])
@pytest.mark.parametrize("before", ["", os.pathsep])
@pytest.mark.parametrize("is_safe", ["", "1"])
def test_a_module_does_not_import_from_the_current_folder(
    tmp_path: Path, words: list[str], before: str, is_safe: str
) -> None:
    """`before`: an empty entry of PYTHONPATH, which means the current folder too."""
    for name in ("json", "typing", "subprocess", "rich", "pydantic"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a')\n")
    environment = {"PYTHONPATH": f"{before}{SOURCE.parent}", SAFE_PATH_VARIABLE: is_safe}

    done = subprocess.run(
        [sys.executable, *words, "plan", "no-such-model"],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "no-such-model" in done.stderr
    assert not (tmp_path / "mark").exists()


def test_what_a_process_starts_is_safe_as_well(tmp_path: Path) -> None:
    """From Python 3.11; what starts Python itself are libraries, such as `multiprocessing`."""
    (tmp_path / "pickle.py").write_text("raise SystemExit('imported')\n")
    code = "import multiprocessing as m; p = m.get_context('spawn').Process(); p.start(); p.join()"
    (tmp_path / "starter").mkdir()
    (tmp_path / "starter" / "spawner.py").write_text(f"if __name__ == '__main__': {code}\n")

    done = subprocess.run(
        [sys.executable, *module_words("spawner")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "starter")},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stderr == "" or sys.version_info < (3, 11)


def test_no_command_spells_the_option_itself() -> None:
    """`module_words` is the one way to start a module: `-m` searches the current folder first."""
    found = [
        f"{path}:{node.lineno}: {node.value}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name not in EXCEPT
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and OPTION.search(node.value)
    ]
    assert not found, "use tightfit.core.import_path.module_words"
