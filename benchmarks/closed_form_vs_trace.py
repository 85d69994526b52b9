"""The closed form beside the trace, over random strategies.

    .venv/bin/python benchmarks/closed_form_vs_trace.py --jobs 200      # table, and the result file
    .venv/bin/python benchmarks/closed_form_vs_trace.py --check         # fails if it got worse

Draws strategies that the rules allow and that a trace can follow, on cards of several
generations, and compares the peak of allocated memory. A check recomputes the closed form alone
and takes the traces from the result file: tracing all of them takes minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from _provenance import provenance
from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Loss, Method, Sharding, Strategy
from tightfit.core.strategy import Optimizer as Kind
from tightfit.core.units import GIB
from tightfit.estimate.memory import estimate_moments, peak_moment
from tightfit.estimate.trace.ask import Tracer, list_versions
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Gpu, Node
from tightfit.models.resolve import resolve_model
from tightfit.models.source_config import read_source_config
from tightfit.models.spec import ModelSpec
from tightfit.planning.case import Case
from tightfit.planning.rules import find_first_violation
from tightfit.train.tracing.job import TraceJob

RESULT = Path(__file__).resolve().parent / "results" / "closed_form_vs_trace.json"
SEED = 5
NOISE = 0.002
MODELS = (
    "Llama-3.2-1B",
    "Llama-2-7b-hf",
    "Llama-2-13b-hf",
    "Qwen2.5-1.5B",
    "Qwen2.5-7B",
    "Qwen3-4B",
    "bloom-1b1",
    "bloom-3b",
    "Mistral-7B-v0.1",
    "pythia-1.4b",
    "Phi-3-mini-4k-instruct",
    "gemma-2b",
)
CARDS = ("V100-32GB", "A100-80GB", "H200")


def draw(chance: random.Random) -> tuple[str, Gpu, Strategy]:
    """One job; most draws are forbidden by a rule, and drawn again."""
    gpu = find_gpu(chance.choice(CARDS))
    is_old = gpu.compute_capability is not None and gpu.compute_capability < (8, 0)
    half = Dtype.FP16 if is_old else Dtype.BF16
    method = chance.choice((Method.FULL, Method.LORA, Method.LORA))
    kinds = [half, half, Dtype.FP32] + ([Dtype.NF4, Dtype.INT8] if method is Method.LORA else [])
    weights = chance.choice(kinds)
    sharding = chance.choice((Sharding.SINGLE, Sharding.SINGLE, Sharding.DDP, Sharding.FSDP))
    is_fp16 = half is Dtype.FP16
    strategy = Strategy(
        method=method,
        weights=weights,
        compute=half,
        adapter_dtype=Dtype.FP32 if is_fp16 else half,
        autocast=is_fp16,
        repeat_keys=is_old,
        lora_rank=chance.choice((8, 16, 64)),
        optimizer=chance.choice((Kind.ADAMW, Kind.ADAMW, Kind.ADAMW_FOREACH, Kind.SGD_MOMENTUM)),
        micro_batch=chance.choice((1, 2, 4)),
        seq_len=chance.choice((512, 1024, 2048)),
        grad_accum=chance.choice((1, 1, 2)),
        checkpointing=chance.random() < 0.6,
        attention=chance.choice((Attention.SDPA, Attention.SDPA, Attention.EAGER)),
        loss=chance.choice((Loss.PLAIN, Loss.CHUNKED, Loss.FUSED)),
        fused_kernels=chance.random() < 0.2,
        sharding=sharding,
        gpus_per_node=1 if sharding is Sharding.SINGLE else chance.choice((2, 4, 8)),
    )
    return chance.choice(MODELS), gpu, strategy


def draw_legal(count: int) -> list[tuple[str, Gpu, Strategy]]:
    chance = random.Random(SEED)
    found: list[tuple[str, Gpu, Strategy]] = []
    while len(found) < count:
        model, gpu, strategy = draw(chance)
        node = Node(gpu=gpu, num_gpus=strategy.gpus_per_node)
        case = Case(spec=resolve_model(model), strategy=strategy, node=node, num_nodes=1)
        if find_first_violation(case) is None:
            found.append((model, gpu, strategy))
    return found


def compare(spec: ModelSpec, strategy: Strategy, traced_bytes: int) -> dict[str, Any]:
    peak = peak_moment(estimate_moments(spec, strategy))
    return {
        "model": spec.name,
        "strategy": strategy.model_dump(mode="json", exclude_defaults=True),
        "traced_bytes": traced_bytes,
        "closed_form_bytes": peak.allocated_bytes,
        "moment": peak.name,
        "error": round(peak.allocated_bytes / traced_bytes - 1, 4),
    }


def trace_all(count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows, and what could not be traced."""
    drawn = draw_legal(count)
    jobs = []
    for model, gpu, strategy in drawn:
        config = read_source_config(resolve_model(model))
        assert config is not None, model
        job = TraceJob(
            config=config,
            strategy=strategy,
            compute_capability=gpu.compute_capability,
            stages=(),
        )
        jobs.append(job.model_dump(mode="json"))
    tracer = Tracer(module="tightfit.train.tracing.worker", timeout_seconds=24 * 3600)
    answers = tracer.ask(jobs, lambda done: print(f"{done} of {count}", file=sys.stderr))
    rows, failed = [], []
    for (model, gpu, strategy), answer in zip(drawn, answers, strict=True):
        if answer.traced is None:
            told = strategy.model_dump(mode="json", exclude_defaults=True)
            failed.append({"model": model, "strategy": told, "problem": answer.problem})
            continue
        row = compare(resolve_model(model), strategy, answer.traced.peak_allocated_bytes)
        stage = answer.traced.peak.stage
        rows.append(row | {"gpu": gpu.name, "stage": stage, "op": answer.traced.peak.op})
    return rows, failed


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "jobs": len(rows),
        "median_error": round(statistics.median(errors), 4),
        "p90_error": errors[int(0.9 * len(errors))],
        "worst_error": errors[-1],
    }


def check() -> int:
    before = json.loads(RESULT.read_text())
    rows = [
        compare(
            resolve_model(row["model"]),
            Strategy.model_validate(row["strategy"]),
            row["traced_bytes"],
        )
        for row in before["rows"]
    ]
    total = summarise(rows)
    print(json.dumps(total))
    worse = [
        name
        for name in ("median_error", "p90_error")
        if total[name] > before["total"][name] + NOISE
    ]
    print("\n".join(f"fault: {name} got worse" for name in worse) or "closed form: all good")
    return 1 if worse else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed result")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.check:
        return check()
    rows, failed = trace_all(arguments.jobs)
    rows.sort(key=lambda row: -abs(row["error"]))
    for row in rows:
        print(
            f"{row['traced_bytes'] / GIB:7.2f} {row['closed_form_bytes'] / GIB:7.2f} "
            f"{row['error']:+7.1%} {row['moment']:10} {row['op']:32} {row['model']} "
            f"{json.dumps(row['strategy'])}"
        )
    for row in failed:
        print(f"not traced: {row['problem']} {row['model']} {json.dumps(row['strategy'])}")
    total = summarise(rows)
    print(json.dumps(total))
    content = {
        **provenance("benchmarks/closed_form_vs_trace.py"),
        "versions": list_versions(),
        "total": total,
        "rows": rows,
        "not_traced": failed,
    }
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
