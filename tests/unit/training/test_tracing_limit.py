"""The tracer's memory ends before the machine's does."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from tightfit.core.child_process import limit_data_bytes
limit_data_bytes(2**29)
bytearray(2**26)
try:
    bytearray(2**30)
except MemoryError:
    print("refused")
"""


def test_more_than_the_limit_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    # Elsewhere nothing limits what a process maps as data.
    assert done.stdout.strip() == ("refused" if sys.platform == "linux" else ""), done.stderr
