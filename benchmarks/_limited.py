"""A process with a limit of time, for measurements that must not hold up the next."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_limited(
    command: Sequence[str], environment: Mapping[str, str], limit: float, log: Path
) -> int:
    """The exit code; the process and its children are ended at the limit, with a TimeoutError."""
    with log.open("w") as stream:
        started = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            return started.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            raise TimeoutError(f"not done after {limit:.0f} s") from None
