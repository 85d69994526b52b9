"""First plans of many families on one H200, beside trl with the best of its switches.

    python benchmarks/measure_throughput.py --plan-first --fork --steps 8 \\
        --contestants tightfit,trl-best --only NAMES --out FILE    # on the GPU
    python benchmarks/h200_families.py --collect FILE    # what was measured, into the result file
    python benchmarks/h200_families.py                   # the tables of docs/speed.md
    python benchmarks/h200_families.py --check           # fails if the result is not what it says

Weights are drawn. Errors are of what the plan predicted without a calibration, too high above zero.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _provenance import write_result
from _throughput_jobs import FAMILIES
from h200_throughput import LOSS_TOLERANCE
from tightfit.core.units import GIB

RESULT = Path(__file__).parent / "results" / "h200_families.json"
OURS, PEER = "tightfit", "trl-best"
ALLOCATED, SECONDS = "GPU memory, allocated", "time per step"
VERSIONS = ("torch", "triton", "transformers", "peft", "trl", "liger-kernel", "bitsandbytes")

Row = dict[str, Any]


def read_job(job: Row) -> Row | None:
    """One row of the result; None where tightfit was not measured."""
    ours, peer = (job["contestants"].get(name, {}) for name in (OURS, PEER))
    if "tokens_per_second" not in ours:
        return None
    errors = {row["name"]: row["error_percent"] / 100 for row in ours["compared"]}
    row = {
        name: job["job"][name]
        for name in ("model", "method", "num_rows", "seq_len", "memory_limit")
    }
    row |= {
        "date": ours["about"]["date"],
        "versions": {name: ours["about"].get(name, "") for name in VERSIONS},
        "plan": ours["plan"],
        "plan_changes": ours["plan_changes"],
        "tier": ours["tier"],
        "tokens_per_second": round(ours["tokens_per_second"]),
        "mfu_fraction": round(ours["mfu_fraction"], 4),
        "allocated_bytes": ours["peak_allocated_bytes"],
        "reserved_bytes": ours["peak_reserved_bytes"],
        "allocated_error": round(errors[ALLOCATED], 4),
        "seconds_error": round(errors[SECONDS], 4),
        "first_losses": ours["first_losses"],
    }
    if "tokens_per_second" in peer:
        row["trl"] = {
            "date": peer["about"]["date"],
            "tokens_per_second": round(peer["tokens_per_second"]),
            "allocated_bytes": peer["peak_allocated_bytes"],
            "switches": peer["switches"],
            "tried": [tried["fault"].partition("\n")[0][:160] for tried in peer["tried"]],
            "first_losses": peer["first_losses"],
        }
        row["to_trl"] = round(ours["tokens_per_second"] / peer["tokens_per_second"], 3)
    elif "fault" in peer:
        row["trl_fault"] = peer["fault"].partition("\n")[0][:200]
    return row


def summarise(rows: list[Row]) -> Row:
    traced = [abs(row["allocated_error"]) for row in rows if row["tier"] == "traced"]
    ratios = {f"{row['model']} {row['method']}": row["to_trl"] for row in rows if "to_trl" in row}
    return {
        "jobs": len(rows),
        "first_plans_that_ran": sum(not row["plan_changes"] for row in rows),
        "compared_with_trl": len(ratios),
        "least_ratio": min(ratios.values()),
        "median_ratio": round(statistics.median(ratios.values()), 3),
        "traced": len(traced),
        "worst_traced_allocated_error": max(traced),
        "median_seconds_error": statistics.median(abs(row["seconds_error"]) for row in rows),
        "worst_seconds_error": max(abs(row["seconds_error"]) for row in rows),
    }


def collect(file: Path) -> None:
    """Jobs measured anew replace their rows of before."""
    jobs = json.loads(file.read_text())["jobs"]
    known = {} if not RESULT.exists() else json.loads(RESULT.read_text())["measured"]
    known |= {name: row for name, job in jobs.items() if (row := read_job(job)) is not None}
    measured = {name: known[name] for name in FAMILIES if name in known}
    total = summarise(list(measured.values()))
    write_result(RESULT, "benchmarks/h200_families.py", total=total, measured=measured)


def list_strange(measured: dict[str, Row]) -> list[str]:
    """Jobs of which trl's first loss is another: it trains something else."""
    found = {
        name: (row["first_losses"][0], row["trl"]["first_losses"][0])
        for name, row in measured.items()
        if "trl" in row
    }
    return [name for name, (ours, peer) in found.items() if abs(ours / peer - 1) > LOSS_TOLERANCE]


def describe_plan(row: Row) -> str:
    """What is more than a plain step."""
    words = row["plan"].split(", ")[3:]
    return ", ".join(word for word in words if word != "sdpa attention") or "plain"


def render(rows: list[Row]) -> str:
    """As docs/speed.md has it."""
    head = ("job", "first plan", "TRL best", "tightfit", "to best", "MFU", "memory")
    lines = [f"| {' | '.join((*head, 'predicted memory, time'))} |", "|---" * 8 + "|"]
    for row in rows:
        name = f"{row['model'].rpartition('--')[2]} {row['method']}"
        name += f", {row['num_rows']} x {row['seq_len']:,}"
        if row["memory_limit"]:
            name += f", in {row['memory_limit'].replace('GiB', ' GiB')}"
        peer, ratio = "", ""
        if "trl" in row:
            peer, ratio = f"{row['trl']['tokens_per_second']:,}", f"{row['to_trl']:.2f}x"
        elif "trl_fault" in row:
            peer = "does not run"
        memory = f"{row['allocated_bytes'] / GIB:.1f} GiB"
        errors = f"{row['allocated_error']:+.1%}, {row['seconds_error']:+.1%}"
        speed, mfu = f"{row['tokens_per_second']:,}", f"{row['mfu_fraction']:.2f}"
        cells = (name, describe_plan(row), peer, speed, ratio, mfu, memory, errors)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--collect", type=Path, metavar="FILE", help="of measure_throughput.py")
    parser.add_argument("--check", action="store_true", help="the total is that of the rows")
    arguments = parser.parse_args()
    if arguments.collect is not None:
        collect(arguments.collect)
    result = json.loads(RESULT.read_text())
    measured = result["measured"]
    strange = [f"error: trl trains something else in {name}" for name in list_strange(measured)]
    if arguments.check and summarise(list(measured.values())) != result["total"]:
        strange.append("error: the total is not that of the rows")
    print("\n".join([render(list(measured.values())), *strange]))
    return 1 if strange else 0


if __name__ == "__main__":
    sys.exit(main())
