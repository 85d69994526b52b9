"""Hostile requests to `tightfit serve`: it refuses each in its own shape and goes on answering.

TIGHTFIT_FUZZ_CASES=10000 sends so many; TIGHTFIT_FUZZ_SEED=7 sends others.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import httpx
import psutil
import pytest

from api_client import wait_until
from api_processes import ServerProcess, server_process
from hostile_requests import (
    CHAT,
    FEW_TOKENS,
    Answer,
    HostileRequest,
    draw_requests,
    idle_connections,
    send_hostile,
)
from hostile_trials import count_cases
from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.export.convert import convert_to_gguf
from tightfit.serving.http.schemas import ErrorBody

NUM_CASES = count_cases(300)
SEED = int(os.environ.get("TIGHTFIT_FUZZ_SEED", "1"))
BATCH = 60
NUM_CLIENTS = 24
MAX_CONNECTIONS = 200
REQUEST_SECONDS = 1.5
GROWTH_BYTES = 64 * 2**20
"""Of the server's memory over its peak in the first half, when its buffers have had their largest
bodies; one leaked body of 4 MiB a batch would pass it."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "stderr.txt"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[ServerProcess]:
    home = tmp_path_factory.mktemp("served")
    folder = make_llama(home / "tiny")
    model = convert_to_gguf(folder, home / "tiny.gguf", dtype=Dtype.FP32)
    limits = ("--request-timeout", REQUEST_SECONDS, "--max-connections", MAX_CONNECTIONS)
    with server_process(model, *limits, "--max-queue", 500, log=log) as running:
        yield running


@dataclass(slots=True, kw_only=True)
class _Friend:
    """A well-behaved client who asks again and again while a batch is sent."""

    server: ServerProcess
    seconds: list[float] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def ask_on(self) -> None:
        while not self.seconds or not self.has_ended.is_set():
            self.ask()

    def ask(self) -> None:
        began_s = time.monotonic()
        body = {
            "messages": [{"role": "user", "content": "how many singers"}],
            "max_tokens": FEW_TOKENS,
            "temperature": 0,
        }
        url = f"{self.server.url}{CHAT}"
        response = httpx.post(url, json=body, trust_env=False, timeout=30)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == FEW_TOKENS
        self.seconds.append(time.monotonic() - began_s)


def _check(request: HostileRequest, answers: list[Answer] | None) -> None:
    shown = f"{request.kind}: {request.pieces[0][:200]!r}"
    assert answers is not None, f"no answer and no end: {shown}"
    for answer in answers:
        assert answer.status < 500 or answer.status == 503, f"{answer.status} to {shown}"
        if answer.status >= 400 and answer.headers.get("content-type") != "text/event-stream":
            assert answer.headers.get("content-type") == "application/json", shown
            if answer.body and not request.pieces[0].startswith(b"HEAD"):
                ErrorBody.model_validate_json(answer.body, strict=True)


def _batches() -> Iterator[list[HostileRequest]]:
    drawn = draw_requests(SEED, NUM_CASES)
    while batch := list(islice(drawn, BATCH)):
        yield batch


def test_hostile_requests_are_refused_and_others_answered(server: ServerProcess, log: Path) -> None:
    process = psutil.Process(server.process.pid)
    counts: Counter[tuple[str, int]] = Counter()
    resident: list[int] = []
    friend = _Friend(server=server)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool, ThreadPoolExecutor(1) as beside:
        for batch in _batches():
            friend.has_ended.clear()
            asking = beside.submit(friend.ask_on)
            try:
                send = partial(send_hostile, port=server.ready["port"])
                answered = list(pool.map(send, batch))
            finally:
                friend.has_ended.set()
            asking.result()
            for request, answers in zip(batch, answered, strict=True):
                _check(request, answers)
                counts.update((request.kind, answer.status) for answer in answers or ())
            friend.ask()
            assert server.process.poll() is None
            assert "Traceback" not in log.read_text()
            resident.append(process.memory_info().rss)

    print(json.dumps({f"{kind}, {code}": count for (kind, code), count in sorted(counts.items())}))
    slowest = max(friend.seconds)
    grown = resident[-1] - max(resident[: len(resident) // 2 + 1])
    print([size // 2**20 for size in resident])
    print(
        f"{len(friend.seconds)} others answered, slowest {slowest:.2f} s; {grown / 2**20:.1f} MiB"
    )
    assert log.read_text() == "" or "error" not in log.read_text()
    assert grown < GROWTH_BYTES
    # Nobody's work goes on once he has gone.
    for gauge in ("tightfit_answers_running", "tightfit_answers_waiting"):
        wait_until(lambda name=gauge: server.gauge(name) == 0)


def test_idle_connections_beyond_the_limit_keep_nobody_out(
    server: ServerProcess, log: Path
) -> None:
    friend = _Friend(server=server)
    with idle_connections(server.ready["port"], 5 * MAX_CONNECTIONS) as opened:
        friend.ask()
        num_open = len(psutil.Process(server.process.pid).net_connections("tcp"))
        assert num_open <= MAX_CONNECTIONS + 2  # the listener, and one that is just being closed
        assert opened[0].recv(1) == b""  # the first to come, and so the longest silent
        assert friend.seconds[0] < 10
    friend.ask()
    assert "Traceback" not in log.read_text()
