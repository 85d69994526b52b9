"""How long tracing a 7B job takes, and what memory the tracer itself needs.

    python benchmarks/measure_trace_speed.py                # five runs of each, and the result file
    python benchmarks/measure_trace_speed.py --runs 1 --only lora --out speed.json

Each run is a process that starts cold, with an empty cache. `tracer` is the process that `--trace`
starts, from its start to its end; `command` is `tightfit estimate --trace`, which traces what would
lower the peak as well; `plan` looks for the fewest recomputed layers that fit. CPU seconds are of
all processes, memory is of the largest one. Seconds depend on what else the machine does: the
fastest run says most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _provenance import provenance
from tightfit.core.strategy import Strategy
from tightfit.hardware.catalogue import find_gpu
from tightfit.models.catalogue import read_source_config
from tightfit.models.resolve import resolve_model
from tightfit.trace.tracer import list_versions
from tightfit.training.tracing.job import TraceJob

RESULT = Path(__file__).resolve().parent / "results" / "trace_speed.json"
MODEL, CARD = "Llama-2-7b-hf", "H200"
KIB, MIB = 2**10, 2**20
NUM_RUNS = 5
_LORA: dict[str, Any] = {"method": "lora", "micro_batch": 2, "seq_len": 1024}

TRACED: dict[str, tuple[dict[str, Any], bool]] = {
    "lora": (_LORA, False),
    "qlora": ({**_LORA, "weights": "nf4"}, False),
    "full": ({"method": "full", "micro_batch": 1, "seq_len": 1024}, False),
    "lora-32-micro-batches": ({**_LORA, "grad_accum": 32}, False),
    "lora-all-layers": (_LORA, True),
}
"""By name: the strategy, and whether every layer runs."""
COMMANDS: dict[str, list[str]] = {
    "command": ["estimate", MODEL, "--on", CARD, "--trace", "--json"],
    "plan": ["plan", "Llama-3.1-8B", "--on", "RTX-4090", "--top", "1", "--trace", "--json"],
}


def make_question(strategy: dict[str, Any], *, is_full_depth: bool) -> str:
    """The line that the tracer reads."""
    config = read_source_config(resolve_model(MODEL))
    assert config is not None, MODEL
    job = TraceJob(
        config=config,
        strategy=Strategy.model_validate(strategy),
        compute_capability=find_gpu(CARD).compute_capability,
        is_full_depth=is_full_depth,
    )
    return json.dumps(job.model_dump(mode="json")) + "\n"


def run_once(name: str) -> dict[str, Any]:
    """Seconds, CPU seconds and memory of one cold run, and what it answered."""
    words, question = ["tightfit.training.tracing.worker"], ""
    if name in TRACED:
        strategy, is_full_depth = TRACED[name]
        question = make_question(strategy, is_full_depth=is_full_depth)
    else:
        words = ["tightfit", *COMMANDS[name]]
    with tempfile.TemporaryDirectory() as folder:
        given, answer, complaints = (Path(folder, part) for part in ("in", "out", "err"))
        given.write_text(question)
        environment = {"TIGHTFIT_CACHE": folder, "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with given.open() as stdin, answer.open("w") as stdout, complaints.open("w") as stderr:
            start = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **environment},
            )
            _, status, used = os.wait4(process.pid, 0)  # with all that it waited for itself
            seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        said = json.loads(answer.read_text() or "{}")
    if process.returncode or (traced := find_traced(said)) is None:
        raise SystemExit(f"{name} was not traced: {said.get('problem') or process.returncode}")
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "memory_bytes": used.ru_maxrss * KIB,
        **traced,
    }


def find_traced(said: dict[str, Any]) -> dict[str, Any] | None:
    """What a tracer, an estimate or a plan tells of its first trace; None where there is none."""
    if "plans" in said:
        estimate = said["plans"][0]["estimate"]
        report = {"num_traced_layers": None, **estimate["gpu"]}
        traced = report if estimate["tier"] == "traced" else None
    else:
        traced = said.get("traced") or said.get("trace")
    names = ("num_traced_layers", "peak_allocated_bytes")
    return None if traced is None else {name: traced[name] for name in names}


def measure(name: str, num_runs: int) -> dict[str, Any]:
    runs = [run_once(name) for _ in range(num_runs)]
    seconds = [run["seconds"] for run in runs]
    row = {
        "name": name,
        "strategy": TRACED[name][0] if name in TRACED else " ".join(COMMANDS[name]),
        "num_traced_layers": runs[0]["num_traced_layers"],
        "peak_allocated_bytes": runs[0]["peak_allocated_bytes"],
        "min_seconds": min(seconds),
        "median_seconds": round(statistics.median(seconds), 2),
        "min_cpu_seconds": min(run["cpu_seconds"] for run in runs),
        "peak_memory_bytes": max(run["memory_bytes"] for run in runs),
        "seconds": seconds,
    }
    print(
        f"{name:22} {row['min_seconds']:6.1f} s fastest  {row['median_seconds']:6.1f} s median  "
        f"{row['min_cpu_seconds']:6.1f} s CPU  {row['peak_memory_bytes'] / MIB:6.0f} MiB",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    names = [name for name in (*TRACED, *COMMANDS) if arguments.only in name]
    result = {
        **provenance("benchmarks/measure_trace_speed.py"),
        "num_cores": len(os.sched_getaffinity(0)),
        "versions": list_versions(),
        "model": MODEL,
        "gpu": CARD,
        "num_runs": arguments.runs,
        "rows": [measure(name, arguments.runs) for name in names],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
