"""Measure the plans that `tightfit plan` puts first on this machine, one after another.

    tightfit calibrate
    python benchmarks/measure_plans.py --out plans.json

Needs a GPU, and what the plans need. Each model is planned as a user would plan it, traces and
stored calibration included; then each of the first five plans takes a few steps.
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

from _trace_jobs import Job
from measure_trace import Runner, describe_run, load_libraries, set_environment
from tightfit.core.strategy import Strategy

NUM_PLANS = 5
QUESTIONS: dict[str, tuple[str, ...]] = {
    "7B LoRA": ("Llama-2-7b-hf", "--method", "lora"),
    "1B full": ("Llama-3.2-1B", "--method", "full"),
    "7B Qwen": ("Qwen2.5-7B",),
}
"""Options of `plan` other than the hardware."""
COMMON = ("--on", "here", "--effective-batch", "8", "--seq-len", "2048")


def ask(words: tuple[str, ...]) -> list[dict[str, Any]]:
    """The first plans, as `tightfit plan --json` gives them."""
    command = [sys.executable, "-m", "tightfit", "plan", *words, *COMMON, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plans: list[dict[str, Any]] = json.loads(done.stdout)["plans"]
    return plans[:NUM_PLANS]


def measure_plan(runner: Runner, name: str, model: str, plan: dict[str, Any]) -> dict[str, Any]:
    from _trace_job import Request

    job = Job(name=name, model=model, strategy=Strategy.model_validate(plan["strategy"]))
    report = plan["estimate"]["time"]
    answer = runner.run(Request(job=job, modes=("measure",), device="cuda"))
    found = answer.get("measure", {})
    return {
        "name": name,
        "model": model,
        "strategy": job.strategy.model_dump(mode="json", exclude_defaults=True),
        "tier": report["tier"],
        "predicted_seconds": report["seconds_per_step"],
        "predicted_reserved_bytes": plan["estimate"]["gpu"]["peak_reserved_bytes"],
        "status": answer["status"],
        "step_seconds": found.get("step_seconds"),
        "all_step_seconds": found.get("all_step_seconds"),
        "peak_reserved_bytes": found.get("peak_reserved_bytes"),
        "fault": answer.get("fault", "").partition("\n")[0][:200],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    arguments = parser.parse_args()
    start = time.perf_counter()
    set_environment()
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        asked = dict(zip(QUESTIONS, threads.map(ask, QUESTIONS.values()), strict=True))
    runner = Runner(can_fork=load_libraries("cuda"), timeout_seconds=120)
    rows: list[dict[str, Any]] = []
    for question, plans in asked.items():
        for rank, plan in enumerate(plans, start=1):
            if time.perf_counter() - start > arguments.seconds:
                continue
            model = QUESTIONS[question][0]
            row = measure_plan(runner, f"{question} {rank}", model, plan)
            rows.append({"question": question, "rank": rank, **row})
            print(question, rank, row["predicted_seconds"], row["step_seconds"], flush=True)
            document = describe_run() | {"common": " ".join(COMMON), "plans": rows}
            document["commands"] = [f"python benchmarks/measure_plans.py {' '.join(sys.argv[1:])}"]
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
