"""A process that ends with the one that started it, whatever that one dies of.

Nothing but the standard library: the Python of another environment runs this file by its path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
"""Linux, sys/prctl.h: the signal that a process gets when the thread that started it ends."""
LOOK_SECONDS = 1.0


def end_with_parent(parent_pid: int) -> None:
    """Have this process killed when `parent_pid`, which started it, is no more.

    The kernel does it, so that no lock and no long computation is in the way. Where it cannot,
    a thread looks once a second. What dies before the kernel knows of us is seen as well.
    """
    if not _ask_kernel():
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:
        _end()


def _ask_kernel() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(LOOK_SECONDS)
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
