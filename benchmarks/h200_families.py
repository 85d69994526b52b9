"""The planner's first plan of many families on one H200, as `tightfit bench` measured it.

    python benchmarks/h200_families.py --run FOLDER       # on the GPU: a report per job in FOLDER
    python benchmarks/h200_families.py --collect FOLDER   # from reports to the result file
    python benchmarks/h200_families.py                    # the table of docs/speed.md

Weights are drawn. A report that is in FOLDER already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from _provenance import write_result
from tightfit.core.units import GIB

RESULT = Path(__file__).parent / "results" / "h200_families.json"
HARDWARE = "H200-SXM"


class Job(NamedTuple):
    """What is planned and measured."""

    model: str
    method: str
    num_rows: int
    seq_len: int


JOBS = {
    "gptoss": Job("gpt-oss-20b", "lora", 4, 2048),
    "qwen3moe": Job("Qwen3-30B-A3B", "lora", 4, 2048),
    "gemma2": Job("gemma-2-2b", "lora", 8, 2048),
    "gemma3": Job("gemma-3-4b-it", "lora", 4, 2048),
    "mistral8k": Job("Mistral-7B-v0.1", "lora", 2, 8192),
    "qwen34": Job("Qwen3-4B", "lora", 4, 4096),
    "falcon": Job("falcon-7b", "lora", 4, 2048),
    "phi2": Job("phi-2", "lora", 8, 2048),
    "phi3": Job("Phi-3-mini-4k-instruct", "full", 4, 2048),
    "bloom": Job("bloom-1b7", "full", 8, 1024),
    "pythia": Job("pythia-1.4b", "full", 16, 2048),
}


def run(folder: Path) -> int:
    """Measure what has no report yet; the number of jobs that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for name, job in JOBS.items():
        report, plan = folder / f"{name}.json", folder / f"{name}.plan.json"
        if report.is_file():
            continue
        tightfit = [sys.executable, "-m", "tightfit"]
        sizes = ["--seq-len", str(job.seq_len), "--effective-batch", str(job.num_rows)]
        fixed = ["--set", "weights=bf16"] if job.method == "full" else []
        words = ["--method", job.method, *sizes, *fixed, "--on", HARDWARE, "--save", str(plan)]
        planned = subprocess.run([*tightfit, "plan", job.model, *words], check=False)
        steps = ["--random-weights", "--steps", "6", "--warm-up", "3", "--out", str(report)]
        done = planned.returncode or subprocess.call([*tightfit, "bench", str(plan), *steps])
        num_failed += done != 0
    return num_failed


def read_report(name: str, path: Path) -> dict[str, Any]:
    """One row of the result, from a report of `tightfit bench`."""
    report = json.loads(path.read_text())
    [trial] = report["trials"]
    errors = {row["name"]: row["error_percent"] / 100 for row in trial["compared"]}
    values = {row["name"]: row["measured"] for row in trial["compared"]}
    return {
        **JOBS[name]._asdict(),
        "date": report["date"],
        "hardware": report["hardware"],
        "plan": trial["description"],
        "tier": trial["tier"],
        "tokens_per_second": round(trial["measured"]["tokens_per_second"]),
        "mfu_fraction": round(trial["measured"]["mfu_fraction"], 4),
        "allocated_bytes": values["GPU memory, allocated"],
        "allocated_error": round(errors["GPU memory, allocated"], 4),
        "reserved_error": round(errors["GPU memory, reserved"], 4),
        "seconds_error": round(errors["time per step"], 4),
    }


def collect(folder: Path) -> None:
    reports = {name: folder / f"{name}.json" for name in JOBS}
    rows = [read_report(name, path) for name, path in reports.items() if path.is_file()]
    traced = [abs(row["allocated_error"]) for row in rows if row["tier"] == "traced"]
    total = {
        "jobs": len(rows),
        "traced": len(traced),
        "worst_traced_allocated_error": max(traced),
        "median_seconds_error": statistics.median(abs(row["seconds_error"]) for row in rows),
    }
    write_result(RESULT, "benchmarks/h200_families.py", total=total, rows=rows)


def render(rows: list[dict[str, Any]]) -> str:
    """As docs/speed.md has it."""
    lines = [
        "| job | first plan | tokens/s | MFU | memory | predicted memory, time |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        plan = ", ".join(row["plan"].split(", ")[5:]) or "plain"
        name = f"{row['model']} {row['method']}, {row['num_rows']} x {row['seq_len']:,}"
        memory = f"{row['allocated_bytes'] / GIB:.1f} GiB"
        errors = f"{row['allocated_error']:+.1%}, {row['seconds_error']:+.1%}"
        speed, mfu = f"{row['tokens_per_second']:,}", f"{row['mfu_fraction']:.2f}"
        lines.append(f"| {name} | {plan} | {speed} | {mfu} | {memory} | {errors} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="measure on this GPU")
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="write the result file")
    arguments = parser.parse_args()
    if arguments.run is not None:
        return run(arguments.run)
    if arguments.collect is not None:
        collect(arguments.collect)
    print(render(json.loads(RESULT.read_text())["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
