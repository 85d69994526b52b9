"""Rows shared by GPUs: what the planner says of 8 x H100 and 2 x 8 x A100, and published figures.

    python benchmarks/context_parallel.py

Nothing is measured here: closed forms beside what others printed. Rows of others are evidence, not
training data: nothing feeds back into the estimator.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from _provenance import write_result
from tightfit.api.estimate import estimate
from tightfit.api.plan import plan
from tightfit.core.errors import UserError
from tightfit.core.units import GIB
from tightfit.estimation.communication import Exchange, exchange_seconds, find_links
from tightfit.estimation.job import estimate_job
from tightfit.estimation.result import Estimate
from tightfit.planning.plan import Plan

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "context_parallel.json"
NETWORK = "1600Gb/s"
"""Adapters of an A100 node with eight GPUs, as DGX and cloud servers of that generation come."""
STEP = 16_384
"""Rows are looked for in multiples of it."""
JOBS = (
    ("1xH100", "lora"),
    ("1xH100", "full"),
    ("8xH100", "lora"),
    ("8xH100", "full"),
    ("2n x 8xA100-80GB", "lora"),
    ("2n x 8xA100-80GB", "full"),
)
_TITAN = (
    *("weights=fp32", "compute=bf16", "sharding=fsdp", "checkpointing=true", "loss=plain"),
    *("fp8=true", "attention=sdpa"),
)
_TRL = (
    *("weights=fp32", "compute=bf16", "sharding=zero3", "offload=optimizer", "checkpointing=true"),
    *("loss=plain", "attention=sdpa"),
)


def find_longest(hardware: str, method: str) -> dict[str, Any]:
    """The longest row of Llama-3.1-8B that the planner fits, and its plan."""
    low, best = 0, None
    step = 2**20
    while step >= STEP:
        found = _plan(hardware, method, low + step)
        if found is not None:
            low, best = low + step, found
        else:
            step //= 2
    assert best is not None
    return {"hardware": hardware, "method": method, "longest_row": low, **_describe(best)}


def _plan(hardware: str, method: str, tokens: int) -> Plan | None:
    try:
        made = plan(
            "Llama-3.1-8B",
            on=hardware,
            method=method,
            seq_len=tokens,
            effective_batch=1,
            network=NETWORK,
        )
    except UserError:
        return None
    best = made.plans[0] if made.plans else None
    return best if best is not None and best.estimate.verdict == "fits" else None


def _describe(best: Plan) -> dict[str, Any]:
    s, time = best.strategy, best.estimate.time
    node, network = best.hardware.node, best.hardware.network_bytes_per_second
    sent = Exchange(num_bytes=time.exchanged_bytes)
    links = find_links(node, network_bytes_per_second=network)
    return {
        "strategy": f"{s.sharding.value}, offload {s.offload.value}",
        "gpus": s.world_size,
        "context_parallel": s.context_parallel,
        "peak_gib": round(best.estimate.gpu.peak_reserved_bytes / GIB, 1),
        "tokens_per_second": round(time.tokens_per_second),
        "seconds_per_step": round(time.seconds_per_step, 1),
        "exchanged_gib_per_gpu": round(time.exchanged_bytes / GIB, 1),
        "exchange_seconds": round(exchange_seconds(s, links, sent), 2),
    }


def compare_published() -> list[dict[str, Any]]:
    """torchtitan's ring attention over 8 H100 of 96 GB, and trl's Ulysses over 4 H100.

    The first card has slower memory and 500 W: its speed without context parallel is the measure of
    the others'. Of the second job the batch is not printed: one row is assumed.
    """
    compared = []
    for row in csv.DictReader((HERE / "published" / "measurements.csv").open(newline="")):
        is_titan = "torchtitan" in row["source"] and row["gpus"] == "8" and " CP" in row["strategy"]
        is_trl = "ulysses-sp" in row["source"] and " SP=" in row["strategy"]
        if not (is_titan or is_trl) or not row["peak_gpu_GB"]:
            continue
        words = row["strategy"].replace("SP=", "CP").split()
        size = next(int(word[2:]) for word in words if word.startswith("CP"))
        made: Estimate = _estimate(row, size, _TITAN if is_titan else _TRL)
        ours = (made.gpu.peak_reserved_bytes - made.gpu.context_bytes) / GIB
        theirs = float(row["peak_gpu_GB"])
        speed = made.time.tokens_per_second / (int(row["gpus"]) if is_titan else 1)
        entry = {
            "source": row["source"],
            "model": row["model"],
            "tokens": int(row["seq_len"]),
            "context_parallel": size,
            "published_gib": theirs,
            "predicted_gib": round(ours, 1),
            "memory_error": round(ours / theirs - 1, 3),
        }
        if row["tokens_per_s"]:
            entry |= {
                "published_tokens_per_second": float(row["tokens_per_s"]),
                "predicted_tokens_per_second": round(speed),
                "speed_error": round(speed / float(row["tokens_per_s"]) - 1, 3),
            }
        compared.append(entry)
    return compared


def _estimate(row: dict[str, str], size: int, settings: tuple[str, ...]) -> Estimate:
    made = estimate(
        row["model"],
        on=f"{row['gpus']}xH100",
        method="full",
        seq_len=int(row["seq_len"]),
        settings=[*settings, "micro_batch=1"],
    )
    # torchtitan compiles, and shares rows by a ring, which our own rules do not allow together.
    strategy = made.strategy.model_copy(
        update={"context_parallel": size, "compile": "compile" in row["strategy"]}
    )
    return estimate_job(spec=made.spec, strategy=strategy, node=made.group.node)


def main() -> None:
    longest = [find_longest(*job) for job in JOBS]
    published = compare_published()
    for entry in [*longest, *published]:
        print(entry)
    write_result(RESULT, "benchmarks/context_parallel.py", longest=longest, published=published)


if __name__ == "__main__":
    main()
