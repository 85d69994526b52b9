"""The `--json` side of every verb."""

from __future__ import annotations

import sys
from typing import Any


def show_json(value: Any) -> None:
    """One JSON document on stdout and nothing else."""
    import json

    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
