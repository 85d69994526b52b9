"""One submitter at a time over a farm: two would start workers twice and clear away under another.

Claimed as chunks are: by making the next number in a folder, of which one wins. The file names its
process; whether that lives is told by the process where it is here, else by the file's time.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import psutil

from tightfit.core.errors import UsageError
from tightfit.farm.shape import numbers_in
from tightfit.farm.store import FolderStore, Seen

SUBMITTERS = "submitters"
SILENT_SECONDS = 30.0
"""After which a submitter on another host is taken for dead."""


def claim_sole(store: FolderStore, out: str) -> str:
    """The file whose time we set from now on. Refused where another watches over the farm."""
    mine = _describe_myself()
    while True:
        newest = max(numbers_in(store.names(SUBMITTERS)), default=-1)
        if newest >= 0 and _require_gone(store, newest, out) == mine:
            return f"{SUBMITTERS}/{newest}"
        if store.publish(f"{SUBMITTERS}/{newest + 1}", json.dumps(mine).encode()):
            return f"{SUBMITTERS}/{newest + 1}"


def require_sole(folder: Path, out: str) -> None:
    """Refused where another watches over the farm; nothing where there is no farm."""
    try:
        store = FolderStore(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    newest = max(numbers_in(store.names(SUBMITTERS)), default=-1)
    if newest >= 0:
        _require_gone(store, newest, out)


def _require_gone(store: FolderStore, number: int, out: str) -> dict[str, Any]:
    """Who is named there, which is us or dead."""
    seen = store.look(f"{SUBMITTERS}/{number}")
    try:
        held = {} if seen is None else json.loads(seen.content)
    except ValueError:
        held = {}
    if seen is None or not held or held == _describe_myself():
        return dict(held)
    if _is_alive(store, held, seen):
        raise UsageError(
            f"Another `tightfit farm` (process {held['pid']} on {held['host']}) watches over "
            f"{out}.",
            remedy=f"wait for it, or end it: kill {held['pid']}    (its workers go on)",
        )
    return dict(held)


def _describe_myself() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}


def _is_alive(store: FolderStore, held: dict[str, Any], seen: Seen) -> bool:
    if held.get("host") == socket.gethostname():
        return _began(int(held["pid"])) == held.get("began")
    probe = f"tmp/clock-{socket.gethostname()}-{os.getpid()}"
    store.create(probe)
    return store.beat(probe) - seen.mtime_s < SILENT_SECONDS


def _began(pid: int) -> float | None:
    try:
        return round(psutil.Process(pid).create_time(), 2)
    except psutil.Error:
        return None
