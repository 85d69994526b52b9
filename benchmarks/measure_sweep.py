"""Measure every legal setting of the levers on this machine, and hold the first plan against them.

    tightfit calibrate
    python benchmarks/measure_sweep.py --out sweep.json --seconds 250
    python benchmarks/measure_sweep.py --resume sweep.json --seconds 250    (what is missing)
    python benchmarks/measure_sweep.py --device cpu ...    (tiny, nothing that means anything)

Needs a GPU, and what the plans need; rates are those of the stored calibration. `_sweep_plans.py`
lists the plans of all jobs at once. The first plan of each job is measured first and again at the
end, which shows the drift; between them the jobs take turns, fastest predicted first. What is
predicted to take more than `--within` times as long as the job's fastest is listed, not measured.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _sweep_order import Row, Turn, list_missing, must_stop, order_turns
from _throughput_jobs import JOBS
from _trace_jobs import Job
from measure_trace import (
    ALLOCATOR,
    describe_run,
    load_libraries,
    run_in_process,
    set_environment,
)
from tightfit.core.files import write_atomic
from tightfit.core.optimizers import Optimizer
from tightfit.core.strategy import Strategy

SOMEWHERE = "H200"
"""What is planned for where there is no GPU to plan for."""
NAMES = ("7b-lora", "1b-full", "7b-full", "8b-lora", "7b-qlora")
LEFT_OUT = (
    "offload, ZeRO and FSDP on one GPU: they are for what does not fit",
    "micro-batches other than the fastest predicted of each setting",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One plan to run in a process of its own."""

    job: Job
    device: str
    num_warm_up: int
    num_steps: int


def start_planning(names: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Processes that list the plans, by job: they take as long as loading the libraries."""
    words = [sys.executable, str(Path(__file__).with_name("_sweep_plans.py"))]
    words += ["--on", "here" if arguments.device == "cuda" else SOMEWHERE]
    words += ["--no-trace"] * arguments.no_trace
    words += ["--every-micro-batch"] * arguments.every_micro_batch
    return {
        name: subprocess.Popen([*words, name], stdout=subprocess.PIPE, text=True) for name in names
    }


def gather_plans(started: dict[str, Any]) -> Row:
    """The plans of all jobs. One that cannot be planned ends the sweep: it would go unseen."""
    plans: list[Row] = []
    is_calibrated = True
    for name, process in started.items():
        printed, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{name} could not be planned: exit {process.returncode}")
        found = json.loads(printed)
        plans += found["plans"]
        is_calibrated = is_calibrated and found["is_calibrated"]
    return {"is_calibrated": is_calibrated, "plans": plans}


def measure_plan(turn: Turn, arguments: argparse.Namespace, *, can_fork: bool) -> Row:
    """The plan's row: predicted and measured, or why nothing was measured."""
    when, plan = turn
    task = Task(
        job=Job(
            name=f"{plan['job']} {plan['rank']}",
            model=plan["model"],
            strategy=Strategy.model_validate(plan["strategy"]),
        ),
        device=arguments.device,
        num_warm_up=arguments.warm_up,
        num_steps=arguments.steps,
    )
    os.environ[ALLOCATOR] = f"expandable_segments:{task.job.expandable_segments}"
    way = "fork" if can_fork else "spawn"
    answer = run_in_process(way, attempt, task, timeout_seconds=arguments.job_seconds)
    return {"when": when, **plan, **answer}


def attempt(task: Task) -> Row:
    """`run_steps`, with its faults as part of the answer."""
    import torch

    from tightfit.runtime.libraries import is_out_of_memory

    torch.set_num_threads(1 if task.device == "cpu" else 8)
    try:
        return {"status": "ok", **run_steps(task)}
    except Exception as problem:
        status = "out of memory" if is_out_of_memory(problem) else "error"
        return {"status": status, "fault": f"{type(problem).__name__}: {problem}"[:600]}


def run_steps(task: Task) -> Row:
    import torch

    from _trace_build import write_config
    from _trace_job import Run

    is_tiny = task.device == "cpu"
    device = torch.device("cpu") if is_tiny else torch.device("cuda", 0)
    job = shrink(task.job) if is_tiny else task.job
    if not is_tiny:
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as name:
        write_config(job, Path(name), is_tiny=is_tiny)
        run = Run(job, device, Path(name))
        run.gauge.begin()
        count = task.num_warm_up + task.num_steps
        seconds = [run.step(number)["seconds"] for number in range(1, count + 1)]
        peaks = run.gauge.end()
    return {
        **summarize_steps(seconds, num_warm_up=task.num_warm_up),
        "peak_allocated_bytes": peaks["peak_allocated_bytes"],
        "peak_reserved_bytes": peaks["peak_reserved_bytes"],
        "num_alloc_retries": run.gauge.read("num_alloc_retries"),
        "gpu": run.gauge.describe().get("gpu"),
    }


def shrink(job: Job) -> Job:
    """What a CPU can run of it: a paged optimizer needs a GPU too."""
    from _trace_build import shrink_job

    changes = shrink_job(job.strategy)
    if job.strategy.optimizer is Optimizer.ADAMW_PAGED_8BIT:
        changes["optimizer"] = Optimizer.ADAMW
    return replace(job, strategy=job.strategy.model_copy(update=changes))


def summarize_steps(seconds: list[float], *, num_warm_up: int) -> Row:
    """The median after the warm-up; the spread is from the fastest to the slowest, of it."""
    settled = seconds[num_warm_up:]
    middle = statistics.median(settled)
    return {
        "step_seconds": middle,
        "spread_fraction": round((max(settled) - min(settled)) / middle, 4),
        "all_step_seconds": [round(value, 5) for value in seconds],
    }


def write_document(path: Path, document: Row) -> None:
    """One line per field of the head, and one per plan and row."""
    lines = []
    for key, value in document.items():
        is_table = key in ("plans", "rows")
        text = ",\n".join(f"  {json.dumps(row)}" for row in value) if is_table else ""
        body = f"[\n{text}\n ]" if is_table else json.dumps(value)
        lines.append(f" {json.dumps(key)}: {body}")
    write_atomic(path, "{\n" + ",\n".join(lines) + "\n}\n")


def open_document(arguments: argparse.Namespace) -> tuple[Row, bool]:
    """The head with plans and rows, new or resumed; and whether a GPU's process can be forked."""
    words = [word.rpartition("/")[2] for word in sys.argv[1:]]
    command = " ".join(["python benchmarks/measure_sweep.py", *words])
    earlier = json.loads(arguments.resume.read_text()) if arguments.resume else None
    started = {} if earlier else start_planning(arguments.jobs.split(","), arguments)
    can_fork = load_libraries(arguments.device)
    if earlier:
        commands = [*earlier["commands"], command]
        return earlier | {"commands": commands, "within": arguments.within}, can_fork
    head = describe_run() | {"commands": [command], "within": arguments.within}
    head["num_warm_up"] = arguments.warm_up
    head["left_out"] = list(LEFT_OUT[: 1 if arguments.every_micro_batch else 2])
    return head | gather_plans(started) | {"rows": []}, can_fork


def sweep(arguments: argparse.Namespace) -> int:
    """How many plans failed or were left."""
    begin = time.perf_counter()
    set_environment()
    document, can_fork = open_document(arguments)
    rows: list[Row] = document["rows"]
    wanted = [plan for plan in document["plans"] if plan["job"] in arguments.jobs.split(",")]
    turns = order_turns(wanted, within=arguments.within, is_compiled_last=arguments.compiled_last)
    turns = list_missing(turns, rows)
    write_document(arguments.out, document)
    took = time.perf_counter() - begin
    print(f"{took:.0f} s until planned and loaded, {len(turns)} to measure", flush=True)
    num_bad = 0
    for turn in turns:
        seconds_left = arguments.seconds - (time.perf_counter() - begin)
        if must_stop(turn[0], rows, seconds_left=seconds_left):
            num_bad += 1
            continue
        row = measure_plan(turn, arguments, can_fork=can_fork)
        num_bad += row["status"] != "ok"
        rows.append(row)
        write_document(arguments.out, document)
        print(describe_row(row), flush=True)
    print(f"{time.perf_counter() - begin:.0f} s, {num_bad} failed or left")
    return num_bad


def describe_row(row: Row) -> str:
    start = f"{row['wall_seconds']:5.1f} s wall  {row['job']:9} {row['rank']:3} {row['when']:5}"
    if row["status"] != "ok":
        return f"{start}  {row['status']}: {row.get('fault', '').partition(chr(10))[0][:120]}"
    return (
        f"{start}  predicted {row['predicted_seconds']:.4f} s, measured {row['step_seconds']:.4f} s"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", default=",".join(NAMES), help="names, comma-separated")
    parser.add_argument("--out", type=Path, help="[default: the resumed file, else sweep.json]")
    parser.add_argument("--resume", type=Path, help="an earlier output; its plans are kept")
    parser.add_argument("--within", type=float, default=1.5, help="times the fastest predicted")
    parser.add_argument("--warm-up", type=int, default=3, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=10, help="steps that do")
    parser.add_argument("--compiled-last", action="store_true", help="compiling takes long")
    parser.add_argument("--every-micro-batch", action="store_true", help="not the fastest alone")
    parser.add_argument("--no-trace", action="store_true", help="plan by closed forms, sooner")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all together")
    parser.add_argument("--job-seconds", type=float, default=120.0, help="end a plan after")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if unknown := set(arguments.jobs.split(",")) - set(JOBS):
        parser.error(f"unknown jobs: {', '.join(sorted(unknown))}")
    if arguments.steps < 1 or arguments.warm_up < 0:
        parser.error("--steps 1 or more, --warm-up 0 or more")
    if arguments.resume and not arguments.resume.is_file():
        parser.error(f"nothing to resume at {arguments.resume}")
    arguments.out = arguments.out or arguments.resume or Path("sweep.json")
    return arguments


if __name__ == "__main__":
    sys.exit(int(sweep(parse_arguments()) > 0))
