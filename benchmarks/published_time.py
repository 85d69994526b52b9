"""Predicted against published training speed, job by job.

    python benchmarks/published_time.py [--all]

Reads `published/measurements.csv` and the jobs that `published/translate.py` made of it, adds the
speed-only source that it leaves out (llm-foundry), our own H200 table, and the steps that
`measure_steps.py` timed.
Rows are evidence, not training data: nothing here feeds back into the estimator.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _provenance import provenance
from h200_memory import list_targets
from tightfit.api.estimate import estimate
from tightfit.core.errors import UserError
from tightfit.core.strategy import Quirks, Strategy
from tightfit.estimation.result import StepTime
from tightfit.estimation.step_time import estimate_step_time
from tightfit.estimation.weights import num_trainable
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.models.config import read_config
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "published_time.json"
NOISE = 0.002
"""A change of an error smaller than this is not "worse"."""
Row = dict[str, str]
GBIT = 1e9 / 8
CLUSTER_NETWORK = {"A100": 1600 * GBIT, "H100": 3200 * GBIT, "H200": 3200 * GBIT}
"""Adapters of an 8-GPU node as DGX and cloud servers of that generation come; not stated."""

# Batches hold rows of the data's own lengths, which the source does not give.
VARYING_LENGTHS = ("Lightning-AI/litgpt", "modelscope/ms-swift", "huggingface/peft", "unslothai")

MPT_SIZES = {  # (width, layers, heads): llm-foundry scripts/train/yamls/pretrain
    **{"125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12)},
    **{"1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32)},
    **{"13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64)},
}


class ExcludedError(Exception):
    """The row cannot be expressed or compared; the argument says why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured job, as the estimator takes it."""

    group: str
    label: str
    spec: ModelSpec
    strategy: Strategy
    node: Node
    tokens_per_second: float
    network_bytes_per_second: float | None = None

    def predict(self) -> StepTime:
        return estimate_step_time(
            spec=self.spec,
            strategy=self.strategy,
            node=self.node,
            network_bytes_per_second=self.network_bytes_per_second,
            num_trainable=num_trainable(self.spec, self.strategy),
        )


def measured_tokens_per_second(row: Row, strategy: Strategy) -> float:
    """Tokens per second of the whole job, from whichever figure the source prints."""
    if row["s_per_step"] and "optimizer step" in row["step_is"]:
        return strategy.tokens_per_step / float(row["s_per_step"])
    if row["tokens_per_s"]:
        per_gpu = row["tput_scope"].startswith("per GPU")
        return float(row["tokens_per_s"]) * (strategy.world_size if per_gpu else 1)
    raise ExcludedError("no speed stated")


def place(gpu: str, num_gpus: int, num_nodes: int | None = None) -> tuple[Node, dict[str, int]]:
    nodes = num_nodes or max(1, num_gpus // 8)
    per_node = num_gpus // nodes
    has_nvlink = False if "RTX" in gpu else None
    node = Node(gpu=find_gpu(gpu), num_gpus=per_node, has_nvlink=has_nvlink)
    return node, {"num_nodes": nodes, "gpus_per_node": per_node}


def network_of(gpu: str) -> float | None:
    return next((speed for name, speed in CLUSTER_NETWORK.items() if name in gpu), None)


def case_from_job(job: dict[str, Any], row: Row) -> Case:
    """The job as `tightfit estimate` reads its options, on nodes with the network of their time."""
    if any(row["source"].startswith(source) for source in VARYING_LENGTHS):
        raise ExcludedError("real row lengths not stated")
    if job["outcome"] is None:
        raise ExcludedError("GPU not in the catalogue")
    found = estimate(**job["estimate"])
    gpu = found.group.node.gpu.name
    stated = re.search(r"(\d+) node\(s\)", row["notes"])
    node, spread = place(gpu, found.strategy.world_size, int(stated[1]) if stated else None)
    strategy = found.strategy.model_copy(update=spread)
    return Case(
        group=row["source"].split("@")[0].split("#")[0],
        label=f"{found.spec.name} {describe(strategy)}",
        spec=found.spec,
        strategy=strategy,
        node=node,
        tokens_per_second=measured_tokens_per_second(row, strategy),
        network_bytes_per_second=network_of(gpu),
    )


def describe(strategy: Strategy) -> str:
    words = [strategy.method.value, strategy.weights.value, strategy.sharding.value]
    words += [f"{strategy.micro_batch}x{strategy.seq_len}", f"x{strategy.world_size}"]
    words += ["ckpt"] * strategy.checkpointing + ["fused"] * strategy.fused_kernels
    return " ".join(words + ["compile"] * strategy.compile)


def mpt_spec(name: str) -> ModelSpec:
    width, layers, heads = MPT_SIZES[name]
    config = {"model_type": "mpt", "d_model": width, "n_layers": layers, "n_heads": heads}
    return read_config({**config, "vocab_size": 50368}, name=f"MPT-{name}", source="llm-foundry")


def case_from_foundry(row: Row) -> Case:
    if "fp8" in row["precision"]:
        raise ExcludedError("fp8")
    size = re.match(r"MPT-(\w+)", row["model"])
    assert size is not None
    gpu = {"H100 80GB": "H100-SXM5-80GB", "A100 80GB": "A100-SXM4-80GB"}.get(
        row["gpu_type"], "A100-SXM4-40GB"
    )
    node, spread = place(gpu, int(row["gpus"]))
    sharding = "fsdp-grad-op" if "GRAD_OP" in row["strategy"] else "fsdp"
    strategy = Strategy(
        **{"method": "full", "weights": "fp32", "attention": "flash", "sharding": sharding},
        micro_batch=int(row["micro_batch"]),
        seq_len=int(row["seq_len"]),
        grad_accum=int(row["grad_accum"]),
        checkpointing=row["grad_ckpt"] == "yes",
        **spread,
    )
    spec = mpt_spec(size[1])
    return Case(
        group="mosaicml/llm-foundry " + row["gpu_type"],
        label=f"{spec.name} {describe(strategy)}",
        spec=spec,
        strategy=strategy,
        node=node,
        tokens_per_second=measured_tokens_per_second(row, strategy),
        network_bytes_per_second=network_of(gpu),
    )


def published_cases() -> tuple[list[Case], Counter[str]]:
    """Every row with a speed, as a case or as a counted reason why not."""
    with (HERE / "published" / "measurements.csv").open() as file:
        rows = list(csv.DictReader(file))
    jobs = [json.loads(line) for line in (HERE / "published" / "jobs.jsonl").open()]
    cases, left_out = [], Counter[str]()
    for row, job in zip(rows, jobs, strict=True):
        if not (row["tokens_per_s"] or row["s_per_step"] or row["samples_per_s"]):
            continue
        try:
            if row["source"].startswith("mosaicml/llm-foundry"):
                cases.append(case_from_foundry(row))
            elif "excluded_because" in job:
                raise ExcludedError(job["excluded_because"])
            else:
                cases.append(case_from_job(job, row))
        except (ExcludedError, UserError) as reason:
            left_out[str(reason)] += 1
    return cases, left_out


H200_JOBS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("Llama-2-7b", {"adapter_dtype": "fp32"}, 7218),
    ("Llama-2-7b", {}, 9283),
    ("Llama-2-7b", {"fused_kernels": True, "loss": "fused"}, 11833),
    ("Llama-2-7b", {"fused_kernels": True, "loss": "fused", "checkpointing": False}, 17130),
    ("Llama-2-7b", {"compile": True, "loss": "fused"}, 11745),
    ("Llama-2-7b", {"compile": True, "loss": "fused", "checkpointing": False}, 16557),
    ("Llama-2-7b", {"method": "full", "compile": True, "loss": "fused"}, 10042),
    (
        "Llama-2-7b",
        {"method": "full", "compile": True, "loss": "fused", "checkpointing": False},
        12976,
    ),
    ("Llama-3.1-8B", {"compile": True, "loss": "fused", "checkpointing": False}, 15476),
    ("Llama-3.2-1B", {"method": "full", "checkpointing": False}, 60084),
    (
        "Llama-3.2-1B",
        {"method": "full", "compile": True, "loss": "fused", "checkpointing": False}
        | {"micro_batch": 16},
        68259,
    ),
)
"""Tokens per second on one H200, torch 2.11, 4 x 2048 tokens unless said otherwise."""


def h200_cases() -> Iterator[Case]:
    node = Node(gpu=find_gpu("H200-SXM"), num_gpus=1)
    for model, options, speed in H200_JOBS:
        strategy = Strategy(**{"micro_batch": 4, "seq_len": 2048, **options})
        yield Case(
            group="our own table, H200",
            label=f"{model} {describe(strategy)}",
            spec=resolve_model(model),
            strategy=strategy,
            node=node,
            tokens_per_second=speed,
        )


STEPS = HERE / "results" / "h200_steps.json"
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
CATALOGUE = HERE.parent / "src" / "tightfit" / "catalogue" / "models"


def measured_spec(options: dict[str, Any]) -> ModelSpec:
    """The model as `measure_steps.py` built it: some are cut to a few layers."""
    (path,) = CATALOGUE.glob(f"*--{options['model']}.json")
    fields = json.loads(path.read_text())
    if options["num_layers"] is not None:
        fields |= {key: options["num_layers"] for key in LAYER_KEYS if key in fields}
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][: options["num_layers"]]
    return read_config(fields, name=options["model"], source=path.name)


def measured_strategy(options: dict[str, Any], spec: ModelSpec) -> Strategy:
    weights = options["weights"].removesuffix("-double")
    is_packed = weights in ("nf4", "int8")
    if options["prepare_kbit"] and not options["autocast"]:
        raise ExcludedError("upcast norms without autocast, as no plan of ours sets it")
    optimizer = options["optimizer"].removesuffix("-fused")
    same = ("method", "lora_rank", "micro_batch", "seq_len", "attention")
    return Strategy(
        **{name: options[name] for name in same},
        weights=weights,
        double_quant=options["weights"].endswith("-double"),
        upcast_unquantized=options["prepare_kbit"],
        compute=options["autocast"] or ("bf16" if is_packed else weights),
        autocast=bool(options["autocast"]),
        adapter_dtype=options["adapters"],
        lora_targets=list_targets(options["lora_targets"], spec),
        optimizer={
            "paged-adamw": "adamw",
            "paged-adamw-8bit": "adamw-paged-8bit",
        }.get(optimizer, optimizer),
        grad_accum=options["accumulation"],
        checkpointing=options["checkpointing"] != "off",
        loss="plain" if options["loss"] == "plain" else "fused",
        fused_kernels=options["loss"] == "liger",
        quirks=Quirks(plain_modelling=True),
    )


def measured_cases() -> Iterator[Case]:
    """Training steps that `measure_steps.py` timed on one H200."""
    if not STEPS.exists():
        return
    node = Node(gpu=find_gpu("H200-SXM"), num_gpus=1)
    for row in json.loads(STEPS.read_text())["cases"]:
        options = row["options"]
        if row["status"] != "ok" or options["task"] != "train" or options["fsdp_ranks"]:
            continue
        with contextlib.suppress(ExcludedError):
            spec = measured_spec(options)
            strategy = measured_strategy(options, spec)
            yield Case(
                group="measured steps, H200",
                label=f"{spec.name} {describe(strategy)}",
                spec=spec,
                strategy=strategy,
                node=node,
                tokens_per_second=strategy.tokens_per_step / row["step_seconds"],
            )


def summarize(cases: list[Case]) -> dict[str, float]:
    steps = [(case.predict(), case.tokens_per_second) for case in cases]
    found = [step.tokens_per_second / measured for step, measured in steps]
    errors = sorted(abs(ratio - 1) for ratio in found)
    # A job predicted too fast by some factor took that factor times the predicted seconds.
    inside = statistics.fmean(
        step.seconds_per_step_low <= ratio * step.seconds_per_step <= step.seconds_per_step_high
        for ratio, (step, _) in zip(found, steps, strict=True)
    )
    return {
        "jobs": len(found),
        "median_ratio": round(statistics.median(found), 4),
        "median_error": round(statistics.median(errors), 4),
        "p90_error": round(errors[min(len(errors) - 1, int(0.9 * len(errors)))], 4),
        "inside_range": round(inside, 4),
    }


def render(name: str, row: dict[str, float]) -> str:
    return (
        f"{name:62} {row['jobs']:4} {row['median_ratio']:7.2f} "
        f"{row['median_error']:7.1%} {row['p90_error']:7.1%} {row['inside_range']:7.0%}"
    )


def check(totals: dict[str, dict[str, float]]) -> list[str]:
    """What got worse since the committed result."""
    before = json.loads(RESULT.read_text())["groups"]
    return [
        f"{name}: {key} got worse: {row[key]} -> {totals[name][key]}"
        for name, row in before.items()
        for key in ("median_error", "p90_error")
        if totals[name][key] > row[key] + NOISE
    ]


def describe_case(case: Case) -> str:
    """Predicted and measured tokens per second, their ratio, and where the time goes."""
    step = case.predict()
    speed, measured = step.tokens_per_second, case.tokens_per_second
    parts = " ".join(
        f"{name} {seconds / step.seconds_per_step:.0%}"
        for name, seconds in step.components.items()
        if seconds > 0.02 * step.seconds_per_step
    )
    head = f"{case.group[-24:]:24} {case.label:62}"
    return f"{head} {speed:10.0f} {measured:10.0f} {speed / measured:5.2f}  {parts}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--all", action="store_true", help="print every job")
    parser.add_argument("--check", action="store_true", help="compare with the committed result")
    arguments = parser.parse_args()
    cases, left_out = published_cases()
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in [*h200_cases(), *measured_cases(), *cases]:
        groups[case.group].append(case)
    if arguments.all:
        for case in (case for members in groups.values() for case in members):
            print(describe_case(case))
    totals = {name: summarize(members) for name, members in groups.items()}
    totals["all published"] = summarize(cases)
    print(f"{'source':62} jobs   ratio  median     90%  in range")
    for name, row in totals.items():
        print(render(name, row))
    print("left out:")
    for reason, count in left_out.most_common():
        print(f"  {count:4} {reason}")
    if arguments.check:
        problems = check(totals)
        print("\n".join(f"error: {error}" for error in problems) or "published time: all good")
        return 1 if problems else 0
    head = provenance("benchmarks/published_time.py")
    content = {**head, "groups": totals, "left_out": dict(left_out.most_common())}
    RESULT.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
