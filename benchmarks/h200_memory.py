"""The closed form against training steps measured on one H200, case by case.

    .venv/bin/python benchmarks/h200_memory.py            # table, and the result file
    .venv/bin/python benchmarks/h200_memory.py --check    # fails if it got worse

`measure_steps.py` measured the cases; each names its options in full.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _provenance import check_total, write_result
from tightfit.core.settings import ALL_LINEAR, EXPERTS
from tightfit.core.strategy import Quirks, Strategy
from tightfit.core.units import GIB
from tightfit.estimation.memory import estimate_moments, list_reserved_components, peak_moment
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "results" / "h200_steps.json"
RESULT = HERE / "results" / "h200_memory.json"
NOISE = 0.002

OPTIMIZERS = {
    "adamw-fused": "adamw",
    "adamw-foreach": "adamw-foreach",
    "sgd-momentum": "sgd-momentum",
    "adafactor": "adafactor",
    "adamw-8bit": "adamw-8bit",
    "paged-adamw-8bit": "adamw-paged-8bit",
}
INEXPRESSIBLE = (
    *("keep_outputs", "clip", "padding", "expandable_segments"),
    "memory_cap_bytes",
)
"""Switches of the measurement that a Strategy has no word for; such cases are left out."""


def is_expressible(case: dict[str, Any]) -> bool:
    options = case["options"]
    return (
        case.get("status") == "ok"
        and options["task"] == "train"
        and not any(options.get(name) for name in INEXPRESSIBLE)
        and options["optimizer"] in OPTIMIZERS
        and options["checkpointing"] != "reentrant"
    )


def make_strategy(options: dict[str, Any], spec: ModelSpec) -> Strategy:
    weights = options["weights"].removesuffix("-double")
    ranks = options["fsdp_ranks"]
    compute = options["autocast"] or ("fp32" if weights == "fp32" and not ranks else "bf16")
    return Strategy(
        method=options["method"],
        weights=weights,
        double_quant=options["weights"].endswith("-double"),
        upcast_unquantized=options["prepare_kbit"],
        compute=compute,
        autocast=bool(options["autocast"]),
        adapter_dtype=options["adapters"],
        optimizer=OPTIMIZERS[options["optimizer"]],
        lora_rank=options["lora_rank"],
        lora_targets=list_targets(options["lora_targets"], spec),
        lora_dropout=options["lora_dropout"],
        micro_batch=options["micro_batch"],
        seq_len=options["seq_len"],
        grad_accum=options["accumulation"],
        checkpointing=options["checkpointing"] == "non-reentrant",
        attention=options["attention"],
        loss={"plain": "plain", "fused": "fused", "liger": "fused"}[options["loss"]],
        fused_kernels=options["loss"] == "liger",
        sharding="fsdp" if ranks else "single",
        gpus_per_node=ranks or 1,
        offload="all" if options["offload"] else "none",
        quirks=Quirks(
            outlier_columns=weights == "int8",
            plain_modelling=True,
            wide_adafactor=True,
        ),
    )


def list_targets(targets: str | list[str], spec: ModelSpec) -> tuple[str, ...]:
    """peft's `all-linear`, which adapts experts too where it knows their former names: then both
    halves of the gate and up projection get an adapter."""
    names = tuple(targets.split(",")) if isinstance(targets, str) else tuple(targets)
    knows = any(part.lora_rank_factor > 1 for block in spec.blocks for part in block.linears)
    return (ALL_LINEAR, EXPERTS) if names == (ALL_LINEAR,) and knows else names


def cut_depth(spec: ModelSpec, num_layers: int | None) -> ModelSpec:
    if not num_layers:
        return spec
    blocks = tuple(block.model_copy(update={"num_layers": num_layers}) for block in spec.blocks)
    return spec.model_copy(update={"blocks": blocks})


def compare(case: dict[str, Any]) -> dict[str, Any]:
    options = case["options"]
    spec = cut_depth(resolve_model(options["model"]), options["num_layers"])
    strategy = make_strategy(options, spec)
    moments = estimate_moments(spec, strategy)
    peak = peak_moment(moments)
    held = list_reserved_components(peak, moments, strategy)
    return {
        "name": case["name"],
        "moment": peak.name,
        "allocated_bytes": case["peak_allocated_bytes"],
        "predicted_allocated_bytes": peak.allocated_bytes,
        "allocated_error": round(peak.allocated_bytes / case["peak_allocated_bytes"] - 1, 4),
        "reserved_bytes": case["peak_reserved_bytes"],
        "predicted_reserved_bytes": sum(held.values()) - held["cuda_context"],
        "reserved_error": round(
            (sum(held.values()) - held["cuda_context"]) / case["peak_reserved_bytes"] - 1, 4
        ),
        "transient_bytes": peak.transient_bytes,
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted(abs(row["allocated_error"]) for row in rows)
    reserved = sorted(abs(row["reserved_error"]) for row in rows)
    return {
        "cases": len(rows),
        "median_error": round(statistics.median(errors), 4),
        "p90_error": errors[int(0.9 * len(errors))],
        "worst_error": errors[-1],
        "median_reserved_error": round(statistics.median(reserved), 4),
        "p90_reserved_error": reserved[int(0.9 * len(reserved))],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed result")
    arguments = parser.parse_args()
    cases = json.loads(MEASURED.read_text())["cases"]
    rows = [compare(case) for case in cases if is_expressible(case)]
    for row in rows:
        print(
            f"{row['allocated_bytes'] / GIB:7.2f} {row['predicted_allocated_bytes'] / GIB:7.2f} "
            f"{row['allocated_error']:+7.1%} | {row['reserved_bytes'] / GIB:7.2f} "
            f"{row['predicted_reserved_bytes'] / GIB:7.2f} {row['reserved_error']:+7.1%} "
            f"{row['moment']:12} {row['name']}"
        )
    total = summarise(rows)
    print(json.dumps(total))
    if arguments.check:
        return check_total(total, RESULT, count="cases", noise=NOISE, what="measured steps")
    write_result(RESULT, "benchmarks/h200_memory.py", total=total, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
