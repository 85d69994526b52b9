"""Trace the jobs that `measure_trace.py` measures, as `tightfit estimate --trace` would.

    python benchmarks/predict_trace.py --set held-out --out predicted.json --capacities caps.json

Needs torch, transformers, peft and what the jobs name; no GPU. What a step allocates depends on
the libraries' versions, so this runs best where the jobs are measured. `--capacities` maps names
to the bytes that torch may reserve, for `measure_trace.py --modes cap`. The operations of each
step go to a file beside the output, so that its time can be told from them later.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from _provenance import provenance
from _trace_jobs import SETS, Job, list_micro_batches
from tightfit.models.catalogue import read_source_config
from tightfit.models.resolve import resolve_model
from tightfit.trace.tracer import Tracer, TraceResponse, list_versions
from tightfit.training.tracing.job import Document, TraceJob

WORKER = "tightfit.training.tracing.worker"
H200 = (9, 0)


def describe(job: Job) -> TraceJob:
    """Micro-batches of one step are all of one shape, so the first represents all."""
    first = list_micro_batches(job)[0]
    rows = tuple(
        tuple(Document(num_tokens=row.num_tokens, num_prompt=row.num_prompt) for row in sequence)
        for sequence in first
    )
    config = read_source_config(resolve_model(job.model))
    assert config is not None, f"{job.model} is in the catalogue"
    return TraceJob(
        config=config,
        strategy=job.strategy,
        compute_capability=H200,
        rows=rows,
        stages=(),
        random_weights=True,
        expandable_segments=job.expandable_segments,
    )


def trace_all(jobs: list[Job], num_processes: int) -> list[TraceResponse]:
    """A tracer's libraries take longest to load, so each tracer gets several jobs."""
    tracer = Tracer(module=WORKER, uses_cache=False)
    shares = [jobs[first::num_processes] for first in range(num_processes)]

    def ask(share: list[Job]) -> list[TraceResponse]:
        return tracer.ask([describe(job).model_dump(mode="json") for job in share])

    with ThreadPoolExecutor(num_processes) as threads:
        answers = dict(
            zip(_names(shares), chain.from_iterable(threads.map(ask, shares)), strict=True)
        )
    return [answers[job.name] for job in jobs]


def _names(shares: list[list[Job]]) -> list[str]:
    return [job.name for share in shares for job in share]


def summarize(job: Job, answer: TraceResponse) -> dict[str, Any]:
    traced = answer.traced
    if traced is None:
        return {"name": job.name, "problem": answer.problem}
    return {
        "name": job.name,
        "peak_allocated_bytes": traced.peak_allocated_bytes,
        "peak_reserved_bytes": traced.peak_reserved_bytes,
        "smallest_capacity_bytes": traced.smallest_capacity_bytes,
        "stages": {stage.name: stage.peak_allocated_bytes for stage in traced.stages},
        "num_traced_layers": traced.num_traced_layers,
        "num_layers": traced.num_layers,
        "refusal": traced.refusal,
        "trace_seconds": round(traced.seconds, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", choices=list(SETS), default="dev")
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs with this in their name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--capacities", type=Path)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    arguments = parser.parse_args()
    jobs = [job for job in SETS[arguments.set] if arguments.only in job.name]
    answers = trace_all(jobs, min(arguments.processes, len(jobs)))
    rows = [summarize(job, answer) for job, answer in zip(jobs, answers, strict=True)]
    head = provenance("benchmarks/predict_trace.py") | {"versions": list_versions()}
    arguments.out.write_text(json.dumps({**head, "jobs": rows}, indent=1) + "\n")
    operations = arguments.out.with_name(arguments.out.stem + "_operations.jsonl.gz")
    with gzip.open(operations, "wt", encoding="utf-8") as file:
        for job, answer in zip(jobs, answers, strict=True):
            if answer.operations is not None:
                log = answer.operations.model_dump(mode="json", exclude_defaults=True)
                file.write(json.dumps({"name": job.name, "log": log}) + "\n")
    if arguments.capacities is not None:
        known = {row["name"]: row["smallest_capacity_bytes"] for row in rows if len(row) > 2}
        arguments.capacities.write_text(json.dumps(known))
    problems = [f"{row['name']}: {row['problem']}" for row in rows if "problem" in row]
    print("\n".join(problems) or f"{len(rows)} jobs traced")
    return 0


if __name__ == "__main__":
    sys.exit(main())
