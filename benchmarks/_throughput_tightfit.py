"""tightfit as a user starts it: a plain recipe without one switch of performance."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from _throughput_clock import summarise
from _throughput_jobs import LEARNING_RATES, LORA_ALPHA, LORA_RANK, NUM_WARM_UP, SEED, Job


def make_recipe(
    job: Job, *, folder: Path, data: Path, run: Path, device: str, num_steps: int
) -> dict[str, Any]:
    """What is learnt is fixed, as for all frameworks; the planner chooses how it runs."""
    recipe: dict[str, Any] = {
        "model": str(folder),
        "data": str(data),
        "on": "cpu" if device == "cpu" else "here",
        "method": job.method,
        "seq_len": job.seq_len,
        "effective_batch": job.num_rows,
        "max_steps": NUM_WARM_UP + num_steps,
        "learning_rate": LEARNING_RATES[job.method],
        "schedule": "constant",
        "warmup_fraction": 0.0,
        "seed": SEED,
        "shuffle": False,
        "keep_checkpoints": 0,
        "log_to": [],
        "random_weights": True,
        "output": str(run),
    }
    if job.objective != "sft":
        recipe |= {"objective": job.objective, "template": "plain"}
    if job.has_adapters:
        recipe["lora"] = {"rank": LORA_RANK, "alpha": LORA_ALPHA, "targets": ["all-linear"]}
    return recipe


def train_command(recipe: Path, job: Job) -> list[str]:
    limit = ["--memory-limit", job.memory_limit] if job.memory_limit else []
    return [sys.executable, "-m", "tightfit", "train", str(recipe), "--json", *limit]


def read_run(run: Path, *, device: str) -> dict[str, Any]:
    """The run's own record of its steps, and the plan it ran by."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["kind"] == "step"]
    measured = steps[NUM_WARM_UP:]
    found = summarise(
        [row["seconds"] for row in measured],
        [row["num_trained_tokens"] for row in measured],
        [row["loss"] for row in steps],
    )
    if device != "cpu":
        found["peak_allocated_bytes"] = max(row["gpu_allocated_bytes"] for row in steps)
        found["peak_reserved_bytes"] = max(row["gpu_reserved_bytes"] for row in steps)
    plan = json.loads((run / "plan.json").read_text())
    report = json.loads((run / "report.json").read_text())
    return found | {
        "plan": report["strategy"],
        "plan_changes": report["plan_changes"],
        "mfu_fraction": report["mfu_fraction"],
        "tier": plan["estimate"]["time"]["tier"],
        "switches": plan["strategy"],
        "predicted_seconds": plan["estimate"]["time"]["seconds_per_step"],
        "compared": report["compared"],
    }
