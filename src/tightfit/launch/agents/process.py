"""An agent as its own process sees it: requests come in on stdin, answers go out on stdout."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

Tell = Callable[[dict[str, Any]], None]


def open_answers() -> Tell:
    """Take stdout for answers alone; whatever a library prints goes to stderr from now on."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    turn = threading.Lock()

    def tell(line: dict[str, Any]) -> None:
        with turn:
            out.write(json.dumps(line).encode() + b"\n")
            out.flush()

    return tell


def read_requests() -> Iterator[dict[str, Any]]:
    """Until stdin closes, which is how an agent is told to end."""
    for line in sys.stdin.buffer:
        yield json.loads(line)
