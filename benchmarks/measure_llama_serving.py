"""`tightfit serve FILE.gguf` beside llama.cpp's own server: the same file, slots, threads and load.

    python benchmarks/measure_llama_serving.py FILE.gguf   # measures, and writes the result file
    python benchmarks/measure_llama_serving.py --check     # whether the committed result is good

Both servers stay up and take turns (A B B A), so that whatever else runs on the machine slows both
alike. Clients stream chats one after the other, each with a prompt of its own, greedy, to a fixed
number of tokens; they run in this process, which is not counted. llama.cpp's server is the one in
xllamacpp's wheel, with its own HTTP and its own defaults but for what both share.
CPU seconds are of the server and its children: they tell what an answer costs on a machine that
others use as well, where tokens per second tell who else was there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import xllamacpp

from _provenance import write_result

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "llama_serving.json"
CONTEXT, SLOTS, NEW_TOKENS = 512, 8, 24
LOADS = ((1, 3), (8, 8), (32, 32))
"""Clients, and the requests of all of them together in one turn."""
TURNS = ("tightfit", "llama.cpp", "llama.cpp", "tightfit")
HIGHEST_RATIO = 1.0
"""Of CPU seconds per token."""
NOISE = 0.03
LLAMA_SERVER = """
import sys, xllamacpp
path, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:])
made = xllamacpp.CommonParams()
made.model.path = path
made.n_ctx, made.n_parallel = context * slots, slots
made.cpuparams.n_threads = made.cpuparams_batch.n_threads = threads
made.n_gpu_layers, made.verbosity, made.ui = 0, -1, False
made.hostnames, made.port = ["127.0.0.1"], 0
server = xllamacpp.Server(made)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One stream."""

    first_seconds: float
    num_tokens: int
    num_prompt_tokens: int


@contextmanager
def serve(
    command: Sequence[str], environment: dict[str, str]
) -> Iterator[tuple[psutil.Process, int]]:
    """A server's process and port, once it says that it is ready."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        while said and said.strip()[:1] == "{" and not said.rstrip().endswith("}"):
            said += process.stdout.readline()
        if not said:
            raise SystemExit(f"`{command[0]}` ended with {process.wait()}")
        port = json.loads(said)["port"] if said[0] == "{" else int(said.rpartition(":")[2])
        yield psutil.Process(process.pid), port
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def cpu_seconds(process: psutil.Process) -> tuple[float, float]:
    """Of the process that serves HTTP, and of its children."""
    own, *others = (
        times.user + times.system
        for one in (process, *process.children(recursive=True))
        for times in (one.cpu_times(),)
    )
    return own, sum(others)


async def ask(port: int, number: int) -> Answered:
    """Stream one answer over a connection of its own."""
    content = f"Write a story about {number} singers in a town by the sea."
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    first: float | None = None
    usage: dict[str, Any] | None = None
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        if first is None and b'"content":"' in line and b'"content":""' not in line:
            first = time.perf_counter() - began
        if b'"usage":{' in line:
            usage = json.loads(line[6:])["usage"]
    writer.close()
    if first is None or usage is None or usage["completion_tokens"] != NEW_TOKENS:
        raise SystemExit(f"port {port}: an answer was cut short: {usage}")
    return Answered(
        first_seconds=first, num_tokens=NEW_TOKENS, num_prompt_tokens=usage["prompt_tokens"]
    )


async def load(port: int, *, clients: int, requests: Sequence[int]) -> list[Answered]:
    """`clients` at once, until all requests are answered."""
    waiting = iter(requests)

    async def work() -> list[Answered]:
        return [await ask(port, number) for number in waiting]

    done = await asyncio.gather(*(work() for _ in range(clients)))
    return [one for found in done for one in found]


def take_turn(
    process: psutil.Process, port: int, *, clients: int, requests: Sequence[int]
) -> dict[str, Any]:
    used, began = cpu_seconds(process), time.perf_counter()
    answered = asyncio.run(load(port, clients=clients, requests=requests))
    seconds, now = time.perf_counter() - began, cpu_seconds(process)
    return {
        "seconds": seconds,
        "own_cpu_seconds": now[0] - used[0],
        "cpu_seconds": sum(now) - sum(used),
        "first_seconds": [one.first_seconds for one in answered],
        "num_tokens": sum(one.num_tokens for one in answered),
        "num_prompt_tokens": sum(one.num_prompt_tokens for one in answered),
    }


def summarize(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    firsts = sorted(second for turn in turns for second in turn["first_seconds"])
    num_tokens = sum(turn["num_tokens"] for turn in turns)
    return {
        "tokens_per_second": round(num_tokens / sum(turn["seconds"] for turn in turns), 1),
        "tokens_per_second_by_turn": [
            round(turn["num_tokens"] / turn["seconds"], 1) for turn in turns
        ],
        "first_token_seconds_median": round(statistics.median(firsts), 4),
        "first_token_seconds_p95": round(firsts[min(len(firsts) * 95 // 100, len(firsts) - 1)], 4),
        "cpu_seconds_per_1000_tokens": round(
            1000 * sum(turn["cpu_seconds"] for turn in turns) / num_tokens, 2
        ),
        "of_them_outside_children": round(
            1000 * sum(turn["own_cpu_seconds"] for turn in turns) / num_tokens, 2
        ),
        "num_tokens": num_tokens,
        "num_prompt_tokens": sum(turn["num_prompt_tokens"] for turn in turns),
    }


def measure(file: Path, *, threads: int, rounds: int) -> list[dict[str, Any]]:
    words = [str(file), str(SLOTS), str(CONTEXT), str(threads)]
    ours = (
        f"-m tightfit serve {file} --port 0 --json --context {CONTEXT} --parallel {SLOTS}".split()
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    rows = []
    with ExitStack() as stack:
        servers = {
            "tightfit": stack.enter_context(serve([sys.executable, *ours], environment)),
            "llama.cpp": stack.enter_context(
                serve([sys.executable, "-c", LLAMA_SERVER, *words], environment)
            ),
        }
        for server in servers.values():
            take_turn(*server, clients=SLOTS, requests=range(SLOTS))
        number = 1000
        for clients, count in LOADS:
            turns: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
            for name in TURNS * rounds:
                number += count  # no prompt comes twice
                requests = range(number, number + count)
                turns[name].append(take_turn(*servers[name], clients=clients, requests=requests))
            found = {name: summarize(taken) for name, taken in turns.items()}
            mine, theirs = found["tightfit"], found["llama.cpp"]
            if mine["num_prompt_tokens"] != theirs["num_prompt_tokens"]:
                print("note: the servers' templates make prompts of different lengths")
            row = {
                "clients": clients,
                **found,
                "throughput_ratio": round(
                    mine["tokens_per_second"] / theirs["tokens_per_second"], 3
                ),
                "cpu_ratio": round(
                    mine["cpu_seconds_per_1000_tokens"] / theirs["cpu_seconds_per_1000_tokens"], 3
                ),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--check", action="store_true", help="read the committed result alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="of two turns for each server")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.check and not RESULT.exists():
        parser.error(f"there is no {RESULT.name} yet: name a GGUF file, on a machine that is idle")
    elif arguments.check:
        rows = json.loads(RESULT.read_text())["rows"]
    elif arguments.file is None:
        parser.error("name a GGUF file")
    else:
        rows = measure(arguments.file, threads=arguments.threads, rounds=arguments.rounds)
        write_result(
            arguments.out,
            "benchmarks/measure_llama_serving.py",
            xllamacpp=xllamacpp.__version__,
            file=arguments.file.name,
            num_cores=len(os.sched_getaffinity(0)),
            threads=arguments.threads,
            slots=SLOTS,
            context=CONTEXT,
            new_tokens=NEW_TOKENS,
            rows=rows,
        )
    dear = [row["clients"] for row in rows if row["cpu_ratio"] > HIGHEST_RATIO + NOISE]
    for clients in dear:
        print(f"error: more CPU seconds than llama.cpp's own server with {clients} clients")
    return 1 if dear else 0


if __name__ == "__main__":
    sys.exit(main())
