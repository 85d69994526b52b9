"""Measure peak memory and step time of real training jobs on this machine's GPU, one by one.

    python3 benchmarks/measure_steps.py --out benchmarks/results/h200_steps.json
    python3 benchmarks/measure_steps.py --rates-out benchmarks/results/h200_rates.json --only none
    python3 benchmarks/measure_steps.py --dry-run --out dry_run.json    (no GPU, toy sizes)

Needs torch, transformers and peft; bitsandbytes and liger-kernel for the cases that name them.
Every case runs in a process of its own, forked from one that has torch loaded but no CUDA
context. A case already measured in the output file is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import sys
import time
import traceback
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from _measure_case import Case
from _measure_job import measure_case
from _measure_rates import measure_rates

LLAMA_1B, LLAMA_7B, LLAMA_8B = "Llama-3.2-1B", "Llama-2-7b-hf", "Llama-3.1-8B"
SHAPES = ((1, 512), (4, 1024), (4, 2048), (1, 4096), (2, 4096))
CKPT = "non-reentrant"
GIB = 2**30
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {},
    "Llama-2-7b-hf": {"num_layers": 8},
    "Llama-3.1-8B": {"num_layers": 8},
    "Mistral-7B-v0.1": {"num_layers": 8},
    "SmolLM2-360M": {},
    "Qwen2.5-1.5B": {},
    "Qwen3-0.6B": {},
    "Qwen3-1.7B": {},
    "gemma-2-2b": {"attention": "eager"},
    "gemma-3-1b-it": {},
    "Phi-3-mini-4k-instruct": {"num_layers": 8},
    "phi-2": {},
    "gpt2-large": {},
    "gpt2-xl": {},
    "pythia-1.4b": {},
    "bloom-1b1": {"attention": "eager"},
    "falcon-rw-1b": {},
    "falcon-7b": {"num_layers": 4},
    "codegen-350M-mono": {"attention": "eager"},
    "t5-large": {"seq_len": 512},
    "Mixtral-8x7B-v0.1": {"num_layers": 2},
    "Qwen3-30B-A3B": {"num_layers": 2},
    "gpt-oss-20b": {"num_layers": 2, "attention": "eager"},
}


def make(**options: Any) -> Case:
    batch, length = options.pop("shape", (4, 1024))
    return Case(**{"micro_batch": batch, "seq_len": length, **options})


def shape_cases() -> list[Case]:
    """Full tuning of one small model over shapes, recomputation and attention kernels."""
    full = [
        make(model=LLAMA_1B, shape=shape, checkpointing=mode)
        for shape in SHAPES
        for mode in ("off", CKPT)
    ]
    return [
        *full,
        make(model=LLAMA_1B, shape=(4, 2048), checkpointing="reentrant"),
        make(model=LLAMA_1B, attention="eager"),
        make(model=LLAMA_1B, attention="eager", checkpointing=CKPT),
        make(model=LLAMA_1B, attention="eager", checkpointing=CKPT, shape=(1, 4096)),
        make(model=LLAMA_1B, padding=True),
        make(model=LLAMA_1B, padding=True, checkpointing=CKPT),
        make(model=LLAMA_1B, padding=True, attention="eager"),
        make(model=LLAMA_1B, padding=True, attention="eager", checkpointing=CKPT),
        make(model=LLAMA_7B, shape=(2, 2048), checkpointing=CKPT),
        make(model=LLAMA_8B, shape=(1, 4096), checkpointing=CKPT),
    ]


def lora_cases() -> list[Case]:
    seven = {"model": LLAMA_7B, "method": "lora", "shape": (4, 2048)}
    eight = {"model": LLAMA_8B, "method": "lora"}
    two = {"lora_rank": 8, "lora_targets": "q_proj,v_proj"}
    return [
        make(**seven, checkpointing=CKPT),
        make(**seven, checkpointing=CKPT, keep_outputs=True),
        make(**seven, checkpointing=CKPT, adapters="bf16"),
        make(**seven, checkpointing=CKPT, autocast="bf16"),
        make(**seven, checkpointing=CKPT, **two),
        make(**seven, adapters="bf16"),
        make(**seven | {"shape": (1, 2048)}),
        make(**seven | {"shape": (1, 2048)}, adapters="bf16"),
        make(**seven | {"shape": (1, 2048)}, autocast="bf16"),
        make(**seven | {"shape": (1, 2048)}, lora_dropout=0.05),
        make(**seven | {"shape": (1, 2048)}, **two),
        make(**seven | {"shape": (1, 512)}, **two, adapters="bf16"),
        make(**eight, shape=(2, 4096), checkpointing=CKPT),
        make(**eight, shape=(2, 1024)),
        make(**eight, shape=(2, 1024), adapters="bf16", **two),
    ]


def precision_cases() -> list[Case]:
    mixed = [("fp32", "bf16"), ("fp32", "fp16"), ("fp32", None), ("bf16", "bf16")]
    full = [
        make(model=LLAMA_1B, weights=weights, autocast=autocast, checkpointing=mode)
        for weights, autocast in mixed
        for mode in ("off", CKPT)
    ]
    lora = make(model=LLAMA_1B, method="lora", weights="fp32", autocast="bf16")
    return [*full, lora, dataclasses.replace(lora, autocast="fp16")]


def optimizer_cases() -> list[Case]:
    names = ["adamw-fused", "adamw-foreach", "sgd-momentum", "adafactor", "adamw-8bit"]
    small = {"model": LLAMA_1B, "shape": (2, 512), "checkpointing": CKPT}
    mixed = {**small, "weights": "fp32", "autocast": "bf16"}
    seven = {"model": LLAMA_7B, "shape": (1, 512), "checkpointing": CKPT}
    return [
        *(make(**small, optimizer=name) for name in [*names, "paged-adamw", "paged-adamw-8bit"]),
        *(make(**mixed, optimizer=name) for name in [*names, "paged-adamw"]),
        make(**small, clip=True),
        make(**seven, optimizer="adamw-foreach"),
        make(**seven, optimizer="adamw-8bit"),
    ]


def quantized_cases() -> list[Case]:
    base = {"model": LLAMA_7B, "method": "lora", "shape": (4, 1024)}
    prepared = {**base, "prepare_kbit": True, "autocast": "bf16", "checkpointing": CKPT}
    plain = {**base, "adapters": "bf16", "checkpointing": CKPT}
    kinds = ("nf4", "nf4-double", "int8")
    return [
        *(make(**prepared, weights=kind) for kind in kinds),
        *(make(**plain, weights=kind) for kind in kinds),
        *(make(**plain | {"checkpointing": "off"}, weights=kind) for kind in kinds[1:]),
        make(**prepared | {"autocast": None}, weights="nf4-double"),
        make(**prepared | {"optimizer": "paged-adamw-8bit"}, weights="nf4-double"),
        make(**prepared | {"model": LLAMA_8B, "shape": (2, 2048)}, weights="nf4-double"),
        make(**prepared | {"model": LLAMA_1B, "shape": (2, 1024)}, weights="nf4-double"),
        make(**prepared | {"checkpointing": "off", "shape": (1, 1024)}, weights="nf4-double"),
        *(make(model=LLAMA_7B, task="load", weights=kind) for kind in ("bf16", *kinds)),
        *(make(model=LLAMA_1B, task="load", weights=kind) for kind in ("fp32", *kinds)),
    ]


def loss_cases() -> list[Case]:
    eight = {"model": LLAMA_8B, "method": "lora", "shape": (2, 4096), "checkpointing": CKPT}
    seven = {"model": LLAMA_7B, "method": "lora", "shape": (4, 2048), "adapters": "bf16"}
    return [
        make(model=LLAMA_1B, shape=(4, 2048), loss="fused"),
        make(model=LLAMA_1B, shape=(4, 2048), loss="fused", checkpointing=CKPT),
        make(model=LLAMA_1B, shape=(4, 2048), loss="liger"),
        make(**eight, loss="fused"),
        make(**seven, loss="fused", checkpointing=CKPT),
        make(**seven, loss="liger", checkpointing=CKPT),
        make(**seven, loss="liger"),
        make(model="Qwen3-0.6B", loss="fused", checkpointing=CKPT),
        make(model="gemma-2-2b", attention="eager", loss="fused", checkpointing=CKPT),
    ]


def other_phase_cases() -> list[Case]:
    """Accumulated gradients, evaluation, generation, and how the allocator is set up."""
    two = {"model": LLAMA_1B, "accumulation": 2}
    checkpointed_lora = {"model": LLAMA_7B, "method": "lora", "shape": (4, 2048)}
    checkpointed_lora |= {"checkpointing": CKPT}
    return [
        make(**two),
        make(**two, checkpointing=CKPT),
        make(**two, checkpointing=CKPT, optimizer="adamw-foreach", weights="fp32", autocast="bf16"),
        make(model=LLAMA_1B, task="eval", shape=(4, 2048)),
        make(model=LLAMA_1B, task="eval", shape=(4, 1024), attention="eager"),
        make(model=LLAMA_1B, task="eval", shape=(4, 1024), weights="fp32", autocast="bf16"),
        make(model=LLAMA_7B, task="eval", shape=(4, 2048)),
        make(model=LLAMA_1B, task="generate", shape=(4, 512)),
        make(model=LLAMA_7B, task="generate", shape=(4, 512)),
        make(model="gemma-2-2b", attention="eager", task="generate", shape=(4, 512)),
        make(model=LLAMA_1B, shape=(4, 2048), expandable_segments=True),
        make(model=LLAMA_8B, method="lora", shape=(2, 1024), expandable_segments=True),
        # Room for little more than the allocated peak: does the allocator survive by retrying?
        make(model=LLAMA_8B, method="lora", shape=(2, 1024), memory_cap_bytes=int(37.0 * GIB)),
        make(**checkpointed_lora, memory_cap_bytes=int(18.4 * GIB)),
        make(**checkpointed_lora, memory_cap_bytes=int(18.8 * GIB)),
    ]


def family_cases() -> list[Case]:
    lora = {"method": "lora", "adapters": "bf16"}
    return [
        make(**{"model": model, **sizes, **options})
        for options in ({}, lora, {"checkpointing": CKPT})
        for model, sizes in FAMILIES.items()
    ]


def saved_cases() -> list[Case]:
    return [
        make(**{"model": model, "task": "saved", **sizes, "num_layers": None, "micro_batch": 2})
        for model, sizes in FAMILIES.items()
        if model != "gpt2-xl"
    ]


def sharded_cases() -> list[Case]:
    full = {"model": LLAMA_7B, "weights": "fp32", "shape": (1, 2048), "checkpointing": CKPT}
    lora = {**full, "weights": "bf16", "method": "lora", "adapters": "bf16"}
    return [
        *(make(**full, fsdp_ranks=ranks) for ranks in (2, 4, 8)),
        make(**full | {"checkpointing": "off"}, fsdp_ranks=8),
        make(**full | {"weights": "bf16"}, fsdp_ranks=4),
        make(**full, fsdp_ranks=4, optimizer="adamw-foreach"),
        make(**full, fsdp_ranks=8, offload=True),
        *(make(**lora, fsdp_ranks=ranks) for ranks in (2, 8)),
        make(**lora | {"checkpointing": "off"}, fsdp_ranks=8),
        make(**lora, fsdp_ranks=8, offload=True),
        make(**lora | {"weights": "fp32", "adapters": "fp32"}, fsdp_ranks=4),
        make(**full | {"model": LLAMA_8B}, fsdp_ranks=8),
    ]


def all_cases() -> list[Case]:
    groups = [
        *(lora_cases(), quantized_cases(), sharded_cases(), precision_cases()),
        *(optimizer_cases(), loss_cases(), other_phase_cases(), shape_cases()),
        *(family_cases()[: len(FAMILIES)], saved_cases(), family_cases()),
    ]
    # A case reached from two groups is measured once.
    return list(dict.fromkeys(case for group in groups for case in group))


def load_libraries() -> None:
    """Import what every case needs before the first fork: seconds once instead of per case.

    Where bitsandbytes is installed peft imports it, and that starts CUDA, which a fork does not
    survive; peft then loads in each case instead.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a device must not start CUDA
    import accelerate  # noqa: F401
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: F401

    if importlib.util.find_spec("bitsandbytes") is None:
        import peft  # noqa: F401
    transformers.logging.set_verbosity_error()
    families = "llama mistral qwen2 qwen3 gemma2 gemma3 phi phi3 gpt2 gpt_neox bloom falcon"
    for family in f"{families} codegen t5 mixtral qwen3_moe gpt_oss".split():
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    gc.freeze()  # a child's collector then leaves the parent's pages alone


def run_in_child(pipe: Connection, case: Case | None, device: str, dry_run: bool) -> None:
    try:
        if case is None:
            report = measure_rates(dry_run=dry_run)
        else:
            report = measure_case(case, device=device, dry_run=dry_run)
        report["status"] = "ok"
    except torch.OutOfMemoryError as error:
        report = {"status": "oom", "error": str(error)[:400]}
    except Exception as error:
        where = traceback.format_exc(limit=-3)
        report = {"status": "error", "error": f"{error}"[:400], "traceback": where[-1500:]}
    if torch.cuda.is_initialized():
        report["gpu"] = torch.cuda.get_device_name()
    pipe.send(report)


def run_forked(
    case: Case | None, *, device: str, dry_run: bool, timeout_seconds: float
) -> dict[str, Any]:
    """Run one case in a forked process and stop that process if it takes too long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_in_child, args=(sender, case, device, dry_run))
    start = time.perf_counter()
    child.start()
    sender.close()
    report: dict[str, Any] = {"status": "timeout"}
    if receiver.poll(timeout_seconds):
        report = {"status": "died"}
        with contextlib.suppress(EOFError):
            report = receiver.recv()
    else:
        child.kill()
    child.join()
    return report | {"wall_seconds": round(time.perf_counter() - start, 2)}


def bare(argument: str) -> str:
    """An argument without the folders of the machine it was typed on."""
    return argument.rpartition("/")[2]


def describe_machine() -> dict[str, Any]:
    versions = {}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commands": [" ".join(["python3 benchmarks/measure_steps.py", *map(bare, sys.argv[1:])])],
        "python": platform.python_version(),
        "num_cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the whole report at once: the header first, then one line per case or table row."""
    lines = []
    for key, value in report.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    partial = path.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(path)


def summarize(case: Case, report: dict[str, Any]) -> str:
    numbers = "  ".join(
        f"{report.get(key, 0) / GIB:8.3f}"
        for key in ("allocated_after_load_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
    )
    pace = f"{report.get('step_seconds', 0):7.3f}s wall {report['wall_seconds']:5.1f}s"
    tail = report.get("peak_phase") or report.get("error", "")[:150]
    return f"{report['status']:7} {numbers}  {pace}  {case.name}  {tail}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="only cases that match")
    parser.add_argument("--out", type=Path, default=Path("steps.json"))
    parser.add_argument("--rates-out", type=Path, help="also measure the device's raw rates")
    parser.add_argument("--case-timeout-seconds", type=float, default=60.0)
    parser.add_argument("--deadline-seconds", type=float, default=float("inf"))
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    start = time.perf_counter()
    cases = [case for case in all_cases() if re.search(arguments.only, case.name)]
    if arguments.list:
        print(*(case.name for case in cases), sep="\n")
        return
    header = describe_machine()
    known: dict[str, Any] = {}
    if arguments.out.exists():
        earlier = json.loads(arguments.out.read_text())
        known = {row["name"]: row for row in earlier["cases"] if row["status"] in ("ok", "oom")}
        header["commands"] = [*earlier["commands"], *header["commands"]]
        header["versions"] = earlier["versions"] | header["versions"]
        header["notes"] = earlier.get("notes", [])
    load_libraries()
    options: dict[str, Any] = {
        "device": "cpu" if arguments.dry_run else "cuda",
        "rehearse": arguments.dry_run,
        "timeout_seconds": arguments.case_timeout_seconds,
    }
    if arguments.rates_out:
        rates = run_forked(None, **options)
        write_report(arguments.rates_out, {**header, **rates})
        print(f"rates {rates['status']} {rates.get('error', '')} {rates['wall_seconds']}s")
    for case in cases:
        if case.name in known or time.perf_counter() - start > arguments.deadline_seconds:
            continue
        report = run_forked(case, **options)
        header.setdefault("gpu", report.pop("gpu", None))
        report.pop("gpu", None)
        known[case.name] = {"name": case.name, "options": dataclasses.asdict(case), **report}
        write_report(arguments.out, {**header, "cases": list(known.values())})
        print(summarize(case, report), flush=True)
    left = sum(case.name not in known for case in cases)
    print(f"{len(known)} measured, {left} left, {time.perf_counter() - start:.0f}s")


if __name__ == "__main__":
    main()
