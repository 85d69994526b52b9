"""`--trainer` against TRL and torchtune as `measure_throughput.py` ran them on one H200.

    python benchmarks/other_trainers.py            # table, and the result file
    python benchmarks/other_trainers.py --check    # fails if it misses or got worse

Jobs with rows of one length; options are the switches that each run had.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _provenance import provenance
from tightfit.api.estimate import estimate
from tightfit.core.units import GIB

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "results" / "h200_throughput.json"
RESULT = HERE / "results" / "other_trainers.json"
TRAINERS = {"trl-default": "trl@1.16", "trl-best": "trl@1.16", "torchtune": "torchtune@0.7"}
"""By contestant of the speed comparison."""
MEDIAN_LIMIT, WORST_LIMIT = 0.05, 0.15
NOISE = 0.002


def list_options(job: dict[str, Any], contestant: str, switches: dict[str, Any]) -> dict[str, Any]:
    """Options of `tightfit estimate` for what a contestant ran."""
    settings = []
    options: dict[str, Any] = {
        "model": job["model"].replace("--", "/"),
        "on": "H200-SXM",
        "trainer": TRAINERS[contestant],
        "method": job["method"],
        "micro_batch": switches["micro_batch"],
        "seq_len": job["seq_len"],
        "checkpointing": switches["checkpointing"],
    }
    if job["method"] != "qlora":
        options["weights"] = "bf16"  # the model is drawn in bf16
    if job["method"] != "full":
        options |= {"lora_rank": 16, "lora_targets": "all-linear"}
        settings.append("lora_dropout=0")
    if job["method"] == "qlora":
        settings.append("upcast_unquantized=false")
    if switches["liger"]:
        options["fused_kernels"] = True
    if switches["compile"]:
        settings.append("compile=true")
    if contestant == "torchtune" and job["method"] == "full":
        options["optimizer"] = "adamw"
    return options | ({"settings": settings} if settings else {})


def compare() -> list[dict[str, Any]]:
    rows = []
    for name, found in json.loads(MEASURED.read_text())["jobs"].items():
        for contestant, ran in found["contestants"].items():
            is_asked = contestant in TRAINERS and not found["job"]["is_alpaca"]
            if not is_asked or "peak_allocated_bytes" not in ran:
                continue
            options = list_options(found["job"], contestant, ran["switches"])
            gpu = estimate(**options).estimate.gpu
            reserved = gpu.peak_reserved_bytes - gpu.components["cuda_context"]
            rows.append(
                {
                    "job": name,
                    "contestant": contestant,
                    "estimate": options,
                    "measured_bytes": ran["peak_allocated_bytes"],
                    "predicted_bytes": gpu.peak_allocated_bytes,
                    "error": round(gpu.peak_allocated_bytes / ran["peak_allocated_bytes"] - 1, 4),
                    "reserved_error": round(reserved / ran["peak_reserved_bytes"] - 1, 4),
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="`--trainer` against measured runs")
    parser.add_argument("--check", action="store_true", help="compare with the committed result")
    arguments = parser.parse_args()
    rows = compare()
    errors, reserved = ([abs(row[key]) for row in rows] for key in ("error", "reserved_error"))
    total = {
        "jobs": len(rows),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": max(errors),
        "median_reserved_error": round(statistics.median(reserved), 4),
        "worst_reserved_error": max(reserved),
    }
    for row in rows:
        print(
            f"{row['job']:10} {row['contestant']:12} {row['measured_bytes'] / GIB:7.2f} GiB "
            f"{row['predicted_bytes'] / GIB:7.2f} {row['error']:+7.1%}  "
            f"reserved {row['reserved_error']:+7.1%}"
        )
    print(total)
    if not arguments.check:
        content = {**provenance("benchmarks/other_trainers.py"), "total": total, "rows": rows}
        RESULT.write_text(json.dumps(content, indent=2) + "\n")
        return 0
    before = json.loads(RESULT.read_text())["total"]
    is_worse = any(total[key] > before[key] + NOISE for key in ("median_error", "worst_error"))
    is_wrong = total["median_error"] > MEDIAN_LIMIT or total["worst_error"] > WORST_LIMIT
    print("error: it misses or got worse" if is_worse or is_wrong else "other trainers: all good")
    return int(is_worse or is_wrong)


if __name__ == "__main__":
    sys.exit(main())
