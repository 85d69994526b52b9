"""Traces of compiled plans, beside what they took on one H200.

    python benchmarks/compiled_traces.py            # traces each, and writes the result: minutes
    python benchmarks/compiled_traces.py --check    # fails if the result is not of its rows

Measured memory and speed are those of `h200_families.json`; time is predicted without a
calibration. What a layer keeps depends on its code: trace with the transformers that measured
(Mamba's scan differs between 5.17 and 5.22).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _provenance import write_result
from _throughput_jobs import FAMILIES
from measure_training import read_catalogue
from tightfit.core.strategy import Strategy
from tightfit.hardware.catalogue import find_gpu
from tightfit.trace.traced_time import estimate_traced_time
from tightfit.training.tracing.job import TraceJob

MEASURED = Path(__file__).parent / "results" / "h200_families.json"
RESULT = Path(__file__).parent / "results" / "compiled_traces.json"
PACKAGES = ("torch", "transformers", "peft")

Row = dict[str, Any]


def read_strategy(row: Row) -> Strategy:
    """From the words that describe a measured plan."""
    words = row["plan"].split(", ")
    return Strategy(
        method=row["method"],
        compute="bf16",
        weights="bf16",
        adapter_dtype="bf16",
        micro_batch=row["num_rows"],
        seq_len=row["seq_len"],
        compile=True,
        loss="fused" if "fused loss" in words else "chunked",
        attention="flex" if "flex attention" in words else "sdpa",
        loss_chunk_factor=4 if "large loss chunks" in words else 1,
        checkpointing=False,
    )


def trace_row(name: str, row: Row) -> Row:
    from tightfit.training.tracing.trace import trace

    strategy, gpu = read_strategy(row), find_gpu("H200")
    job = TraceJob(
        config=read_catalogue(FAMILIES[name].model),
        strategy=strategy,
        compute_capability=gpu.compute_capability,
        random_weights=True,
        stages=(),
    )
    found = trace(job)
    assert found.traced is not None, found.problem
    assert found.operations is not None, "an operation was not understood"
    seconds = estimate_traced_time(found.operations, gpu, strategy).seconds_per_step
    taken = row["num_rows"] * row["seq_len"] / row["tokens_per_second"]
    traced = found.traced.peak_allocated_bytes
    return {
        "plan": row["plan"],
        "measured_versions": {name: row["versions"].get(name, "") for name in PACKAGES},
        "measured_bytes": row["allocated_bytes"],
        "traced_bytes": traced,
        "allocated_error": round(traced / row["allocated_bytes"] - 1, 4),
        "formula_error": row["allocated_error"],
        "measured_seconds": round(taken, 4),
        "traced_seconds": round(seconds, 4),
        "seconds_error": round(seconds / taken - 1, 4),
        "formula_seconds_error": row["seconds_error"],
        "traced_layers": found.traced.num_traced_layers,
        "trace_seconds": round(found.traced.seconds, 1),
    }


def summarise(rows: list[Row]) -> Row:
    def errors(name: str) -> list[float]:
        return [abs(row[name]) for row in rows]

    return {
        "jobs": len(rows),
        "median_allocated_error": round(statistics.median(errors("allocated_error")), 4),
        "worst_allocated_error": max(errors("allocated_error")),
        "worst_formula_error": max(errors("formula_error")),
        "median_seconds_error": round(statistics.median(errors("seconds_error")), 4),
        "worst_seconds_error": max(errors("seconds_error")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="the total is that of the rows")
    if parser.parse_args().check:
        result = json.loads(RESULT.read_text())
        is_whole = summarise(list(result["rows"].values())) == result["total"]
        print("compiled traces: all good" if is_whole else "error: the total is not of the rows")
        return 0 if is_whole else 1
    measured = json.loads(MEASURED.read_text())["measured"]
    rows = {}
    for name, row in measured.items():
        if "compiled" in row["plan"].split(", "):
            rows[name] = trace_row(name, row)
            print(name, json.dumps(rows[name]), flush=True)
    versions = {name: version(name) for name in PACKAGES}
    command = "benchmarks/compiled_traces.py"
    write_result(
        RESULT, command, versions=versions, total=summarise(list(rows.values())), rows=rows
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
