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

from tightfit.core.errors import SetupError
from tightfit.farming.worker_pool import StartedWorkers, WorkerBackend, WorkerGroup

END_SECONDS = 20.0
"""What a worker gets to give its leases back in, before it is ended."""
WORKER_COMMAND = ("-m", "tightfit.farming.worker")


class LocalStarter:
    """In sessions of their own: Ctrl-C reaches the submitter alone, which stops them."""

    def __init__(self, folder: Path, words: Sequence[str] = WORKER_COMMAND) -> None:
        self._folder = folder
        self._words = words
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, group: WorkerGroup, count: int) -> StartedWorkers:
        names = []
        cards = self._free_cards(group, count)
        for number in range(count):
            names.append(self._start_one(group, number, cards[number] if cards else None))
        return StartedWorkers(
            group=group.name,
            kind=WorkerBackend.LOCAL,
            names=tuple(names),
            num_workers=count,
            host=socket.gethostname(),
        )

    def count_alive(self, jobs: Sequence[StartedWorkers]) -> int:
        for child in self._children:
            child.poll()  # one that has ended is not to stay as a zombie
        return sum(1 for _ in _processes(jobs))

    def find_lost(
        self, group: WorkerGroup, known: Sequence[StartedWorkers]
    ) -> list[StartedWorkers]:
        """Processes whose command line is a worker's on this very folder."""
        noted = {name for job in known for name in job.names}
        found = []
        for process in psutil.process_iter(["cmdline", "create_time"]):
            words = process.info["cmdline"] or []
            name = f"{process.pid}@{process.info['create_time']:.2f}"
            if name not in noted and self._is_ours(words):
                found.append(name)
        if not found:
            return []
        return [
            StartedWorkers(
                group=group.name,
                kind=WorkerBackend.LOCAL,
                names=tuple(found),
                num_workers=len(found),
                host=socket.gethostname(),
            )
        ]

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

    def _is_ours(self, words: Sequence[str]) -> bool:
        """A worker of this farm. Not what started it: a shell, or a container's own command."""
        head = [sys.executable, *self._words, str(self._folder)]
        return list(words[: len(head)]) == head

    def _free_cards(self, group: WorkerGroup, count: int) -> list[str]:
        """Those that fewest of our workers have: one that died is replaced on its own card."""
        if not group.gpus_per_worker or group.num_workers < 2:
            return []
        used = Counter(
            _gpu_of_process(process)
            for process in psutil.process_iter(["cmdline"])
            if self._is_ours(process.info["cmdline"] or [])
        )
        chosen = []
        for _ in range(count):
            card = min(_visible_gpus(group.num_workers), key=lambda card: used[card])
            used[card] += 1
            chosen.append(card)
        return chosen

    def _start_one(self, group: WorkerGroup, number: int, card: str | None) -> str:
        words = [sys.executable, *self._words, str(self._folder), "--partition", group.name]
        environment = dict(os.environ)
        if card is not None:
            environment["CUDA_VISIBLE_DEVICES"] = card
        log = self._folder / "logs" / f"{group.name}-{time.time_ns()}-{number}.log"
        try:
            with log.open("ab") as stream:
                child = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise SetupError(
                f"Cannot start a worker: {error.strerror or error}.",
                remedy="see whether the machine has memory and processes left",
            ) from error
        self._children.append(child)
        try:
            return f"{child.pid}@{psutil.Process(child.pid).create_time():.2f}"
        except psutil.Error:
            return f"{child.pid}@0.00"


def _visible_gpus(count: int) -> list[str]:
    """Those that we may use ourselves."""
    allowed = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return allowed or [str(number) for number in range(count)]


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
