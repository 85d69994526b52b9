"""Starts workers by forking a process that has imported everything: a start costs no seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tiny_jobs import Job


class Nursery:
    """Many starts of `python -m tightfit.training.worker RUN`, one after the other."""

    def __init__(self, job: Job) -> None:
        environment = job.surroundings()
        support = Path(__file__).parents[2] / "support"
        paths = [environment.get("PYTHONPATH", ""), str(support)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        assert self._read() == "ready"

    def start(self, run: Path) -> int:
        """The worker's process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{run}\n")
        self._process.stdin.flush()
        return int(self._read())

    def wait(self) -> int:
        """The worker's exit code; below zero the signal it died of."""
        return int(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _serve() -> None:
    import peft  # noqa: F401
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    import tightfit.training.checkpoint
    import tightfit.training.loop  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _work(line.strip())
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _work(run: str) -> None:
    """As the end of worker.py does it."""
    from tightfit.training.worker import main

    quiet = os.open(f"{run}/log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = main([run])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
