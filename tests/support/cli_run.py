"""Running the command line in tests: in this process, or for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tightfit.cli.app import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command line gave back."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_here(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Answer:
    capsys.readouterr()
    code = main(list(argv))
    out, err = capsys.readouterr()
    return Answer(code=code, out=out, err=err)


def run_process(*argv: str, **environment: str) -> Answer:
    """`python -m tightfit.cli.app`, as a shell would start it."""
    done = subprocess.run(
        [sys.executable, "-m", "tightfit.cli.app", *argv],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )
    return Answer(code=done.returncode, out=done.stdout, err=done.stderr)
