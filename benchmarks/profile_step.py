"""Profile one step of each job of the speed comparison: device time by part, with its limit.

    python benchmarks/profile_step.py --calibration calibration.json
    python benchmarks/profile_step.py --jobs 7b-lora,1b-full --out profile.json ...
    python benchmarks/profile_step.py --again profile.json ...    (its tables anew; nothing runs)
    python benchmarks/profile_step.py --device cpu ...    (tiny, nothing that means anything)

Each job runs as the first plan of `tightfit plan` for this machine says, with weights at random.
Idle is what steps without the profiler take beyond the kernels of the recorded one. Ceilings are
the calibration's: see `_step_parts.py`.

Needs torch, transformers, peft and nvidia-ml-py, and what the plans name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _step_parts import describe_parts, gather_facts, read_ceilings, render_parts
from _throughput_jobs import JOBS
from _trace_jobs import Job
from measure_kernels import start
from measure_trace import describe_run, load_libraries, set_environment
from tightfit.core.strategy import Strategy
from tightfit.hardware.calibration import Calibration
from tightfit.models.resolve import resolve_model

SOMEWHERE = "H200"
"""What is planned for where there is no GPU to plan for."""
DEFAULT_NAMES = tuple(name for name, job in JOBS.items() if not job.is_alpaca)
"""Rows are full: the length of each decides what attention costs."""
FP8, FP8_GRADIENTS = "fp8", "fp8_gradients"
"""Behind a dash and the name of a job, which is then asked to multiply so."""
NAMES = (
    *DEFAULT_NAMES,
    *(f"{name}-{FP8}" for name in DEFAULT_NAMES),
    *(f"{name}-{FP8_GRADIENTS}" for name in DEFAULT_NAMES if JOBS[name].method == "full"),
)


def ask_plan(name: str, device: str, *, is_traced: bool) -> Job:
    """The job as the planner would run it."""
    setting = next((one for one in (FP8, FP8_GRADIENTS) if name.endswith(f"-{one}")), None)
    asked = JOBS[name.removesuffix(f"-{setting}")]
    model = asked.model.rpartition("--")[2]
    words = [sys.executable, "-m", "tightfit", "plan", model, "--method", asked.method]
    words += ["--on", "here" if device == "cuda" else SOMEWHERE, "--top", "1", "--json"]
    words += ["--effective-batch", str(asked.num_rows), "--seq-len", str(asked.seq_len)]
    words += ["--trace"] * is_traced
    words += ["--set", f"{setting}=true"] if setting else []
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[2:])}: exit {done.returncode}\n{done.stderr[-2000:]}")
    plan = json.loads(done.stdout)["plans"][0]
    return Job(name=name, model=model, strategy=Strategy.model_validate(plan["strategy"]))


def profile_jobs(arguments: argparse.Namespace, document: dict[str, Any]) -> int:
    """Adds what each job showed, as it comes; how many failed or were left."""
    begin = time.perf_counter()
    set_environment()
    names = arguments.jobs.split(",")
    is_traced = not arguments.no_trace and arguments.device == "cuda"
    with ThreadPoolExecutor(1 if arguments.device == "cpu" else len(names)) as threads:
        jobs = list(
            threads.map(lambda name: ask_plan(name, arguments.device, is_traced=is_traced), names)
        )
    can_fork = load_libraries(arguments.device)
    print(f"{time.perf_counter() - begin:.0f} s until planned and loaded", flush=True)
    num_bad = 0
    for job in jobs:
        if time.perf_counter() - begin > arguments.seconds:
            num_bad += 1
            continue
        given = ("steps", job, arguments.device)
        answer = start(given, can_fork=can_fork, timeout_seconds=arguments.job_seconds)
        if answer["status"] != "ok":
            num_bad += 1
            print(job.name, answer["status"], answer.get("fault", ""), flush=True)
            continue
        document["gpu"] = answer.get("gpu")
        add_job(document, job, answer["rows"])
        print_summary(document, job.name)
        write_document(arguments.out, document)
    print(f"{time.perf_counter() - begin:.0f} s, {num_bad} failed or left")
    return num_bad


def add_job(document: dict[str, Any], job: Job, rows: dict[str, list[dict[str, Any]]]) -> None:
    report = job.strategy.model_dump(mode="json", exclude_defaults=True)
    document["jobs"].append({"name": job.name, "model": job.model, "strategy": report})
    document["steps"] += rows["steps"]
    document["ops"] += rows["ops"]


def find_parts(document: dict[str, Any], calibration: Calibration) -> list[dict[str, Any]]:
    """Of all jobs, from their operations."""
    rows = []
    for job, step in zip(document["jobs"], document["steps"], strict=True):
        facts = gather_facts(resolve_model(job["model"]), Strategy.model_validate(job["strategy"]))
        ops = [row for row in document["ops"] if row["job"] == job["name"]]
        rows += describe_parts(step, ops, facts, read_ceilings(calibration, facts))
    return rows


def print_summary(document: dict[str, Any], name: str) -> None:
    """Also settles the document's parts, which are read off its operations."""
    calibration = Calibration.model_validate(document["calibration"])
    document["parts"] = find_parts(document, calibration)
    (job,) = (job for job in document["jobs"] if job["name"] == name)
    (step,) = (step for step in document["steps"] if step["name"] == name)
    words = [f"{key}={value}" for key, value in job["strategy"].items()]
    print(f"\n{name}: {job['model']}, {step['step_seconds']:.4f} s a step; {' '.join(words)}")
    print(render_parts([row for row in document["parts"] if row["job"] == name]), flush=True)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """One line per field of the head, and one per row."""
    lines = []
    for key, value in document.items():
        is_rows = key in ("jobs", "steps", "parts", "ops")
        text = ",\n".join(f"  {json.dumps(row)}" for row in value) if is_rows else ""
        lines.append(f" {json.dumps(key)}: " + (f"[\n{text}\n ]" if is_rows else json.dumps(value)))
    partial = path.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calibration", type=Path, required=True, help="of this machine's GPU")
    parser.add_argument("--jobs", default=",".join(DEFAULT_NAMES), help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=Path("profile.json"))
    parser.add_argument("--again", type=Path, help="an earlier output, to be read anew")
    parser.add_argument("--no-trace", action="store_true", help="plan by closed forms, sooner")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--job-seconds", type=float, default=120.0, help="end a job after")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if unknown := set(arguments.jobs.split(",")) - set(NAMES):
        parser.error(f"unknown jobs: {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    calibration = json.loads(arguments.calibration.read_text())
    if arguments.again is not None:
        document = json.loads(arguments.again.read_text()) | {"calibration": calibration}
        for job in document["jobs"]:
            print_summary(document, job["name"])
        write_document(arguments.again, document)
        return 0
    head = describe_run()
    words = [word.rpartition("/")[2] for word in sys.argv[1:]]
    head["commands"] = [" ".join(["python benchmarks/profile_step.py", *words])]
    sections: dict[str, list[Any]] = {"jobs": [], "parts": [], "steps": [], "ops": []}
    document = head | {"calibration": calibration, **sections}
    return int(profile_jobs(arguments, document) > 0)


if __name__ == "__main__":
    sys.exit(main())
