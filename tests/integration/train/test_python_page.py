"""The job of docs/python.md, and the same as a notebook, run as they stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from small_models import make_llama

pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "python.md"
NOTEBOOK = ROOT / "examples" / "whole_job.ipynb"


def read_page() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    return str(code)


def read_notebook() -> str:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def test_page_and_notebook_are_the_same_program() -> None:
    assert read_notebook().split() == read_page().split()


def test_the_whole_job_runs(tmp_path: Path) -> None:
    make_llama(tmp_path / "SmolLM2-135M-Instruct", hidden_size=256, intermediate_size=256)
    rows = [{"prompt": f"add {n} and {n}", "completion": str(2 * n)} for n in range(40)]
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = tmp_path / "job.py"
    program.write_text(read_notebook())

    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs" / "sql" / "merged" / "config.json").is_file()


def test_import_is_light_and_offers_every_verb() -> None:
    program = (
        "import sys, tightfit\n"
        "assert not {'torch', 'pydantic', 'typer', 'rich'} & set(sys.modules), 'not light'\n"
        "assert all(callable(getattr(tightfit, n)) for n in tightfit.__all__ if n[0] != '_')\n"
        "assert 'torch' not in sys.modules, 'a verb loads torch before it is called'\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
