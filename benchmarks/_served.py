"""`tightfit serve` for a benchmark."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server that answers."""
    command = [sys.executable, "-m", "tightfit", "serve", str(model), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready: dict[str, Any] = json.loads(process.stdout.readline())
        yield str(ready["base_url"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
