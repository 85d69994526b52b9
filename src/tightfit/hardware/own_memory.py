"""The most memory that this process was resident with, mapped files included."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path

_KIB = 1024
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Source: proc_pid_clear_refs(5)."""


def reset_peak() -> None:
    """Start the kernel's high-water mark anew, where it lets us."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK)


def read_peak_bytes() -> int:
    """Since `reset_peak`, or ever where there is no such mark.

    From the kernel's own mark, which starts anew with a program; `ru_maxrss` carries over what
    the process was before it became this program.
    """
    if _STATUS.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())):
        return int(found[1]) * _KIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else _KIB * peak
