"""The first plan compared with every other legal combination of settings, measured on one H200.

    .venv/bin/python benchmarks/h200_sweep.py            # tables, and the summary's file
    .venv/bin/python benchmarks/h200_sweep.py --check    # fails if it got worse

`measure_sweep.py` measured the plans. What a plan takes is the median of its measurements; memory
is what torch's allocator holds. Errors are of the prediction, too low below zero.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from _provenance import check_total, write_result
from _sweep_order import Row, order_turns
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "h200_sweep_measured.json"
RESULT = RESULTS / "h200_sweep.json"
NOISE = 0.0005
PROMISES = {"speed_error": 0.10, "allocated_error": 0.01, "first_slower_error": 0.05}
"""Of each first plan: its tokens/s, its peak, and its distance to the fastest."""

COUNTS = ("plans", "failed", "left", "beyond")
HEAD = ("within", "left_out", "is_calibrated")
"""Of the measurement, kept with its summary."""


def join_plans(rows: list[Row]) -> list[Row]:
    """One row per plan of one job, by rank: its measurements together, or its first failure."""
    by_rank: dict[int, list[Row]] = {}
    for row in rows:
        by_rank.setdefault(row["rank"], []).append(row)
    return [_join(by_rank[rank]) for rank in sorted(by_rank)]


def _join(rows: list[Row]) -> Row:
    good = [row for row in rows if row["status"] == "ok"]
    if not good:
        return rows[0]
    seconds = [row["step_seconds"] for row in good]
    return good[0] | {
        "step_seconds": statistics.median(seconds),
        "drift": round(seconds[-1] / seconds[0] - 1, 4),
        "peak_allocated_bytes": max(row["peak_allocated_bytes"] for row in good),
        "peak_reserved_bytes": max(row["peak_reserved_bytes"] for row in good),
    }


def read_speed(plan: Row) -> float:
    """Tokens per second."""
    return float(plan["tokens_per_step"] / plan["step_seconds"])


def find_speed_error(plan: Row) -> float:
    """Of the predicted tokens/s."""
    return round(float(plan["step_seconds"] / plan["predicted_seconds"]) - 1, 4)


def find_memory_error(plan: Row, kind: str) -> float | None:
    """None where nothing was measured, as on a CPU."""
    measured = plan[f"peak_{kind}_bytes"]
    return round(float(plan[f"predicted_{kind}_bytes"] / measured) - 1, 5) if measured else None


def summarize_job(plans: list[Row], unmeasured: Row) -> Row:
    """Of joined plans. Without a measured first plan there is little to say."""
    ran = [plan for plan in plans if plan["status"] == "ok"]
    report: Row = {"plans": len(ran), "failed": len(plans) - len(ran), **unmeasured}
    if not ran or ran[0]["rank"] != 1:
        return report
    first, fastest = ran[0], max(ran, key=read_speed)
    return report | {
        "tokens_per_second": round(read_speed(first)),
        "predicted_tokens_per_second": round(first["tokens_per_step"] / first["predicted_seconds"]),
        "fastest_tokens_per_second": round(read_speed(fastest)),
        "fastest_rank": fastest["rank"],
        "first_slower_error": round(read_speed(fastest) / read_speed(first) - 1, 4),
        "drift": first["drift"],
        "speed_error": find_speed_error(first),
        "allocated_error": find_memory_error(first, "allocated"),
        "reserved_error": find_memory_error(first, "reserved"),
        "median_speed_error": _median_size([find_speed_error(plan) for plan in ran]),
        "median_allocated_error": _median_size(
            [find_memory_error(plan, "allocated") for plan in ran]
        ),
    }


def _median_size(errors: list[float | None]) -> float | None:
    sizes = [abs(error) for error in errors if error is not None]
    return round(statistics.median(sizes), 5) if sizes else None


def sum_up(jobs: dict[str, Row]) -> Row:
    """The worst of all jobs; errors as sizes, so that they can only be too large."""
    names = dict.fromkeys(name for job in jobs.values() for name in job if "error" in name)
    total: Row = {name: sum(job[name] for job in jobs.values()) for name in COUNTS}
    for name in names:
        sizes = [abs(job[name]) for job in jobs.values() if job.get(name) is not None]
        if sizes:
            total[f"worst_{name}"] = max(sizes)
    return total


def list_broken(jobs: dict[str, Row]) -> list[str]:
    """First plans that are not what was promised of them."""
    broken = []
    for job, report in jobs.items():
        if "speed_error" not in report:
            broken.append(f"{job}: the first plan did not run")
            continue
        broken += [
            f"{job}: {name.replace('_', ' ')} {report[name]:+.2%}, promised {most:.0%}"
            for name, most in PROMISES.items()
            if report[name] is not None and abs(report[name]) > most
        ]
    return broken


def count_unmeasured(document: Row, job: str) -> Row:
    """Plans that nobody came to (`left`), and those that `--within` ruled out (`beyond`)."""
    plans = [plan for plan in document["plans"] if plan["job"] == job]
    wanted = {plan["rank"] for _, plan in order_turns(plans, within=document["within"])}
    done = {row["rank"] for row in document["rows"] if row["job"] == job}
    return {"left": len(wanted - done), "beyond": len(plans) - len(wanted | done)}


def name_difference(plan: Row, first: Row) -> str:
    """The levers that are not as in the first plan."""
    base, own = (Strategy.model_validate(row["strategy"]).model_dump() for row in (first, plan))
    changed = {key: value for key, value in own.items() if value != base[key]}
    return " ".join(f"{key}={getattr(value, 'value', value)}" for key, value in changed.items())


def render_job(name: str, plans: list[Row], first: Row, report: Row) -> str:
    counts = ", ".join(f"{report[word]} {word}" for word in COUNTS)
    lines = [f"{name}: {counts}"]
    for plan in plans:
        levers = name_difference(plan, first) or "the first plan"
        predicted = f"  {plan['rank']:3} {plan['predicted_seconds']:8.4f}"
        if plan["status"] != "ok":
            reason = " ".join(plan.get("fault", "").split())[:80]
            lines.append(f"{predicted} {plan['status']:>26}  {levers}  {reason}")
            continue
        memory = plan["peak_allocated_bytes"] / GIB
        lines.append(
            f"{predicted} {plan['step_seconds']:8.4f} s {find_speed_error(plan):+6.1%}"
            f" {memory:6.1f} GiB  {levers}"
        )
    if "speed_error" in report:
        lines.append(
            f"  fastest: rank {report['fastest_rank']}, {report['first_slower_error']:+.1%} from"
            f" the first; first: {_percent(report, 'speed_error')} tokens/s,"
            f" {_percent(report, 'allocated_error')} allocated,"
            f" {_percent(report, 'reserved_error')} reserved, drift {report['drift']:+.1%}"
        )
    return "\n".join(lines)


def _percent(report: Row, name: str) -> str:
    return "no" if report[name] is None else f"{report[name]:+.2%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the recorded summary")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="shown, not recorded")
    arguments = parser.parse_args()
    if not arguments.measured.exists():
        parser.error(
            f"nothing was measured yet: benchmarks/measure_sweep.py --out {arguments.measured}"
        )
    if arguments.check and not RESULT.exists():
        parser.error("no summary was recorded yet: benchmarks/h200_sweep.py")
    document = json.loads(arguments.measured.read_text())
    jobs = {}
    for name in dict.fromkeys(row["job"] for row in document["rows"]):
        plans = join_plans([row for row in document["rows"] if row["job"] == name])
        first = next(p for p in document["plans"] if p["job"] == name and p["rank"] == 1)
        jobs[name] = summarize_job(plans, count_unmeasured(document, name))
        print(render_job(name, plans, first, jobs[name]))
    total = sum_up(jobs)
    print(json.dumps(total, indent=1))
    print("\n".join(f"not as promised: {line}" for line in list_broken(jobs)))
    if arguments.check:
        return check_total(total, RESULT, count="plans", noise=NOISE, what="the sweep")
    if arguments.measured == MEASURED:
        head = {key: document[key] for key in HEAD}
        write_result(RESULT, "benchmarks/h200_sweep.py", **head, total=total, jobs=jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
