"""What the ZeRO runs and their reference share: a tiny model, its plans, its batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shard_cases
from tightfit.core.dtypes import Dtype
from tightfit.core.objectives import ExampleKind
from tightfit.core.settings import Method, Offload, Schedule, Sharding
from tightfit.core.strategy import Strategy, Training
from tightfit.data.token_store import TokenStore
from tightfit.estimation.job import estimate_job
from tightfit.hardware.local import CpuReading, describe_cpu
from tightfit.hardware.types import Node
from tightfit.models.config import read_config_file
from tightfit.planning.plan import Plan, PlanHardware
from tightfit.training.batches import IGNORED, Batch
from tightfit.training.distributed import DistContext
from tightfit.training.loop import learning_rate_at
from tightfit.training.step import mix_seed, train_step

NUM_RANKS = 2
NUM_MICRO = 2
NUM_STEPS = 8
SAVED_AT = 4
VOCAB = 128
MICRO_BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of running the same job."""

    sharding: Sharding
    method: Method
    offload: Offload = Offload.NONE
    compute: Dtype = Dtype.FP32
    checkpointing: bool = False
    num_ranks: int = NUM_RANKS
    model: str = "llama"

    @property
    def name(self) -> str:
        parts = (self.sharding.value, self.offload.value, self.method.value, self.compute.value)
        name = "-".join(parts) + ("-checkpointed" if self.checkpointing else "")
        return name if self.model == "llama" else f"{name}-{self.model}"


CASES = (
    Case(sharding=Sharding.ZERO1, method=Method.LORA, checkpointing=True),
    Case(sharding=Sharding.ZERO1, method=Method.FULL, offload=Offload.OPTIMIZER),
    Case(sharding=Sharding.ZERO2, method=Method.LORA),
    Case(
        sharding=Sharding.ZERO2,
        method=Method.FULL,
        offload=Offload.OPTIMIZER,
        checkpointing=True,
    ),
    Case(sharding=Sharding.ZERO3, method=Method.FULL),
    Case(sharding=Sharding.ZERO3, method=Method.FULL, offload=Offload.OPTIMIZER),
    Case(sharding=Sharding.ZERO3, method=Method.LORA, offload=Offload.ALL, checkpointing=True),
    Case(sharding=Sharding.ZERO2, method=Method.FULL, model="mixture"),
    Case(sharding=Sharding.ZERO3, method=Method.FULL, checkpointing=True, model="mixture"),
)
"""Every stage with every offload it knows, both methods, with and without recomputation."""
_RESUMED = {
    (Sharding.ZERO1, Offload.NONE, Method.LORA),
    (Sharding.ZERO2, Offload.OPTIMIZER, Method.FULL),
    (Sharding.ZERO3, Offload.NONE, Method.FULL),
    (Sharding.ZERO3, Offload.ALL, Method.LORA),
}
RESUMED = tuple(
    case
    for case in CASES
    if (case.sharding, case.offload, case.method) in _RESUMED and case.model == "llama"
)


PREFERENCES: dict[str, dict[str, Any]] = {
    "zero2-dpo": {"sharding": "zero2", "objective": "dpo", "loss": "fused"},
    "zero3-dpo": {"sharding": "zero3", "objective": "dpo", "precompute_reference": True},
}


def make_trainer(folder: Path, context: DistContext, **changes: Any) -> shard_cases.Trainer:
    """Of pairs that `write_models` has drawn."""
    plan = shard_cases.make_plan(
        folder / "llama", method=Method.LORA, gpus_per_node=context.world_size, **changes
    )
    return shard_cases.Trainer(plan, TokenStore(folder / "pairs" / "train"), context)


def write_models(folder: Path) -> None:
    """A tiny Llama with tied embeddings and a Qwen3-MoE, in fp32; and rows of pairs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    own = {
        "llama": {"model_type": "llama", "tie_word_embeddings": True},
        "mixture": {"model_type": "qwen3_moe", "head_dim": 16, **mixture},
    }
    auto: Any = AutoConfig
    library: Any = AutoModelForCausalLM
    for name, changes in own.items():
        torch.manual_seed(0)
        model: Any = library.from_config(auto.for_model(**settings | changes))
        model.save_pretrained(folder / name)
    shard_cases.make_store(folder / "pairs", num_rows=24, example=ExampleKind.PAIR)


def make_plan(folder: Path, case: Case) -> Plan:
    """A plan for processes on a CPU, as the planner would hand it to a worker."""
    folder = folder / case.model
    spec = read_config_file(folder / "config.json", name="tiny")
    strategy = Strategy(
        method=case.method,
        weights=case.compute,
        compute=case.compute,
        adapter_dtype=case.compute,
        lora_rank=4,
        micro_batch=MICRO_BATCH,
        grad_accum=NUM_MICRO * NUM_RANKS // case.num_ranks,
        seq_len=24,
        checkpointing=case.checkpointing,
        sharding=case.sharding,
        offload=case.offload,
        gpus_per_node=case.num_ranks,
    )
    node = Node(gpu=_cpu(), num_gpus=case.num_ranks, host_memory_bytes=8 * 2**30)
    return Plan(
        tightfit_version="0",
        model=spec,
        strategy=strategy,
        hardware=PlanHardware(group="cpu", node=node, num_nodes=1, source="words"),
        data=None,
        num_epochs=1.0,
        effective_batch=MICRO_BATCH * NUM_MICRO * NUM_RANKS,
        estimate=estimate_job(spec=spec, strategy=strategy, node=node),
        cost=None,
        training=make_training(folder),
        why=(),
    )


def make_training(folder: Path) -> Training:
    """Clipping and decay both bite, so that an error in either shows."""
    return Training(
        model_path=str(folder),
        learning_rate=3e-3,
        schedule=Schedule.COSINE,
        warmup_fraction=0.1,
        weight_decay=0.1,
        max_grad_norm=0.5,
        seed=7,
    )


def make_batches(step: int) -> list[Batch]:
    """All micro-batches of a step, over all ranks, each with its own number of trained tokens."""
    draw = torch.Generator().manual_seed(1000 + step % 4)
    batches = []
    for number in range(NUM_MICRO * NUM_RANKS):
        tokens = torch.randint(0, VOCAB, (MICRO_BATCH, 16 + number), generator=draw)
        labels = tokens.clone()
        labels[:, : 3 + 2 * number] = IGNORED
        mask = torch.ones_like(tokens)
        batches.append({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    return batches


def run_step(engine: Any, step: int, training: Training, *, rank: int, num_ranks: int) -> Any:
    """One step on this rank's share."""
    batches = make_batches(step)
    mine = batches[rank::num_ranks]
    return train_step(
        engine,
        mine,
        divisor=count_trained(batches),
        learning_rate=learning_rate_at(step, NUM_STEPS, training),
        seeds=tuple(mix_seed(training.seed, step, number, rank) for number in range(len(mine))),
    )


def count_trained(batches: list[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)


def _cpu() -> Any:
    from tightfit.hardware.machine import read_machine

    chip = CpuReading(model="made up", hz=2e9, flags=frozenset({"avx2"}))
    return describe_cpu(read_machine(), chip)
