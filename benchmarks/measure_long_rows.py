"""Long rows on one GPU: what each lever costs and saves, and what fits under a memory limit.

    python benchmarks/measure_long_rows.py --out long_rows.json --seconds 300
    python benchmarks/measure_long_rows.py --out long_rows.json --only limits --seconds 300

Weights are drawn, rows are random tokens, one row a step, QLoRA of rank 16. Cases of one model run
in one process, over the same weights. What would not end in time is not started. Beside each case
stand the closed form and, where a process of its own is done with it in time, the trace. `--cpu`
tries all of it with tiny models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GIB = 2**30
_QLORA = {
    "method": "lora",
    "weights": "nf4",
    "checkpointing": True,
    "loss": "fused",
    "fused_kernels": True,
    "fused_lora": True,
}
_TILES, _MOVED = {"mlp_tiles": 8}, {"offloaded_inputs": 31}
LEVERS = {"none": {}, "tiles": _TILES, "inputs in host memory": _MOVED, "both": _TILES | _MOVED}
LLAMA = "Llama-3.1-8B"


def _case(name: str, model: str, tokens: int, *, steps: int = 2, **fields: Any) -> dict[str, Any]:
    limit, layers = fields.pop("limit_gib", None), fields.pop("num_layers", None)
    strategy = _QLORA | {"seq_len": tokens} | fields
    return {
        "name": name,
        "model": model,
        "tokens": tokens,
        "steps": steps,
        "limit_gib": limit,
        "num_layers": layers,
        "strategy": strategy,
    }


CASES = {
    "levers": [
        _case(name, LLAMA, tokens, steps=steps, **fields)
        for tokens, steps in ((8192, 3), (32768, 2))
        for name, fields in LEVERS.items()
    ],
    "limits": [
        _case("24 GiB", LLAMA, 131072, steps=1, limit_gib=24, **LEVERS["both"]),
    ],
    "quarter": [
        # Memory is that of one layer at a time: a step of all 32 takes a quarter of an hour.
        _case("80 GiB, 4 layers", LLAMA, 550_000, steps=1, limit_gib=80, num_layers=4)
        | {"strategy": _QLORA | {"seq_len": 550_000} | _TILES | {"offloaded_inputs": 3}},
    ],
    "mixtures": [
        _case(
            "24 GiB",
            "gpt-oss-20b",
            98304,
            steps=1,
            limit_gib=24,
            attention="flex",
            **(_TILES | {"offloaded_inputs": 23}),
        ),
        _case(
            "24 GiB",
            "Qwen3-30B-A3B",
            65536,
            steps=1,
            limit_gib=24,
            **(_TILES | {"offloaded_inputs": 47}),
        ),
    ],
}


def list_cases(only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for group, cases in CASES.items():
        if not only or group in only.split(","):
            yield from ((group, case) for case in cases)


def read_config(case: dict[str, Any], *, is_tiny: bool) -> dict[str, Any]:
    from tightfit.models.catalogue import read_source_config
    from tightfit.models.resolve import resolve_model

    config = dict(read_source_config(resolve_model(case["model"])) or {})
    config.pop("quantization_config", None)
    if case["num_layers"]:
        config["num_hidden_layers"] = case["num_layers"]
    if is_tiny:
        config |= {"num_hidden_layers": 3, "hidden_size": 128, "vocab_size": 256}
        config |= {"intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        config |= {"head_dim": 64}
    return config


# One model's cases, in a process of their own


def measure(cases: list[dict[str, Any]], out: Path, *, seconds: float, is_cpu: bool) -> None:
    import torch

    from tightfit.core.files import temporary_folder
    from tightfit.core.settings import Loss
    from tightfit.core.strategy import Strategy
    from tightfit.runtime.layers import decoder_layers
    from tightfit.runtime.load import load_base
    from tightfit.training.engine import TorchEngine
    from tightfit.training.model import build_optimizer, prepare_model
    from tightfit.training.preference import build_objective
    from tightfit.training.recompute import recompute_as_planned
    from tightfit.training.tracing.engine import make_training

    end = time.monotonic() + seconds
    device = torch.device("cpu" if is_cpu else "cuda")
    with temporary_folder() as folder:
        config = read_config(cases[0], is_tiny=is_cpu)
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        first = Strategy.model_validate(cases[0]["strategy"])
        if is_cpu:
            plain = {"fused_kernels": False, "loss": Loss.CHUNKED, "seq_len": 64}
            first = first.model_copy(update=plain)
        bare = {"checkpointing": False, "mlp_tiles": 1, "offloaded_inputs": 0}
        first = first.model_copy(update=bare)
        training = make_training(first, folder, random_weights=True)
        model = load_base(folder, first, device, random_weights=True)
        model = prepare_model(model, first, training)
    module = build_objective(model, first, training)
    optimizer = build_optimizer(module.named_parameters(), first.optimizer, training)
    engine = TorchEngine(module, optimizer, strategy=first, device=device, max_grad_norm=1.0)
    layers = decoder_layers(model)
    owners = [part for layer in layers for part in (layer, getattr(layer, "mlp", None)) if part]
    plain_forwards = [part.__dict__.get("forward") for part in owners]
    context = 0 if is_cpu else torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    context -= 0 if is_cpu else torch.cuda.memory_reserved()
    for case in cases:
        if time.monotonic() + case["tokens"] / 3000 * case["steps"] > end:
            print("no time:", case["name"], case["tokens"], flush=True)
            continue
        for part, forward in zip(owners, plain_forwards, strict=True):
            part.__dict__.pop("forward", None)
            if forward is not None:
                part.forward = forward
        strategy = Strategy.model_validate(case["strategy"])
        if is_cpu:
            strategy = strategy.model_copy(update={**plain, "mlp_tiles": strategy.mlp_tiles})
        recompute_as_planned(model, strategy)
        ids = torch.randint(3, config["vocab_size"], (1, strategy.seq_len), device=device)
        record = {key: value for key, value in case.items() if key != "steps"}
        record |= run_steps(engine, ids, case, context_bytes=context)
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps({k: v for k, v in record.items() if k != "strategy"}), flush=True)
        del ids


def limit_memory(limit_bytes: int, *, context_bytes: int) -> None:
    """As `--memory-limit` does in a worker; 0: no limit."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.mem_get_info()[1]
    room = limit_bytes - context_bytes if limit_bytes else total
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))


def run_steps(engine: Any, ids: Any, case: dict[str, Any], *, context_bytes: int) -> dict[str, Any]:
    import torch

    from tightfit.training.step import train_step

    device, num_targets = ids.device, ids.shape[1] - 1
    is_cuda = device.type == "cuda"
    if is_cuda:
        limit_memory((case["limit_gib"] or 0) * GIB, context_bytes=context_bytes)
    taken: list[float] = []
    loss, problem = None, ""
    batch = {"input_ids": ids, "labels": ids}
    try:
        for _ in range(case["steps"]):
            _synchronize(device)
            begin = time.perf_counter()
            report = train_step(engine, [batch], divisor=num_targets, learning_rate=0.0, seeds=[0])
            _synchronize(device)
            taken.append(time.perf_counter() - begin)
            loss = float(report.loss_sum) / num_targets
    except torch.OutOfMemoryError as error:
        problem = str(error).splitlines()[0][:300]
        engine.optimizer.zero_grad(set_to_none=True)
    return {
        "step_seconds": [round(one, 3) for one in taken],
        "tokens_per_second": round(case["tokens"] / min(taken), 1) if taken else None,
        "loss": loss,
        "allocated_bytes": torch.cuda.max_memory_allocated() if is_cuda else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else 0,
        "context_bytes": context_bytes,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if is_cuda else 0,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "problem": problem,
    }


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_bus() -> dict[str, float]:
    """Bytes per second of page-locked copies, as the layers' inputs travel."""
    import torch

    from tightfit.runtime.host_memory import PinnedBuffer

    device = torch.device("cuda")
    here = torch.empty(2**29, dtype=torch.bfloat16, device=device)
    begin = time.perf_counter()
    there = PinnedBuffer(here.numel(), here.dtype, device)
    found = {"locking": here.nbytes / (time.perf_counter() - begin)}
    pairs = {"to host": (there.view(here.shape), here), "to device": (here, there.view(here.shape))}
    for name, (target, source) in pairs.items():
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found[name] = 5 * here.nbytes / (time.perf_counter() - begin)
    return found


# Predictions


def predict(case: dict[str, Any], *, is_traced: bool) -> dict[str, Any]:
    from tightfit.core.strategy import Strategy
    from tightfit.estimation.job import estimate_job
    from tightfit.hardware.catalogue import find_gpu
    from tightfit.hardware.types import Node
    from tightfit.models.config import read_config as read_spec

    config = read_config(case, is_tiny=False)
    spec = read_spec(config, name=case["model"], source="benchmark")
    strategy = Strategy.model_validate(case["strategy"])
    if is_traced:
        from tightfit.trace.caching_allocator import AllocatorSettings
        from tightfit.training.tracing.job import TraceJob
        from tightfit.training.tracing.trace import DepthTracer, replay_unlimited

        job = TraceJob(
            config=config,
            strategy=strategy,
            compute_capability=(9, 0),
            stages=(),
            random_weights=True,
        )
        recording = DepthTracer(job).record(strategy.count_recomputed(spec.num_layers))
        found = replay_unlimited(recording, AllocatorSettings())
        return {
            "traced_allocated_bytes": found.peak_allocated_bytes,
            "traced_reserved_bytes": found.peak_reserved_bytes,
        }
    node = Node(gpu=find_gpu("H200"), num_gpus=1, host_memory_bytes=128 * GIB)
    estimate = estimate_job(spec=spec, strategy=strategy, node=node)
    return {
        "predicted_allocated_bytes": estimate.gpu.peak_allocated_bytes,
        "predicted_seconds": estimate.time.seconds_per_step,
        "predicted_host_bytes": estimate.host.peak_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="groups, with commas: " + ", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--join", type=Path, nargs="*", help="lines measured elsewhere")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out, end = arguments.out.resolve(), time.monotonic() + arguments.seconds
    if arguments.worker.startswith("trace"):
        case = json.loads(arguments.worker.partition(":")[2])
        out.write_text(json.dumps({**case, **predict(case, is_traced=True)}), "utf-8")
        return
    if arguments.worker:
        cases = json.loads(arguments.worker)
        measure(cases, out, seconds=arguments.seconds, is_cpu=arguments.cpu)
        return
    if arguments.join is None:
        run(arguments, out, end)
        return
    join(arguments.join, out)


def join(files: list[Path], out: Path) -> None:
    """One result of measured lines, with the closed form's and the trace's figures."""
    from _provenance import write_result

    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    traces = {
        (one["trace"]["name"], one["trace"]["tokens"]): one["trace"]
        for one in lines
        if "trace" in one
    }
    cases = []
    for record in lines:
        if "tokens" in record:
            traced = traces.get((record["name"], record["tokens"]), {})
            found = {key: value for key, value in traced.items() if key.startswith("traced_")}
            cases.append(record | predict(record, is_traced=False) | found)
    machine = next(record for record in lines if "bus" in record)
    write_result(out, "benchmarks/measure_long_rows.py", measured_on=machine, cases=cases)
    print(*make_table(cases), sep="\n")


def make_table(cases: list[dict[str, Any]]) -> list[str]:
    """The table of docs/long-rows.md."""
    table = [
        "| tokens | levers | allocated | traced | host | s/step | predicted | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in cases:
        seconds = min(one["step_seconds"])
        sizes = [one["allocated_bytes"], one["traced_allocated_bytes"], one["host_peak_bytes"]]
        figures = [f"{size / GIB:.2f} GiB" for size in sizes]
        figures += [f"{seconds:.2f}", f"{one['predicted_seconds']:.2f}"]
        figures += [f"{one['tokens_per_second']:,.0f}"]
        name = f"both, {one['name']}" if one["limit_gib"] else one["name"]
        table.append(f"| {one['tokens']:,} | {name} | {' | '.join(figures)} |")
    return table


def run(arguments: argparse.Namespace, out: Path, end: float) -> None:
    by_model: dict[str, list[dict[str, Any]]] = {}
    for group, case in list_cases(arguments.only):
        by_model.setdefault(f"{group if case['num_layers'] else ''}{case['model']}", []).append(
            case
        )
    traces = []
    if not arguments.no_trace and not arguments.cpu:
        for number, case in enumerate(case for cases in by_model.values() for case in cases):
            file = out.with_name(f"trace-{number}.json")
            words = [sys.executable, __file__, "--out", str(file)]
            words += ["--worker", "trace:" + json.dumps(case)]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
            traces.append((file, subprocess.Popen(words, env=environment)))
    if not arguments.cpu:
        import torch

        head = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "bus": measure_bus(),
            "machine": "H200",
        }
        with out.open("a") as lines:
            lines.write(json.dumps(head) + "\n")
        torch.cuda.empty_cache()
    for cases in by_model.values():
        left = end - time.monotonic()
        words = [sys.executable, __file__, "--out", str(out), "--seconds", str(left)]
        words += ["--worker", json.dumps(cases), *(["--cpu"] if arguments.cpu else [])]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(words, check=False, timeout=max(5.0, left))
    for file, process in traces:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            continue
        if file.exists():
            with out.open("a") as lines:
                lines.write(json.dumps({"trace": json.loads(file.read_text())}) + "\n")


if __name__ == "__main__":
    main()
