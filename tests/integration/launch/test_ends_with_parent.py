"""No process that one of ours started goes on after it, whatever it died of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

SECONDS = 20.0
"""By when a process that should end has ended, on a busy machine too."""
START = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, {words}, str(os.getpid())], stdin=0)
print(child.pid, flush=True)
time.sleep(600)
"""
HELPER = "from tightfit.core import child_process as c\n{before}c.end_with_parent({parent})\n"
WAIT = "import sys, time\nprint('ready', flush=True)\ntime.sleep(600)\n"
POOL = """
import os, time
from tightfit.training.tracing.trace import fork_pool
with fork_pool(1) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


@contextmanager
def parent_of(program: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A process and its child, whose id it prints; stdin of both stays open."""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        yield parent, child
    finally:
        parent.kill()
        with suppress(psutil.NoSuchProcess):
            child.kill()  # first: one that goes on holds the pipe that is read to its end here
        parent.communicate()


def has_ended(process: psutil.Process) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def wait_for_children_to_settle(process: psutil.Process) -> None:
    """Until it has done what it does at its start: it then waits and takes no time."""
    quiet = 0
    before = -1.0
    while quiet < 5:
        now = sum(process.cpu_times()[:2])
        quiet = quiet + 1 if now == before and now > 0 else 0
        before = now
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_tracer_ends_with_whoever_asked(number: signal.Signals) -> None:
    program = START.format(words="'-m', 'tightfit.training.tracing.worker'")
    with parent_of(program) as (parent, child):
        wait_for_children_to_settle(child)
        parent.send_signal(number)
        assert has_ended(child)


def test_what_the_tracer_forks_off_ends_with_it() -> None:
    with parent_of(POOL) as (parent, child):
        os.kill(child.pid, signal.SIGINT)  # as Ctrl-C reaches a whole group
        time.sleep(0.2)
        assert child.is_running()
        parent.kill()
        assert has_ended(child)


def test_the_quantizer_ends_with_whoever_asked(tmp_path: Path) -> None:
    """Its stdin stays open here, as it does where another process has a copy of it."""
    os.mkfifo(tmp_path / "job.json")  # reading it waits for good
    module = "tightfit.export.quantize.gptq_worker"
    program = START.format(words=f"'-m', '{module}', {str(tmp_path / 'job.json')!r}")
    with parent_of(program) as (parent, child):
        wait_for_children_to_settle(child)
        parent.kill()
        assert has_ended(child)


def test_a_parent_that_died_before_the_kernel_knew_is_noticed() -> None:
    program = HELPER.format(before="", parent=os.getpid() + 1) + WAIT
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


def test_without_the_kernel_a_thread_looks(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    before = "c._ask_kernel = lambda: False\n"
    child = HELPER.format(before=before, parent="int(__import__('sys').argv[1])")
    child += f"open({str(ready)!r}, 'w').close()\n" + WAIT
    with parent_of(START.format(words=f"'-c', {child!r}")) as (parent, process):
        # Not by its rest: on a machine that stands still, one at its imports takes no time
        # either, and without the thread it would yet end, by the look at its start.
        while not ready.exists():
            assert process.status() != psutil.STATUS_ZOMBIE
            time.sleep(0.05)
        assert process.is_running()
        parent.kill()
        assert has_ended(process)
