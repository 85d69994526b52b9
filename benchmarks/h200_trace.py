"""The traced tier against the card: jobs that nobody looked at while it was built.

    .venv/bin/python benchmarks/h200_trace.py            # table, and the result file
    .venv/bin/python benchmarks/h200_trace.py --check    # fails if it got worse

`predict_trace.py` traced the jobs and `measure_trace.py` ran them, both with the libraries of one
machine with an H200. Memory is judged by one set of jobs; their times were looked at while step
times were learnt, so those are judged by another, on a machine whose rates `tightfit calibrate` had
measured just before. `measure_plans.py` ran the plans that come first there. What is computed here
anew are the seconds of a step, from its operations.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _provenance import check_total, write_result
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB
from tightfit.hardware.calibration import Calibration
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Gpu
from tightfit.trace.result import OperationLog
from tightfit.trace.traced_time import estimate_traced_time

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "h200_trace_held_out.json"
PREDICTED = RESULTS / "h200_trace_predicted.json"
TIMED = RESULTS / "h200_trace_timed.json"
TIMED_PREDICTED = RESULTS / "h200_trace_timed_predicted.json"
OPERATIONS = RESULTS / "h200_trace_timed_predicted_operations.jsonl.gz"
CALIBRATION = RESULTS / "h200_calibration.json"
PLANS = RESULTS / "h200_plans.json"
RESULT = RESULTS / "h200_trace.json"
NOISE = 0.0005
CLOSE = 0.10


def read_jobs(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())["jobs"]}


def read_logs() -> dict[str, OperationLog]:
    with gzip.open(OPERATIONS, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return {row["name"]: OperationLog.model_validate(row["log"]) for row in rows}


def compare(job: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """One job's memory; errors are of the prediction, too low below zero."""
    measured = job["measure"]
    surviving = job.get("surviving_again", job["surviving"])["smallest_surviving_bytes"]
    capacity = predicted["smallest_capacity_bytes"]
    return {
        "name": job["name"],
        "allocated_bytes": measured["peak_allocated_bytes"],
        "allocated_error": _error(predicted, measured, "peak_allocated_bytes"),
        "reserved_error": _error(predicted, measured, "peak_reserved_bytes"),
        "capacity_bytes": surviving,
        "capacity_error": round(capacity / surviving - 1, 5),
        "survived_at_first": job["cap"]["has_survived"],
        "survived": job.get("cap_after_change", job["cap"])["has_survived"],
    }


def compare_time(
    job: dict[str, Any], predicted: dict[str, Any], log: OperationLog, gpu: Gpu
) -> dict[str, Any]:
    """One job's step time and its peak, both held out."""
    measured = job["measure"]
    seconds = estimate_traced_time(log, gpu, read_strategy(job)).seconds_per_step
    return {
        "name": job["name"],
        "allocated_error": _error(predicted, measured, "peak_allocated_bytes"),
        "reserved_error": _error(predicted, measured, "peak_reserved_bytes"),
        "step_seconds": round(measured["step_seconds"], 4),
        "predicted_seconds": round(seconds, 4),
        "seconds_error": round(seconds / measured["step_seconds"] - 1, 4),
    }


def compare_times() -> tuple[list[dict[str, Any]], list[str]]:
    """Jobs that were traced and ran; and the names of those of which one is missing."""
    measured, predicted, logs = read_jobs(TIMED), read_jobs(TIMED_PREDICTED), read_logs()
    calibration = Calibration.model_validate_json(CALIBRATION.read_text())
    gpu = calibration.apply(find_gpu("H200"))
    whole = [name for name, job in measured.items() if "measure" in job and name in logs]
    rows = [compare_time(measured[name], predicted[name], logs[name], gpu) for name in whole]
    return rows, [name for name in predicted if name not in whole]


def _error(predicted: dict[str, Any], measured: dict[str, Any], name: str) -> float:
    return round(float(predicted[name] / measured[name]) - 1, 5)


def read_strategy(job: dict[str, Any]) -> Strategy:
    return Strategy.model_validate(job["strategy"])


def compare_plans() -> list[dict[str, Any]]:
    """Per question: the plan that comes first, and the fastest of those that ran."""
    rows = json.loads(PLANS.read_text())["plans"]
    found = []
    for question in dict.fromkeys(row["question"] for row in rows):
        ran = [row for row in rows if row["question"] == question and row["step_seconds"]]
        first = next(row for row in ran if row["rank"] == 1)
        best = min(ran, key=lambda row: row["step_seconds"])
        slower = first["step_seconds"] / best["step_seconds"] - 1
        found.append({"question": question, "num_ran": len(ran), "slower": round(slower, 4)})
    return found


def sum_up(
    rows: list[dict[str, Any]], times: list[dict[str, Any]], plans: list[dict[str, Any]]
) -> dict[str, Any]:
    def sizes(name: str) -> list[float]:
        return [abs(row[name]) for row in rows]

    seconds = [abs(row["seconds_error"]) for row in times]
    return {
        "jobs": len(rows),
        "mean_allocated_error": round(statistics.mean(sizes("allocated_error")), 5),
        "worst_allocated_error": max(sizes("allocated_error")),
        "mean_reserved_error": round(statistics.mean(sizes("reserved_error")), 5),
        "worst_reserved_error": max(sizes("reserved_error")),
        "mean_capacity_error": round(statistics.mean(sizes("capacity_error")), 5),
        "worst_capacity_error_low": max(0.0, -min(row["capacity_error"] for row in rows)),
        "num_survived_at_first": sum(row["survived_at_first"] for row in rows),
        "num_survived": sum(row["survived"] for row in rows),
        "timed_jobs": len(times),
        "worst_timed_allocated_error": max(abs(row["allocated_error"]) for row in times),
        "far_seconds_error_fraction": round(sum(x > CLOSE for x in seconds) / len(times), 3),
        "median_seconds_error": round(statistics.median(seconds), 4),
        "worst_seconds_error": max(seconds),
        "worst_first_plan_slower": max(plan["slower"] for plan in plans),
    }


def show(
    rows: list[dict[str, Any]], times: list[dict[str, Any]], plans: list[dict[str, Any]]
) -> None:
    for row in rows:
        print(
            f"{row['name']:34} {row['allocated_bytes'] / GIB:7.2f} GiB"
            f" {row['allocated_error']:+8.3%} reserved {row['reserved_error']:+8.3%}"
            f" capacity {row['capacity_error']:+8.3%}"
            f" {'survived' if row['survived'] else 'OUT OF MEMORY'}"
        )
    for row in times:
        print(
            f"{row['name']:34} {row['step_seconds']:7.3f} s {row['seconds_error']:+7.1%}"
            f" allocated {row['allocated_error']:+8.3%} reserved {row['reserved_error']:+8.3%}"
        )
    for plan in plans:
        report = f"first plan {plan['slower']:+.1%} beside the fastest of {plan['num_ran']}"
        print(f"{plan['question']}: {report}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    measured, predicted = read_jobs(MEASURED), read_jobs(PREDICTED)
    rows = [compare(job, predicted[name]) for name, job in measured.items()]
    times, missing = compare_times()
    plans = compare_plans()
    total = sum_up(rows, times, plans)
    show(rows, times, plans)
    print("without a time:", ", ".join(missing))
    print(json.dumps(total, indent=1))
    if arguments.check:
        return check_total(total, RESULT, count="jobs", noise=NOISE, what="traces on the H200")
    write_result(
        RESULT, "benchmarks/h200_trace.py", total=total, jobs=rows, times=times, plans=plans
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
