"""Workers as processes of this machine, which outlive whoever started them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tightfit.core.errors import EnvironmentFaultError
from tightfit.farm.crew import StartedJob
from tightfit.farm.places import Place, PlaceKind

END_SECONDS = 20.0
"""What a worker gets to give its leases back in, before it is ended."""
WORKER_WORDS = ("-m", "tightfit.farm.worker")


class LocalStarter:
    """In sessions of their own: Ctrl-C reaches the submitter, which tells them."""

    def __init__(self, folder: Path, words: Sequence[str] = WORKER_WORDS) -> None:
        self._folder = folder
        self._words = words
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, place: Place, count: int) -> StartedJob:
        names = []
        for number in range(count):
            names.append(self._start_one(place, number))
        return StartedJob(
            place=place.name,
            kind=PlaceKind.LOCAL,
            names=tuple(names),
            num_workers=count,
            host=socket.gethostname(),
        )

    def count_alive(self, jobs: Sequence[StartedJob]) -> int:
        for child in self._children:
            child.poll()  # one that has ended is not to stay as a zombie
        return sum(1 for _ in _processes(jobs))

    def find_lost(self, place: Place, known: Sequence[StartedJob]) -> list[StartedJob]:
        """Processes whose command line is a worker's on this very folder."""
        noted = {name for job in known for name in job.names}
        found = []
        for process in psutil.process_iter(["cmdline", "create_time"]):
            words = process.info["cmdline"] or []
            name = f"{process.pid}@{process.info['create_time']:.2f}"
            if str(self._folder) in words and name not in noted and self._is_worker(words):
                found.append(name)
        if not found:
            return []
        return [
            StartedJob(
                place=place.name,
                kind=PlaceKind.LOCAL,
                names=tuple(found),
                num_workers=len(found),
                host=socket.gethostname(),
            )
        ]

    def stop(self, jobs: Sequence[StartedJob]) -> None:
        found = list(_processes(jobs))
        for process in found:
            process.terminate()
        _, alive = psutil.wait_procs(found, timeout=END_SECONDS)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=END_SECONDS)
        for child in self._children:
            child.poll()

    def _is_worker(self, words: Sequence[str]) -> bool:
        """Not what started it: a shell, or a container's own command."""
        head = [sys.executable, *self._words]
        return list(words[: len(head)]) == head

    def _start_one(self, place: Place, number: int) -> str:
        words = [sys.executable, *self._words, str(self._folder), "--partition", place.name]
        environment = dict(os.environ)
        if place.gpus_per_worker and place.num_workers > 1:
            environment["CUDA_VISIBLE_DEVICES"] = _card(number)
        log = self._folder / "logs" / f"{place.name}-{time.time_ns()}-{number}.log"
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
        except OSError as fault:
            raise EnvironmentFaultError(
                f"Cannot start a worker: {fault.strerror or fault}.",
                remedy="see whether the machine has memory and processes left",
            ) from fault
        self._children.append(child)
        try:
            return f"{child.pid}@{psutil.Process(child.pid).create_time():.2f}"
        except psutil.Error:
            return f"{child.pid}@0.00"


def _card(number: int) -> str:
    """Of the cards that we may use ourselves, one in turn."""
    allowed = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return allowed[number % len(allowed)] if allowed else str(number)


def _processes(jobs: Sequence[StartedJob]) -> Iterator[psutil.Process]:
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
