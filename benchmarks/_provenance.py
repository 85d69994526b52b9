"""Machine, versions, command and date: the head of every result file."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

from tightfit.core.packages import __version__


def provenance(command: str) -> dict[str, str]:
    return {
        "command": f"python {command} {' '.join(sys.argv[1:])}".strip(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "tightfit": __version__,
    }


def check_total(total: dict[str, Any], result: Path, *, count: str, noise: float, what: str) -> int:
    """Say what got worse than in the committed result, and return the exit code.

    `count` names how much was compared, which may not shrink.
    """
    before = json.loads(result.read_text())["total"]
    worse = [name for name in total if "error" in name and total[name] > before[name] + noise]
    print("\n".join(f"error: {name} got worse" for name in worse) or f"{what}: all good")
    return 1 if worse or total[count] < before[count] else 0


def write_result(result: Path, command: str, **content: Any) -> None:
    head = provenance(command)
    result.write_text(json.dumps({**head, **content}, indent=1) + "\n")
