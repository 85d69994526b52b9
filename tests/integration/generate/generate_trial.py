"""`tightfit generate` as a real process on a tiny model, for the tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from small_models import make_llama

QUESTION = "how many singers are older than the average album of every band in this town"


def make_model(folder: Path) -> Path:
    folder.mkdir()
    return make_llama(folder)


def write_prompts(path: Path, num_prompts: int) -> Path:
    """Prompts of different lengths, no two alike."""
    words = QUESTION.split()
    lines = [
        f"{number}: {' '.join(words[: 1 + number * 7 % len(words)])}"
        for number in range(num_prompts)
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def command(model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    line = [sys.executable, "-m", "tightfit.cli.app", "generate", str(model)]
    return [*line, "--prompts", str(prompts), "--out", str(out), "--device", "cpu", *more]


def environment(home: Path) -> dict[str, str]:
    keep = {**os.environ, "OMP_NUM_THREADS": "1", "TIGHTFIT_CACHE": str(home / "cache")}
    return keep | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def run(line: list[str], home: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line,
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
        **options,
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
