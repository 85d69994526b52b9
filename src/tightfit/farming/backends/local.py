"""Workers as processes of this machine; they outlive the submitter."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tightfit.clusters.local.workers import start_with_log
from tightfit.core.import_path import module_words
from tightfit.farming.worker_pool import (
    THREADS_VARIABLE,
    StartedWorkers,
    WorkerGroup,
    share_threads,
)

END_SECONDS = 20.0
"""For a worker to return its leases, before it is killed."""
WORKER_COMMAND = tuple(module_words("tightfit.farming.worker"))


class LocalStarter:
    """In sessions of their own: Ctrl-C reaches the submitter alone, which stops them."""

    def __init__(self, folder: Path, words: Sequence[str] = WORKER_COMMAND) -> None:
        self._folder = folder
        self._words = words
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, group: WorkerGroup, count: int) -> tuple[str, ...]:
        gpus = self._free_gpus(group, count) or [None] * count
        return tuple(self._start_one(group, number, gpu) for number, gpu in enumerate(gpus))

    def count_alive(self, jobs: Sequence[StartedWorkers]) -> int:
        for child in self._children:
            child.poll()  # one that has ended is not to stay as a zombie
        return sum(1 for _ in _processes(jobs))

    def find(self, group: WorkerGroup) -> dict[str, int]:  # noqa: ARG002
        """Processes whose command line is a worker's on this very folder."""
        return {
            f"{process.pid}@{process.info['create_time']:.2f}": 1
            for process in psutil.process_iter(["cmdline", "create_time"])
            if self._is_ours(process.info["cmdline"] or [])
        }

    def stop(self, jobs: Sequence[StartedWorkers]) -> None:
        found = list(_processes(jobs))
        for process in found:
            process.terminate()
        _, alive = psutil.wait_procs(found, timeout=END_SECONDS)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=END_SECONDS)
        for child in self._children:
            child.poll()

    def name_cancel_command(self, jobs: Sequence[StartedWorkers]) -> str:
        pids = [str(process.pid) for process in _processes(jobs)]
        return f"kill {' '.join(pids)}" if pids else ""

    def _is_ours(self, words: Sequence[str]) -> bool:
        """A worker of this farm. Not what started it: a shell, or a container's own command."""
        head = [sys.executable, *self._words, str(self._folder)]
        return list(words[: len(head)]) == head

    def _free_gpus(self, group: WorkerGroup, count: int) -> list[str | None]:
        """The GPUs with the fewest of our workers: one that died is replaced on its own GPU."""
        if not group.gpus_per_worker or group.num_workers < 2:
            return []
        used = Counter(
            _gpu_of_process(process)
            for process in psutil.process_iter(["cmdline"])
            if self._is_ours(process.info["cmdline"] or [])
        )
        allowed = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        visible = allowed or [str(number) for number in range(group.num_workers)]
        chosen: list[str | None] = []
        for _ in range(count):
            gpu = min(visible, key=lambda gpu: used[gpu])
            used[gpu] += 1
            chosen.append(gpu)
        return chosen

    def _start_one(self, group: WorkerGroup, number: int, gpu: str | None) -> str:
        words = [sys.executable, *self._words, str(self._folder), "--partition", group.name]
        log = self._folder / "logs" / f"{group.name}-{time.time_ns()}-{number}.log"
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        if (num_threads := share_threads(group)) is not None:
            environment[THREADS_VARIABLE] = str(num_threads)
        child = start_with_log(words, log, environment)
        self._children.append(child)
        try:
            return f"{child.pid}@{psutil.Process(child.pid).create_time():.2f}"
        except psutil.Error:
            return f"{child.pid}@0.00"


def _gpu_of_process(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("CUDA_VISIBLE_DEVICES", ""))
    except psutil.Error:
        return ""


def _processes(jobs: Sequence[StartedWorkers]) -> Iterator[psutil.Process]:
    """Those that still run; a process id that another has taken over does not count."""
    for job in jobs:
        if job.host != socket.gethostname():
            continue
        for name in job.names:
            pid, _, began = name.partition("@")
            try:
                process = psutil.Process(int(pid))
                is_same = f"{process.create_time():.2f}" == began
                if is_same and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                continue
