"""A process that ends with the one that started it, whatever that one dies of.

`python -m tightfit.core.with_parent PID COMMAND...` becomes the command, bound in this way.
Nothing but the standard library: the Python of another environment runs this file by its path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""Linux, sys/prctl.h: the signal that a process gets when the thread that started it ends."""
LOOK_SECONDS = 1.0
BOUND_VARIABLE = "TIGHTFIT_ENDS_WITH_PARENT"
"""Set for a bound command, so that what it starts can bind itself to it in turn."""


def bind_command(command: Sequence[str]) -> list[str]:
    """A command that ends with this process, where the kernel can do it."""
    return [sys.executable, "-m", "tightfit.core.with_parent", str(os.getpid()), *command]


def follow_bound_parent() -> None:
    """End with the parent if that is a bound command: the kernel binds no further than to it."""
    if BOUND_VARIABLE in os.environ:
        end_with_parent(os.getppid())


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


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.environ[BOUND_VARIABLE] = "1"
    os.execvp(sys.argv[2], sys.argv[2:])
