"""One launcher per run folder and node: a locked file that names its holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError, UsageError
from tightfit.launch.rendezvous import Rendezvous
from tightfit.ledger.run_folder import RunFolder

WAIT_STEP_SECONDS = 1.0
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""A file system that knows no locks, as Lustre is often mounted: then nothing guards the run."""


@contextmanager
def hold_lock(
    run: RunFolder, rendezvous: Rendezvous | None = None, *, wait_seconds: float = 0.0
) -> Iterator[None]:
    """Hold the run for as long as the block lasts; the kernel lets go if we are killed.

    `wait_seconds`: where the holder may be a node that died, and the file server has yet to
    notice.
    """
    path = lock_path(run, rendezvous)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as fault:
        raise EnvironmentFaultError(
            f"Cannot write in {run.path}: {fault.strerror or fault}.",
            remedy="choose a folder that is writable: --output FOLDER",
        ) from fault
    try:
        _lock(handle, run, ends=time.monotonic() + wait_seconds)
        _write_holder(handle)
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _lock(handle: int, run: RunFolder, *, ends: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            if fault.errno in _NO_LOCKS:
                return
            if time.monotonic() >= ends:
                raise _is_held(run, _read_holder(handle)) from fault
        else:
            return
        time.sleep(WAIT_STEP_SECONDS)


def lock_path(run: RunFolder, rendezvous: Rendezvous | None) -> Path:
    """Nodes that share a folder have a lock each."""
    if rendezvous is None:
        return run.path / "launcher.lock"
    rank = rendezvous.node_rank
    return run.path / f"launcher-{socket.gethostname() if rank is None else rank}.lock"


def _write_holder(handle: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname()}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode(), 0)


def _read_holder(handle: int) -> tuple[int, str] | None:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_held(run: RunFolder, holder: tuple[int, str] | None) -> UsageError:
    who = "Another `tightfit train`"
    remedy = "wait for it, or choose another folder: --output FOLDER"
    if holder is not None:
        pid, host = holder
        who += f" (process {pid} on {host})"
        remedy = f"watch it with: tail -f {shlex.quote(str(run.metrics_path))}"
        if host == socket.gethostname():
            remedy += f"    (kill {pid} makes it save and stop)"
    return UsageError(f"{who} is running in {run.path}.", remedy=remedy)
