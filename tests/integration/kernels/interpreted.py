"""Run a script where triton's own interpreter stands in for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = "TIGHTFIT_TRITON"
"""Names a folder with triton and a numpy that its interpreter can loop with: `make test-kernels`
fills one. Not in the environment itself, since everything else is tested without triton."""


def interpret(script: str) -> dict[str, Any]:
    """What the script in this folder prints last, as JSON."""
    paths = [os.environ[FOLDER], str(HERE.parents[1] / "unit" / "runtime")]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
