"""Machine, versions, command and date: the head of every result file."""

from __future__ import annotations

import datetime
import platform
import sys

from tightfit import __version__


def provenance(command: str) -> dict[str, str]:
    return {
        "command": f"python {command} {' '.join(sys.argv[1:])}".strip(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "tightfit": __version__,
    }
