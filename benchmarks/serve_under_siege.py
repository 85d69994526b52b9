"""`tightfit serve` held for minutes by 200 clients of which a third misbehave.

python benchmarks/serve_under_siege.py [--minutes 10] [--clients 200] [--out FILE]

A tiny model, so that the server and not the model is what is measured. Misbehaving clients send
headers and bodies slowly or by half, leave in mid-stream, send junk or say nothing. Every
well-behaved request has to be answered.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from _provenance import write_result  # noqa: E402
from api_processes import ServerProcess, server_process  # noqa: E402
from hostile_requests import CHAT, draw_misbehaviour, send_hostile  # noqa: E402
from small_models import make_llama  # noqa: E402
from tightfit.core.dtypes import Dtype  # noqa: E402
from tightfit.export.convert import convert_to_gguf  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "serve_under_siege.json"
NEW_TOKENS = 32
PAUSE_SECONDS = 2.0
"""The longest between two requests of a well-behaved client."""
REQUEST_SECONDS = 10.0
TIMEOUT_SECONDS = 120.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the clients met."""

    first_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    misbehaved: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


def behave(server: ServerProcess, tally: Tally, end_s: float, seed: int) -> None:
    """Ask, read the whole stream, pause, ask again."""
    drawn = random.Random(seed)
    body = {"max_tokens": NEW_TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
    with httpx.Client(base_url=server.url, trust_env=False, timeout=TIMEOUT_SECONDS) as client:
        while time.monotonic() < end_s:
            content = f"{drawn.randrange(1000)} how many singers"
            asked = {**body, "messages": [{"role": "user", "content": content}]}
            try:
                first, whole = ask(client, asked)
            except (httpx.HTTPError, ValueError) as error:
                with tally.lock:
                    tally.failures.append(f"{type(error).__name__}: {error}"[:200])
            else:
                with tally.lock:
                    tally.first_seconds.append(first)
                    tally.whole_seconds.append(whole)
            time.sleep(drawn.random() * PAUSE_SECONDS)


def ask(client: httpx.Client, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first piece of the answer and to its end."""
    began_s, first_s, last = time.monotonic(), None, ""
    with client.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        for line in response.iter_lines():
            if first_s is None and '"content":"' in line and '"content":""' not in line:
                first_s = time.monotonic()
            last = line or last
    if last != "data: [DONE]" or first_s is None:
        raise ValueError(f"the stream ended with {last[:80]!r}")
    return first_s - began_s, time.monotonic() - began_s


def misbehave(server: ServerProcess, tally: Tally, end_s: float, seed: int) -> None:
    """One hostile request after the other."""
    for request in draw_misbehaviour(seed):
        if time.monotonic() >= end_s:
            return
        send_hostile(request, server.ready["port"])
        with tally.lock:
            tally.misbehaved[request.kind] += 1


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    return {
        f"p{share}_seconds": round(ordered[min(len(ordered) * share // 100, len(ordered) - 1)], 4)
        for share in (50, 95, 99)
    }


def besiege(server: ServerProcess, *, seconds: float, num_clients: int) -> dict[str, Any]:
    """Hold the server for so long; returns what was counted."""
    tally, process = Tally(), psutil.Process(server.process.pid)
    begin_s = time.monotonic()
    num_bad = num_clients // 3
    threads = [
        threading.Thread(
            target=misbehave if number < num_bad else behave,
            args=(server, tally, begin_s + seconds, number),
        )
        for number in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    resident: dict[str, int] = {}
    # The start is when every client has come: before, the server has yet to fill its buffers.
    for name, share in (("start", 0.1), ("middle", 0.55), ("end", 1.0)):
        time.sleep(max(begin_s + share * seconds - time.monotonic(), 0))
        resident[name] = process.memory_info().rss
    for thread in threads:
        thread.join()
    time.sleep(1)
    return {
        "seconds": seconds,
        "num_clients": num_clients,
        "num_misbehaving_clients": num_bad,
        "well_behaved": {
            "num_answered": len(tally.whole_seconds),
            "num_failed": len(tally.failures),
            "failures": sorted(set(tally.failures))[:10],
            "first_token": percentiles(tally.first_seconds),
            "whole_answer": percentiles(tally.whole_seconds),
        },
        "misbehaved": dict(sorted(tally.misbehaved.items())),
        "server_resident_bytes": resident,
        "left_running": server.gauge("tightfit_answers_running"),
        "left_waiting": server.gauge("tightfit_answers_waiting"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        weights = make_llama(home / "tiny")
        model = convert_to_gguf(weights, home / "tiny.gguf", dtype=Dtype.FP32)
        words = (model, "--max-queue", 1000, "--request-timeout", REQUEST_SECONDS)
        with server_process(*words, log=home / "log.txt") as server:
            found = besiege(server, seconds=60 * given.minutes, num_clients=given.clients)
        has_traceback = "Traceback" in (home / "log.txt").read_text()
    write_result(
        given.out,
        "benchmarks/serve_under_siege.py",
        model="Llama of two layers, F32, llama.cpp",
        new_tokens=NEW_TOKENS,
        request_timeout_seconds=REQUEST_SECONDS,
        total=found,
        has_traceback=has_traceback,
    )
    print(json.dumps(found, indent=1))
    return 1 if found["well_behaved"]["num_failed"] or has_traceback else 0


if __name__ == "__main__":
    sys.exit(main())
