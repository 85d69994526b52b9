"""`tightfit serve` as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import DefaultHttpxClient, OpenAI

START_SECONDS = 180
TIGHTFIT = (sys.executable, "-m", "tightfit")
MODELS = ("plain", "gguf")
"""The same weights: a folder that transformers reads, a file that llama.cpp reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    """A server that answers."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    clients: list[OpenAI] = field(default_factory=list)
    """Closed with the server."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ready['port']}"

    @property
    def client(self) -> OpenAI:
        return self.client_with("none")

    def client_with(self, api_key: str) -> OpenAI:
        """OpenAI's client, which no proxy of the environment may lead astray."""
        made = OpenAI(
            base_url=f"{self.url}/v1",
            api_key=api_key,
            max_retries=0,
            timeout=120,
            http_client=DefaultHttpxClient(trust_env=False),
        )
        self.clients.append(made)
        return made

    def gauge(self, name: str) -> float:
        """The sum of a metric over its labels, now."""
        page = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=60).text
        lines = [line for line in page.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def end(self, *, seconds: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def server_process(
    *words: object, log: Path | None = None, **variables: str
) -> Iterator[ServerProcess]:
    """`tightfit serve WORDS --port 0 --json`, until the block ends; its stderr goes to `log`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TIGHTFIT_API_KEY": "", **variables}
    command = [sys.executable, "-m", "tightfit.cli.app", "serve", *map(str, words)]
    with contextlib.ExitStack() as files:
        stderr = subprocess.PIPE if log is None else files.enter_context(log.open("wb"))
        process = subprocess.Popen(
            [*command, "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
    clients: list[OpenAI] = []
    try:
        yield ServerProcess(process=process, ready=_read_ready(process), clients=clients)
    finally:
        for client in clients:
            client.close()
        if process.poll() is None:
            process.kill()
        process.communicate()


def _read_ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    reported: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: reported.put(process.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
    line = reported.get(timeout=START_SECONDS)
    if not line:
        _, said = process.communicate()
        raise AssertionError(f"the server did not start: {said}")
    found: dict[str, Any] = json.loads(line)
    assert "url" in found, found
    return found
