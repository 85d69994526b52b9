"""The workers of a run: command line and environment, built from the plan, and processes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tightfit.clusters.nodes import Rendezvous
from tightfit.core.child_process import end_with_parent
from tightfit.core.errors import EXIT_REQUEUE, SetupError, UsageError, UserError
from tightfit.core.import_path import module_words
from tightfit.core.strategy import MEMORY_VARIABLE
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

WORKER = "tightfit.training.worker"
RUN_VARIABLE = "TIGHTFIT_RUN"
"""Marks every process of a run, so that leftovers of a killed launcher can be recognized."""
LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 3600
"""How long a node waits for the others, at the start and after one was lost."""


def worker_command(
    plan: Plan,
    run: Path,
    rendezvous: Rendezvous | None = None,
    *,
    attempt: int = 0,
    worker: str = WORKER,
    logs: Path | None = None,
) -> list[str]:
    """Plain Python for one process, torchrun for several, which keeps its own files in `logs`.

    `attempt` keeps nodes that still meet for an abandoned plan apart from those of the next.
    """
    strategy = plan.strategy
    if strategy.world_size == 1 and rendezvous is None:
        return [sys.executable, *module_words(worker, str(run))]
    meet = rendezvous or Rendezvous(
        endpoint=f"{LOOPBACK}:0", local_address=LOOPBACK, max_restarts=0
    )
    is_host = "" if meet.is_here is None else f",is_host={str(meet.is_here).lower()}"
    options: dict[str, object] = {
        "--nnodes": strategy.num_nodes,
        "--nproc-per-node": strategy.gpus_per_node,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": meet.endpoint,
        "--rdzv-id": f"{run.name}-{attempt}",
        "--rdzv-conf": f"join_timeout={JOIN_SECONDS}{is_host}",
        "--max-restarts": meet.max_restarts,
    }
    if logs is not None:  # in /tmp it would leave a folder each time
        options["--log-dir"] = logs
    if meet.local_address is not None:
        options["--local-addr"] = meet.local_address
    words = [word for name, value in options.items() for word in (name, str(value))]
    torchrun = [sys.executable, *module_words("torch.distributed.run", *words)]
    # torchrun's own `-m` would search the current folder.
    started = [sys.executable, *module_words("tightfit.clusters.local.workers", worker, str(run))]
    return [*torchrun, "--no-python", *started]


def worker_environment(
    plan: Plan,
    rendezvous: Rendezvous | None = None,
    *,
    mark: str,
    num_cores: int,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """What is added to the inherited environment; what the user has set stays.

    `mark` names the run and, where there are several, the node.
    """
    strategy = plan.strategy
    wanted = {
        "OMP_NUM_THREADS": str(max(num_cores // strategy.gpus_per_node, 1)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # every file is local by now
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if plan.hardware.node.gpu.compute_capability is not None:
        # The older of two names: torch 2.9 to 2.11 read the newer one but pass over this setting
        # in it (github.com/pytorch/pytorch/issues/183387); 2.13 reads the older one first.
        if "PYTORCH_ALLOC_CONF" not in inherited:
            wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        wanted["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML and nvidia-smi count
    elif inherited.get(MEMORY_VARIABLE):
        # On ARM torch's allocator takes a gigabyte at once, within which no limit would hold.
        wanted["MIMALLOC_DISALLOW_ARENA_ALLOC"] = "1"
    if rendezvous is not None:
        # Without it a node that stayed keeps the first round's address to itself, and one that
        # came back waits a minute for it in vain (torch 2.13, dynamic_rendezvous.py).
        wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if rendezvous is not None and rendezvous.interface is not None:
        wanted["NCCL_SOCKET_IFNAME"] = rendezvous.interface
        wanted["GLOO_SOCKET_IFNAME"] = rendezvous.interface
    kept = {name: value for name, value in wanted.items() if name not in inherited}
    return {**kept, RUN_VARIABLE: mark}


# The processes of a run: started, asked to stop, ended; leftovers found.

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
    return start_with_log(command, run.log_path, environment)


def start_with_log(
    command: Sequence[str], log_path: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A process in its own session that writes to the end of the log."""
    try:
        with log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
    except OSError as error:
        raise SetupError(
            f"Cannot start the worker in {log_path.parent}: {error.strerror or error}.",
            remedy="choose a folder that is writable and has free space: --output FOLDER",
        ) from error


def ask_to_stop(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Pass the request to the workers themselves: torchrun would give them 30 seconds to live.

    To a rank under torchrun SIGTERM is torchrun's signal for a restart of the group, so
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


# What torchrun starts on each rank: the worker, with exit codes as torchrun understands them.

MAX_USER_CODE = 7


def main(worker: str, run: str) -> int:
    """Run the worker module's `main` in this process and translate how it ends."""
    # Without torchrun nobody starts a lost rank again, nor reports how this one ends: what went on
    # would only be in the way of the next start.
    end_with_parent(os.getppid())
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if is_restart and _is_final(RunFolder(path=Path(run))):
        return 0
    code = int(importlib.import_module(worker).main([run]))
    return 0 if code == EXIT_REQUEUE else code


def _is_final(run: RunFolder) -> bool:
    try:
        return is_final(run.read_state())
    except UserError:
        return False


def is_final(state: RunState) -> bool:
    """Whether starting the same plan again could change nothing.

    A worker that lost its peer fails with 1, one with a bug with 70: those are worth
    another start, as the node that was lost may come back.
    """
    if state.status is RunStatus.FAILED:
        code = state.exit_code or 0
        return UsageError.exit_code <= code <= MAX_USER_CODE
    return state.status in (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.OUT_OF_MEMORY)


if __name__ == "__main__":
    exit_code = main(*sys.argv[1:3])
    sys.stdout.flush()
    sys.stderr.flush()
    # Leaving normally would wait for threads and ranks that may never answer.
    os._exit(exit_code)
