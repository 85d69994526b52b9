"""The peak of a process: its own, and not of what started it."""

from __future__ import annotations

import subprocess
import sys

from tightfit.core.units import MIB
from tightfit.hardware.machine import read_peak_memory_bytes

READ = (
    "from tightfit.hardware.machine import read_peak_memory_bytes; print(read_peak_memory_bytes())"
)


def test_it_grows_with_what_is_held() -> None:
    before = read_peak_memory_bytes()
    held = bytearray(b"x") * (before + 64 * MIB)
    assert read_peak_memory_bytes() >= before + 48 * MIB
    assert held[-1]


def test_a_large_parent_leaves_nothing_of_its_own() -> None:
    held = bytearray(b"x") * (512 * MIB)
    reported = int(subprocess.check_output([sys.executable, "-c", READ]))
    assert 5 * MIB < reported < 256 * MIB
    assert held[-1]
