"""File locks: one process at a time. The kernel releases a lock when its holder ends, however.

flock(2) locks belong to an open file, so closing the descriptor releases the lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""From a file system without locks, as Lustre is often mounted."""
_SHORTEST_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 1.0


def take_lock(
    descriptor: int, *, wait_seconds: float | None = 0.0, is_required: bool = True
) -> bool:
    """Lock an open file; False if another process still holds it after `wait_seconds`.

    `wait_seconds=None` waits without limit. With `is_required=False`, a file system that has
    no locks counts as locked; otherwise its OSError is raised.
    """
    try:
        if wait_seconds is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return True
        return _poll(descriptor, wait_seconds)
    except OSError as error:
        if is_required or error.errno not in _UNSUPPORTED:
            raise
        return True


def _poll(descriptor: int, wait_seconds: float) -> bool:
    end = time.monotonic() + wait_seconds
    pause = min(max(wait_seconds / 100, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EACCES: a lock held by another NFS client
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
        else:
            return True


def open_locked(
    path: Path,
    *,
    wait_seconds: float | None = 0.0,
    is_required: bool = True,
    mode: int = 0o644,
    flags: int = 0,
) -> int | None:
    """A descriptor of `path`, made if missing, that holds its lock; None if another process does.

    The holder may replace or remove the file while we wait, so the file that was locked is
    compared with the one at `path`, and opened again if they differ.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, mode)
        try:
            if not take_lock(descriptor, wait_seconds=wait_seconds, is_required=is_required):
                os.close(descriptor)
                return None
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # noqa: PTH116
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def locked_file(
    path: Path,
    *,
    wait_seconds: float | None = 0.0,
    is_required: bool = True,
    mode: int = 0o644,
) -> Iterator[int]:
    """Hold the lock of `path` inside the block; BlockingIOError if another process holds it."""
    descriptor = open_locked(path, wait_seconds=wait_seconds, is_required=is_required, mode=mode)
    if descriptor is None:
        raise BlockingIOError(errno.EWOULDBLOCK, "locked by another process", str(path))
    try:
        yield descriptor
    finally:
        os.close(descriptor)
