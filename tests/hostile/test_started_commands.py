"""Every command that starts a Python leaves the current folder out; without running the verbs.

`test_verb_tour.py` runs the verbs that cost little. Here the source of the others is read.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

import tightfit
from tightfit.core.import_path import LAUNCHER, module_words
from tightfit.export.quantize import gptq
from verb_tour import plant

HOME = Path(tightfit.__file__).parent
INTERPRETERS = {"sys.executable", "PYTHON", "site.python_argv", "self._site.python_argv"}
PLACES = {
    "api/preflight.py", "clusters/local/workers.py",
    "clusters/slurm/script.py", "clusters/staging/nodes.py", "core/child_process.py",
    "export/quantize/gptq.py", "farming/backends/kubernetes.py", "farming/backends/local.py",
    "farming/backends/slurm.py", "runtime/build_rpc.py", "runtime/calibrate/links.py",
    "runtime/resolve.py", "trace/tracer.py",
}  # fmt: skip
"""Some files that start one, of verbs that the tour leaves out as well: the reading finds them."""


class Command(NamedTuple):
    file: str
    line: int
    following: str
    """Behind the interpreter."""


@cache
def read_source() -> tuple[list[Command], set[str]]:
    """Lists of words that begin, or go on, with a Python; files that say `-m`."""
    found: list[Command] = []
    saying: set[str] = set()
    for path in sorted(HOME.rglob("*.py")):
        file, text = str(path.relative_to(HOME)), path.read_text()
        if not any(name in text for name in (*INTERPRETERS, '"-m"', "'-m'")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and node.value == "-m":
                saying.add(file)
            if not isinstance(node, ast.List | ast.Tuple):
                continue
            for word, following in pairwise([*map(ast.unparse, node.elts), ""]):
                if not INTERPRETERS.isdisjoint(word.removeprefix("*").split(" or ")):
                    found.append(Command(file, node.lineno, following))
    return found, saying


def test_no_command_searches_the_current_folder() -> None:
    commands, _ = read_source()
    assert {command.file for command in commands} >= PLACES
    for command in commands:
        words = command.following.removeprefix("*")
        # Named beforehand, from `module_words` in the same file; or workers', which are below.
        is_named = words in ("words", "self._words")
        is_path = words == "str(Path(gptq_worker.__file__).resolve())"
        assert words.startswith("module_words(") or is_named or is_path or not words, command
        if words == "words":
            assert "= module_words(" in (HOME / command.file).read_text(), command


def test_workers_of_a_farm_start_so() -> None:
    from tightfit.farming.backends.local import WORKER_COMMAND

    assert list(WORKER_COMMAND) == module_words("tightfit.farming.worker")


def test_nothing_else_says_m() -> None:
    """`-m` is the option that searches the current folder."""
    _, saying = read_source()
    assert saying == {"__init__.py"}


@pytest.mark.parametrize("kind", ["launcher", "by path", "entry point", "-m"])
def test_a_planted_module_is_not_run(kind: str, tmp_path: Path) -> None:
    """What containers, Ray's and Kubernetes' pods and the GPTQ worker's own Python start."""
    marks, work = tmp_path / "marks", tmp_path / "work"
    for folder in (marks, work):
        folder.mkdir()
    plant(work, marks)
    other = str(tmp_path / "python")  # another environment's, which has no tightfit
    commands = {
        "launcher": [sys.executable, *module_words("json.tool", "--help")],
        "by path": [sys.executable, *gptq.worker_command(other, tmp_path / "job.json")[1:]],
        "entry point": [str(Path(sys.executable).with_name("tightfit")), "--help"],
        "-m": [sys.executable, "-m", "json.tool", "--help"],
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    subprocess.run(commands[kind], cwd=work, env=environment, check=False, capture_output=True)
    found = [path.name for path in marks.iterdir()]
    assert bool(found) == (kind == "-m"), found
    assert LAUNCHER in commands["launcher"]
