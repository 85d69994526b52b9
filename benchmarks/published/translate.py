"""Turn published measurements into jobs for the estimator: rewrites jobs.jsonl, prints counts."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

from sources import BATCHES, GPUS, LITGPT_BATCHES, LITGPT_LORA, MODELS, SOURCES, Job

from tightfit.api.options.training import EstimateOptions
from tightfit.models.resolve import resolve_model

OPTIONS = {field.name for field in fields(EstimateOptions)}
"""What has an option of its own; the rest goes by `--set`."""
HERE = Path(__file__).parent
CATALOGUE = HERE.parents[1] / "src" / "tightfit" / "catalogue" / "models"
Row = dict[str, str]

GIB = 2**30
A100_80GB_MIB = 81_920
# A failed run is an OOM only where the card was seen (1 s polling) nearly full; else cause unknown.
NEARLY_FULL_FRACTION = 0.9


class ExcludedError(Exception):
    """The row cannot be expressed; the argument is the category."""


def source_key(row: Row) -> str:
    """Longest key of SOURCES that the row's source starts with."""
    if row["source"].startswith("huggingface/blog:4bit"):
        return "huggingface/blog:4bit"
    return row["source"].split(":", 1)[0]


def observed_bytes(row: Row) -> tuple[int | None, list[int]]:
    """Bytes used for the comparison, and every reading the printed unit allows."""
    if not row["peak_gpu_GB"]:
        return None, []
    value = float(row["peak_gpu_GB"])
    decimal, binary = round(value * 1e9), round(value * GIB)
    if row["mem_unit"].startswith("GiB"):
        return binary, [binary]
    if row["mem_unit"] == "GB (1e9)":
        return decimal, [decimal]
    return decimal, [decimal, binary]


def observed_kind(row: Row) -> str:
    """Which allocator figure the source prints; a tool not stated counts as device memory."""
    kind = row["mem_kind"]
    if source_key(row) == "modelscope/ms-swift" and "Megatron" not in row["source"]:
        return "reserved"  # max_memory_reserved, see sources.py
    if source_key(row) == "pytorch/ao":
        return "allocated"  # max_memory_allocated, see sources.py
    for word in ("allocated", "active", "reserved"):
        if word in kind:
            return word
    return "device"


def outcome(row: Row) -> str | None:
    """`fits`, `oom` or nothing, from the source's own word."""
    word = row["outcome"]
    if word in ("ok", "fits"):
        return "fits"
    if word == "OOM":
        return "oom"
    used = re.search(r"nvidia-smi used ([\d.]+) MiB", row["notes"])
    if word.startswith("failed"):
        if used and float(used[1]) >= NEARLY_FULL_FRACTION * A100_80GB_MIB:
            return "oom"
        raise ExcludedError("failed, and the card was not seen nearly full: cause unknown")
    return None


SHARDINGS = (
    ("DeepSpeed ZeRO-2", "zero2"),
    ("DeepSpeed ZeRO-3", "zero3"),
    ("FSDP in DDP mode", "ddp"),
    ("FSDP", "fsdp"),
    ("single", "single"),
)


def sharding(row: Row) -> str:
    strategy = row["strategy"]
    if "device_map" in strategy:
        raise ExcludedError("layers split over GPUs by device_map (naive model parallel)")
    if re.search(r"TP\d|PP\d|CP\d|Megatron|Ulysses", strategy):
        raise ExcludedError("tensor, pipeline, context or sequence parallel")
    for prefix, name in SHARDINGS:
        if strategy.startswith(prefix):
            return name
    raise ExcludedError("sharding not expressible")


def method(row: Row) -> tuple[str, bool]:
    """(method, embeddings and head trained too)."""
    name = row["method"]
    if name in ("full", "full (full)", "full (pretraining)"):
        return "full", False
    if name == "LoRA+trainable embed/lm_head":
        return "lora", True
    if name in ("LoRA", "QLoRA", "LORA", "LoRA on int8"):
        return "lora", False
    if name.startswith("lora (") and "dora" not in name:
        return "lora", False
    raise ExcludedError("method not supported")


def quantization(row: Row) -> Job:
    """Base-weight storage where the row names one."""
    quant = row["quant"].lower()
    if not quant:
        return {}
    if "gptq" in quant:
        return {"weights": "gptq4"}
    if "int8" in quant:
        return {"weights": "int8"}
    return {"weights": "nf4", "double_quant": quant.endswith("-dq") or "nq" in quant}


def base_job(row: Row) -> Job:
    """Options that all sources have in common; raises where a required one is not stated."""
    kind, embeddings = method(row)
    batch = row["micro_batch"] or BATCHES.get((source_key(row), row["model"], row["strategy"]))
    if not batch:
        raise ExcludedError("micro-batch not stated")
    model = MODELS.get(row["model"], row["model"])
    if not (CATALOGUE / f"{model.replace('/', '--')}.json").exists():
        raise ExcludedError("model config not found")
    job: Job = {
        "trainer": SOURCES[source_key(row)]["trainer"],
        "checkpointing": row["grad_ckpt"] in ("yes", "full"),
        **deepcopy(SOURCES[source_key(row)]["defaults"]),
        "model": model,
        "method": kind,
        "sharding": sharding(row),
        "gpus": int(row["gpus"]),
        "micro_batch": int(batch),
        "seq_len": int(row["seq_len"]) if row["seq_len"] else None,
        "grad_accum": int(row["grad_accum"] or 1),
        **quantization(row),
    }
    if embeddings:
        job["train_embeddings"] = True
    return job


def translate_qwen(row: Row, job: Job) -> None:
    if row["quant"]:
        job["compute"] = "fp16"


def translate_fsdp_qlora(row: Row, job: Job) -> None:
    del job["checkpointing"]
    if row["quant"]:
        job["double_quant"] = True
    if row["offload"] == "CPU params":
        job["offload"] = "all"


def translate_litgpt(row: Row, job: Job) -> None:
    config = re.search(r"config (\S+\.yaml)", row["notes"])
    del job["checkpointing"]
    whole = 128 if config is None else LITGPT_BATCHES[config[1]]
    if config is None:
        fused_qkv = job["model"].startswith(("stabilityai/", "tiiuae/"))
        job["lora_rank"] = 8
        job["lora_targets"] = ["query_key_value"] if fused_qkv else ["q_proj", "v_proj"]
    elif job["method"] == "lora":
        job["lora_rank"], job["lora_targets"] = LITGPT_LORA[config[1]]
        job["gpus"], job["sharding"] = 1, "single"  # devices: 1 in the yaml
        job["lora_dropout"] = 0.1 if config[1].startswith("gemma") else 0.05
    job["grad_accum"] = whole // job["gpus"] // job["micro_batch"]


def translate_torchtune(row: Row, job: Job) -> None:
    notes = row["notes"]
    if row["offload"] == "activations":
        raise ExcludedError("activation offloading")
    if not row["seq_len"]:
        raise ExcludedError("seq_len not stated")
    if notes.endswith("Baseline"):
        raise ExcludedError("data shorter than the maximum length")
    if "ompile" in notes:
        job["compile"] = True
    if "optimization-flags" in row["source"]:
        job["loss"] = "chunked" if "Chunked" in notes else "plain"
        return
    large = "70B" in row["model"]
    job |= {"loss": "chunked", "checkpointing": True, "lora_rank": 16 if large else 8}
    job["lora_targets"] = ["q_proj", "k_proj", "v_proj"] if large else ["q_proj", "v_proj"]


SWIFT_TARGETS = {
    "qwen": ["c_attn"],
    "chatglm": ["query_key_value"],
    "baichuan": ["W_pack"],
    "yi": ["q_proj", "k_proj", "v_proj"],
    "openbuddy": ["q_proj", "k_proj", "v_proj"],
}


def translate_swift(row: Row, job: Job) -> None:
    family = re.match(r"[a-z]+", row["model"])
    if job["method"] == "lora" and family:
        job["lora_targets"] = SWIFT_TARGETS[family[0]]
    rank = re.search(r"rank[ =](\d+)", row["notes"])
    if rank:
        job["lora_rank"] = int(rank[1])
    if "targets ALL" in row["notes"] or "target=ALL" in row["notes"]:
        job["lora_targets"] = ["all-linear"]
    if row["quant"] == "int4 (bnb)":
        job["double_quant"] = True
    if row["model"].startswith(("chatglm", "baichuan")):
        job["attention"] = "sdpa"  # no flash support registered; assumed, not looked up
    if "flash-attn OFF" in row["notes"]:
        job["attention"] = "eager"  # QWenAttention._attn
    if "packing" in row["method"]:
        job["packing"] = True
    if "Megatron" in row["source"]:
        job |= {"trainer": "ms-swift@3", "packing": True}


def translate_fms(row: Row, job: Job) -> None:
    framework = row["notes"].split(";", 1)[0].removeprefix("framework_config=")
    job["compute"] = "fp16" if row["precision"].startswith("float16") else "bf16"
    if "autocast" not in row["precision"] and job.get("weights") not in ("nf4", "gptq4"):
        job["autocast"] = False
    if job.get("weights") == "nf4":
        job["double_quant"] = True
        if framework != "baseline-peft-bnb":
            job["upcast_unquantized"] = False
    if "foak" in framework:
        job |= {"fused_kernels": True, "loss": "kernel"}
    if framework.endswith("liger"):
        job["loss"] = "fused"
    lora = re.search(r"lora r=(\d+)\S* targets=([^;]*)", row["notes"])
    if job["method"] == "lora" and lora:
        job["lora_rank"], job["lora_targets"] = int(lora[1]), lora[2].split()
    if job["seq_len"] is None:
        job["seq_len"] = 2048 if "santacoder" in job["model"] else 4096


def translate_ao(row: Row, job: Job) -> None:
    if "int8" in row["precision"]:
        raise ExcludedError("quantized or fp8 training")
    if "may be accumulated" in row["notes"]:
        raise ExcludedError("micro-batch not stated")
    if "compile" in row["precision"]:
        job["compile"] = True


def translate_4bit_blog(row: Row, job: Job) -> None:
    job["compute"] = "bf16" if "bf16" in row["quant"] else "fp16"


TRANSLATORS: dict[str, Callable[[Row, Job], None]] = {
    "QwenLM/Qwen": translate_qwen,
    "AnswerDotAI/fsdp_qlora": translate_fsdp_qlora,
    "Lightning-AI/litgpt": translate_litgpt,
    "pytorch/torchtune": translate_torchtune,
    "modelscope/ms-swift": translate_swift,
    "foundation-model-stack/fms-acceleration": translate_fms,
    "pytorch/ao": translate_ao,
    "huggingface/blog:4bit": translate_4bit_blog,
}


def reject_unusable_source(row: Row) -> None:
    """Sources that state too little, or jobs outside the estimator's options."""
    source = row["source"]
    if "method_comparison" in source:
        if row["method"] == "LORA":
            raise ExcludedError("data shorter than the maximum length")
        raise ExcludedError("method not supported")
    if "llama-factory" in source:
        raise ExcludedError("data shorter than the maximum length")
    if "refs_orca" in source or "_moe.csv" in source:
        raise ExcludedError("seq_len not stated")  # padded or padding-free batches, lengths vary
    if not row["peak_gpu_GB"] and row["outcome"] == "ok" and "fsdp_qlora" not in source:
        raise ExcludedError("throughput only, no memory figure")
    if "float8" in row["precision"] or "fp8" in row["precision"].lower():
        raise ExcludedError("quantized or fp8 training")
    if row["grad_ckpt"].startswith("selective"):
        raise ExcludedError("selective activation checkpointing")
    sharding_only = source.startswith(("NVIDIA", "pytorch/torchtitan", "modelscope"))
    if sharding_only:
        sharding(row)
    if source_key(row) not in TRANSLATORS:
        method(row)
        raise ExcludedError(
            "seq_len not stated" if not row["seq_len"] else "micro-batch not stated"
        )


OF_ADAPTERS = ("lora_rank", "lora_targets", "lora_dropout")
UNKNOWN_CARD = "A100-SXM4-80GB"
"""Stands for a card whose memory the source does not print: such a row has no outcome."""


def list_options(job: Job, gpu: str) -> Job:
    """The job as `tightfit.estimate` takes it, which is as its command line does."""
    given = {name: value for name, value in job.items() if value is not None and name != "gpus"}
    if given["method"] == "full":
        given = {name: value for name, value in given.items() if name not in OF_ADAPTERS}
    if "lora_targets" in given:
        # peft takes a list that suits several models and passes over what one of them lacks.
        known = ("all-linear", *resolve_model(job["model"]).module_names)
        given["lora_targets"] = ",".join(name for name in given["lora_targets"] if name in known)
    settings = [
        f"{name}={str(given.pop(name)).lower()}" for name in sorted(given) if name not in OPTIONS
    ]
    return given | {"on": f"{job['gpus']}x{gpu}", **({"settings": settings} if settings else {})}


def translate(row: Row, index: int) -> Job:
    """One row as the options of an estimate, or as an exclusion with its category."""
    try:
        reject_unusable_source(row)
        job = base_job(row)
        TRANSLATORS[source_key(row)](row, job)
        if job["seq_len"] is None:
            raise ExcludedError("seq_len not stated")
        gpu = GPUS.get(row["gpu_type"])
        ended = outcome(row) if gpu else None
    except ExcludedError as reason:
        return {"row": index, "source": row["source"], "excluded_because": str(reason)}
    used, readings = observed_bytes(row)
    return {
        "row": index,
        "source": row["source"],
        "estimate": list_options(job, gpu or UNKNOWN_CARD),
        "outcome": ended,
        "observed_bytes": used,
        "observed_bytes_readings": readings,
        "observed_kind": observed_kind(row) if used else None,
        "notes": row["notes"],
    }


def main() -> None:
    with (HERE / "measurements.csv").open(newline="") as file:
        jobs = [translate(row, index) for index, row in enumerate(csv.DictReader(file))]
    with (HERE / "jobs.jsonl").open("w") as file:
        file.writelines(json.dumps(job, sort_keys=True) + "\n" for job in jobs)
    kept = [job for job in jobs if "excluded_because" not in job]
    memory = [job for job in kept if job["observed_bytes"]]
    print(f"{len(jobs)} rows: {len(kept)} jobs, {len(memory)} with a memory figure")
    print("outcomes:", dict(Counter(str(job["outcome"]) for job in kept)))
    print("memory rows by source:")
    for name, count in Counter(job["source"].split(":")[0] for job in memory).most_common():
        print(f"  {count:4d}  {name}")
    print("left out because:")
    for reason, count in Counter(
        j["excluded_because"] for j in jobs if j not in kept
    ).most_common():
        print(f"  {count:4d}  {reason}")


if __name__ == "__main__":
    main()
