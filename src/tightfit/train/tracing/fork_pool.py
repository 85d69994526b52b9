"""Processes forked from the tracer, for work that can run in parallel."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tightfit.core.with_parent import end_with_parent


def fork_pool(num_processes: int) -> ProcessPoolExecutor:
    """They have all that is imported here, and end when this process does.

    Left alone, one of them would wait for work for good: it holds both ends of the pipe that the
    work comes through.
    """
    return ProcessPoolExecutor(
        num_processes,
        mp_context=get_context("fork"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )


def _begin(parent_pid: int) -> None:
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever asked
