"""First plans of many families on one H200, beside trl with the best of its switches.

    python benchmarks/measure_throughput.py --plan-first --fork --steps 8 \\
        --contestants tightfit,trl-best --only NAMES --out FILE    # on the GPU
    python benchmarks/h200_families.py --collect FILE    # what was measured, into the result file
    python benchmarks/h200_families.py                   # the tables of docs/speed.md
    python benchmarks/h200_families.py --check           # fails if the result is not what it says

A row's `long_run` is of an earlier measurement by `tightfit bench`, which plans for a run of any
length. Weights are drawn. Errors are of what the plan predicted without a calibration, too high
above zero.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _provenance import write_result
from _throughput_jobs import FAMILIES, PREFERENCES
from h200_throughput import LOSS_TOLERANCE
from measure_training import read_catalogue
from tightfit.core.units import GIB

RESULT = Path(__file__).parent / "results" / "h200_families.json"
OURS, PEER = "tightfit", "trl-best"
ALLOCATED, SECONDS = "GPU memory, allocated", "time per step"
FIELDS = ("model", "method", "objective", "num_rows", "seq_len", "memory_limit")
VERSIONS = ("torch", "triton", "transformers", "peft", "trl", "liger-kernel", "bitsandbytes")
PLAIN = ("full", "lora", "qlora", "dpo", "single", "micro-batch", "no checkpointing", "sdpa")
"""How words of a plan begin that the job says, or that are no lever."""

Row = dict[str, Any]


def read_job(job: Row) -> Row | None:
    """One row of the result; None where tightfit was not measured."""
    ours, peer = (job["contestants"].get(name, {}) for name in (OURS, PEER))
    if "tokens_per_second" not in ours:
        return None
    errors = {row["name"]: row["error_percent"] / 100 for row in ours["compared"]}
    row = {name: job["job"][name] for name in FIELDS}
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


def keep_peer(row: Row, before: Row) -> Row:
    """With trl's figure of before, where it was not measured again, and a bench's of before with
    compiled layers, which do not pay in a run as short as these."""
    if "measured_by" in before and "compiled" in before["plan"]:
        names = ("measured_by", "date", "plan", "tokens_per_second", "mfu_fraction")
        row = row | {"long_run": {name: before[name] for name in names}}
    elif "long_run" in before:
        row = row | {"long_run": before["long_run"]}
    if "trl" in row or "trl_fault" in row:
        return row
    kept: Row = {name: before[name] for name in ("trl", "trl_fault") if name in before}
    if "trl" in kept:
        kept["to_trl"] = round(row["tokens_per_second"] / kept["trl"]["tokens_per_second"], 3)
    return row | kept


def summarise(rows: list[Row]) -> Row:
    traced = [abs(row["allocated_error"]) for row in rows if row["tier"] == "traced"]
    ratios = [row["to_trl"] for row in rows if "to_trl" in row]
    return {
        "jobs": len(rows),
        "first_plans_that_ran": sum(not row["plan_changes"] for row in rows),
        "compared_with_trl": len(ratios),
        "least_ratio": min(ratios),
        "median_ratio": round(statistics.median(ratios), 3),
        "traced": len(traced),
        "worst_traced_allocated_error": max(traced),
        "median_seconds_error": statistics.median(abs(row["seconds_error"]) for row in rows),
        "worst_seconds_error": max(abs(row["seconds_error"]) for row in rows),
    }


def collect(file: Path) -> None:
    """Jobs measured anew replace their rows of before."""
    jobs = json.loads(file.read_text())["jobs"]
    known = {} if not RESULT.exists() else json.loads(RESULT.read_text())["measured"]
    for name, job in jobs.items():
        row = read_job(job)
        if row is not None:
            known[name] = keep_peer(row, known.get(name, {}))
    measured = {name: known[name] for name in (*FAMILIES, *PREFERENCES) if name in known}
    total = summarise(list(measured.values()))
    write_result(RESULT, "benchmarks/h200_families.py", total=total, measured=measured)


def list_strange(measured: dict[str, Row]) -> list[str]:
    """Jobs of which trl's first loss is another: it trains something else."""
    strange = []
    for name, row in measured.items():
        if "trl" not in row:
            continue
        ours, peer = row["first_losses"][0], row["trl"]["first_losses"][0]
        usual = (ours, ours + _router_loss(row["model"]))
        if all(abs(loss / peer - 1) > LOSS_TOLERANCE for loss in usual):
            strange.append(name)
    return strange


def _router_loss(model: str) -> float:
    """Of balanced experts, with its weight: trl adds it where Liger's forward computes it."""
    config = read_catalogue(model)
    weight: float = config.get("router_aux_loss_coef", 0.0)
    return weight * int(config.get("num_experts_per_tok", 0))


def describe_plan(row: Row) -> str:
    """What is more than a plain step."""
    words = row["plan"].split(", ")
    return ", ".join(word for word in words if not word.startswith(PLAIN)) or "plain"


def render(rows: list[Row]) -> str:
    """As docs/speed.md has it."""
    head = ("job", "first plan", "TRL best", "tightfit", "to best", "MFU", "memory")
    lines = [f"| {' | '.join((*head, 'predicted memory, time'))} |", "|---" * 8 + "|"]
    for row in rows:
        kind = row["method"] if row["objective"] == "sft" else f"{row['objective']} {row['method']}"
        pairs = "" if row["objective"] == "sft" else " pairs"
        name = f"{row['model'].rpartition('--')[2]} {kind}"
        name += f", {row['num_rows']}{pairs} x {row['seq_len']:,}"
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
