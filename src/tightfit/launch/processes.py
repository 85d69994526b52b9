"""The processes of a run: started, told to stop, ended; leftovers found."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from tightfit.core.errors import EnvironmentFaultError
from tightfit.launch.command import RUN_VARIABLE
from tightfit.ledger.run_folder import RunFolder

SAVE_SECONDS = 60.0
"""What leftovers of a killed launcher get to save in, before they are ended."""
END_SECONDS = 10.0


def start_worker(
    command: Sequence[str], run: RunFolder, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """In its own session, so that Ctrl-C reaches the launcher alone; output goes to the log."""
    # torchrun dies of SIGUSR1, which Slurm may send to every process; what is ignored here stays
    # ignored there until a worker asks for it. The caller sets its own handlers after this.
    with suppress(ValueError):  # not in the main thread: nothing to protect
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with run.log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
    except OSError as fault:
        raise EnvironmentFaultError(
            f"Cannot start the worker in {run.path}: {fault.strerror or fault}.",
            remedy="choose a folder that is writable and has free space: --output FOLDER",
        ) from fault


def ask_to_stop(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Pass the wish to the workers themselves: torchrun would give them 30 seconds to live.

    To a rank under torchrun SIGTERM is torchrun's word for a restart of the group, so
    a stop comes as SIGUSR1 there.
    """
    try:
        leader = psutil.Process(process.pid)
        is_torchrun = _is_torchrun(leader)
        workers = leader.children() if is_torchrun else [leader]
    except psutil.Error:
        return
    if not workers:
        leader.terminate()  # torchrun waits for other nodes, and there is nothing to save
    for worker in workers:
        with suppress(psutil.Error):
            worker.send_signal(signal.SIGUSR1 if is_torchrun else signum)


def _is_torchrun(process: psutil.Process) -> bool:
    return "torch.distributed.run" in process.cmdline()[:6]


def end_all(pid: int) -> None:
    """End a process and all that it started, at once."""
    try:
        leader = psutil.Process(pid)
        doomed = [leader, *leader.children(recursive=True)]
    except psutil.Error:
        return
    for process in doomed:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(doomed[1:], timeout=END_SECONDS)


def end_leftovers(mark: str) -> int:
    """Let workers whose launcher was killed save and stop; returns how many there were.

    Two groups of workers in one folder would undo each other's checkpoints.
    """
    left = find_leftovers(mark)
    for process in left:
        with suppress(psutil.Error):
            if not _is_torchrun(process):
                process.send_signal(signal.SIGUSR1)
    _, alive = psutil.wait_procs(left, timeout=SAVE_SECONDS)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=END_SECONDS)
    return len(left)


def find_leftovers(mark: str) -> list[psutil.Process]:
    """Processes of this user and machine that carry the run's mark, this one left out."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            if process.environ().get(RUN_VARIABLE) == mark:
                found.append(process)
    return found
