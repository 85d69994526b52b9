"""Measure what single kernels take on this machine's GPU: alone, and inside a training step.

    python benchmarks/measure_kernels.py --out kernels.json
    python benchmarks/measure_kernels.py --parts steps --jobs llama1b-full-keep,llama7b-lora-ckpt
    python benchmarks/measure_kernels.py --device cpu    (tiny, nothing that means anything)

`products`: large ones in bf16 after a rest and sustained, with the card's clock and power.
`traffic`: memory-bound kernels by kind. `host`: a tiny decoder layer, checkpointed or not.
`steps`: jobs of `_trace_jobs.py` for a few steps, and one step's device time by operation.

Needs torch, transformers and nvidia-ml-py, and what the jobs name. Every part and every job has a
process of its own, forked from one that has the libraries loaded: what one job patches, such as
Liger's kernels, must not reach the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _trace_jobs import SETS, Job
from measure_trace import (
    ALLOCATOR,
    describe_run,
    load_libraries,
    run_in_process,
    set_environment,
)

PARTS = ("products", "traffic", "host", "steps")
SECTIONS = (*PARTS, "ops")
"""Lists of rows in the output; `steps` fills two."""
JOBS = {job.name: job for jobs in SETS.values() for job in jobs}
Given = tuple[str, Job | None, str]
"""A part, its job if it is `steps`, and the device."""


def measure_part(given: Given) -> dict[str, Any]:
    """In the child: rows by section, or the error that prevented them."""
    import torch

    from tightfit.runtime.libraries import silence_libraries

    silence_libraries()
    part, job, place = given
    torch.set_num_threads(1 if place == "cpu" else 8)
    device = torch.device("cuda", 0) if place == "cuda" else torch.device("cpu")
    try:
        found: dict[str, Any] = {"status": "ok", "rows": _measure(part, job, device)}
        if place == "cuda":
            found["gpu"] = torch.cuda.get_device_name()
    except Exception as problem:  # the other parts are worth having without this one
        return {"status": "error", "fault": repr(problem)[:600]}
    return found


def _measure(part: str, job: Job | None, device: Any) -> dict[str, list[dict[str, Any]]]:
    if job is not None:
        from _kernel_steps import measure_steps

        return measure_steps(job, device)
    import _kernels

    measure = {
        "products": _kernels.measure_products,
        "traffic": _kernels.measure_traffic,
        "host": _kernels.measure_host,
    }[part]
    return {part: measure(device)}


def start(given: Given, *, can_fork: bool, timeout_seconds: float) -> dict[str, Any]:
    _, job, _ = given
    expands = job is None or job.expandable_segments
    os.environ[ALLOCATOR] = f"expandable_segments:{expands}"
    way = "fork" if can_fork else "spawn"
    return run_in_process(way, measure_part, given, timeout_seconds=timeout_seconds)


def write_document(path: Path, head: dict[str, Any], rows: dict[str, list[Any]]) -> None:
    """One line per field of the head, and one per row."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for section in SECTIONS:
        if rows.get(section):
            text = ",\n".join(f"  {json.dumps(row)}" for row in rows[section])
            lines.append(f" {json.dumps(section)}: [\n{text}\n ]")
    partial = path.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(path)


def summarize(section: str, row: dict[str, Any]) -> str | None:
    """A line to watch; operations have none."""
    if section == "products":
        shape = f"{row['tokens']}x{row['out']}x{row['in']}"
        rates = f"{row['rested_flops_per_second'] / 1e12:6.1f} after a rest, "
        rates += f"{row['sustained_flops_per_second'] / 1e12:6.1f} TFLOP/s sustained"
        return f"{shape:16} {row['values']:18} {rates}, {row['clock_mhz']} MHz"
    if section == "traffic":
        rates = f"{row['bytes_per_second'] / 1e12:6.3f} TB/s "
        rates += f"{row['values_per_second'] / 1e9:7.1f} G values/s"
        return f"{row['kind']:26} {row['shape']!s:20} {rates}"
    if section == "host":
        times = f"{1e3 * row['forward_seconds']:6.3f} ms forward "
        return f"{row['variant']:36} {times}{1e3 * row['backward_seconds']:6.3f} ms backward"
    if section == "steps":
        times = f"{row['step_seconds']:7.4f} s, device {row['device_seconds']:7.4f} s"
        rate = row["product_flops_per_second"]
        return f"{row['name']:32} {times}" + (f", products {rate / 1e12:.1f}" if rate else "")
    return None


def list_work(arguments: argparse.Namespace) -> list[Given]:
    names = arguments.jobs.split(",") if arguments.jobs else list(JOBS)
    work: list[Given] = []
    for part in arguments.parts.split(","):
        jobs = [JOBS[name] for name in names] if part == "steps" else [None]
        work += [(part, job, arguments.device) for job in jobs]
    return work


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--jobs", default="", help="names; all unless given")
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--job-seconds", type=float, default=120.0, help="end a part or job after")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts.split(",")) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if unknown := set(filter(None, arguments.jobs.split(","))) - set(JOBS):
        parser.error(f"unknown jobs: {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    set_environment()
    begin = time.perf_counter()
    head = describe_run()
    can_fork = load_libraries(arguments.device)
    words = [word.rpartition("/")[2] for word in sys.argv[1:]]
    head["commands"] = [" ".join(["python benchmarks/measure_kernels.py", *words])]
    rows: dict[str, list[Any]] = {}
    num_bad = num_left = 0
    for given in list_work(arguments):
        if time.perf_counter() - begin > arguments.seconds:
            num_left += 1
            continue
        answer = start(given, can_fork=can_fork, timeout_seconds=arguments.job_seconds)
        if answer["status"] != "ok":
            num_bad += 1
            print(given[0], given[1] and given[1].name, answer["status"], answer.get("fault", ""))
        with contextlib.suppress(KeyError):
            head["gpu"] = answer["gpu"]
        for section, found in answer.get("rows", {}).items():
            rows.setdefault(section, []).extend(found)
            lines = filter(None, (summarize(section, row) for row in found))
            print("\n".join(lines), end="\n" if section != "ops" else "", flush=True)
        write_document(arguments.out, head, rows)
    print(f"{time.perf_counter() - begin:.0f} s, {num_bad} failed, {num_left} left")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
