"""Starts commands by forking a process that has imported everything: a start costs no seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

WORKER = "worker"


class Nursery:
    """Many starts of `tightfit WORDS`, or of the training worker with `worker RUN`, in turn."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        paths = [environment.get("PYTHONPATH", ""), str(Path(__file__).parent)]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self.pid = self._process.pid
        assert self._read() == "ready"

    def start(self, *words: object, log: Path, environment: Mapping[str, str] | None = None) -> int:
        """Its process id; it leads a session of its own."""
        assert self._process.stdin is not None
        order = {"words": list(map(str, words)), "log": str(log), "more": dict(environment or {})}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def wait(self) -> int:
        """Its exit code; below zero the signal it died of."""
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

    import tightfit.cli.app
    import tightfit.training.checkpoint
    import tightfit.training.loop  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _work(**order)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _work(words: Sequence[str], log: str, more: Mapping[str, str]) -> None:
    """As the ends of worker.py and cli/app.py do it."""
    from tightfit.cli import app
    from tightfit.training import worker

    os.setsid()
    os.environ.update(more)
    quiet = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = worker.main(list(words[1:])) if words[0] == WORKER else app.main(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
