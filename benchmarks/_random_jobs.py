"""Random jobs over what the planner can choose, on several models and generations of cards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.optimizers import Optimizer as Kind
from tightfit.core.settings import Loss, Method, Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Gpu, Node
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.planning.rules import Case, find_first_violation
from tightfit.planning.space import choose_attention, choose_compute_dtype, must_repeat_keys

MODELS = (
    "Llama-3.2-1B",
    "Llama-3.1-8B",
    "Llama-2-7b-hf",
    "Llama-2-13b-hf",
    "SmolLM2-360M",
    "Qwen2.5-1.5B",
    "Qwen2.5-7B",
    "Qwen3-1.7B",
    "Qwen3-4B",
    "Qwen3-30B-A3B",
    "bloom-1b1",
    "bloom-3b",
    "Mistral-7B-v0.1",
    "pythia-1.4b",
    "pythia-6.9b",
    "Phi-3-mini-4k-instruct",
    "phi-2",
    "gemma-2b",
    "gemma-2-2b",
    "gpt2-large",
    "falcon-7b",
    "PowerLM-3b",
    "t5-small",
)
CARDS = ("T4", "V100-32GB", "RTX 4090", "A100-80GB", "H200")
SHARDINGS = {
    Sharding.SINGLE: 5,
    Sharding.DDP: 3,
    Sharding.FSDP: 4,
    Sharding.FSDP_GRAD_OP: 1,
    Sharding.FSDP_HYBRID: 1,
    Sharding.ZERO1: 1,
    Sharding.ZERO2: 1,
    Sharding.ZERO3: 2,
}
"""How often each is drawn, among draws that a rule may still forbid."""
OPTIMIZERS = {
    Kind.ADAMW: 6,
    Kind.ADAMW_8BIT: 2,
    Kind.ADAMW_PAGED_8BIT: 1,
    Kind.ADAMW_FOREACH: 1,
    Kind.SGD_MOMENTUM: 1,
    Kind.ADAFACTOR: 1,
}


def draw_jobs(seed: int) -> Iterator[tuple[str, Gpu, Strategy]]:
    """Endless; a draw that a rule forbids is drawn again, model and card included."""
    chance = random.Random(seed)
    while True:
        name, gpu = chance.choice(MODELS), find_gpu(chance.choice(CARDS))
        spec = resolve_model(name)
        strategy = _draw(chance, spec, gpu)
        node = Node(gpu=gpu, num_gpus=strategy.gpus_per_node)
        case = Case(spec=spec, strategy=strategy, node=node, num_nodes=strategy.num_nodes)
        if find_first_violation(case) is None:
            yield name, gpu, strategy


def _draw(chance: random.Random, spec: ModelSpec, gpu: Gpu) -> Strategy:
    node = Node(gpu=gpu, num_gpus=1)
    half = choose_compute_dtype(spec, gpu)
    sharding = _weighted(chance, SHARDINGS)
    is_many = sharding is not Sharding.SINGLE
    best = choose_attention(spec, node, compute=half)
    is_packed = chance.random() < 0.2
    attention = chance.choice((best, best, Attention.FLASH if is_packed else Attention.EAGER))
    checkpointing = chance.random() < 0.6
    is_selective = checkpointing and chance.random() < 0.2
    return Strategy(
        **_draw_precision(chance, half),
        attention=attention,
        repeat_keys=attention is best
        and must_repeat_keys(spec, node, attention=best, compute=half),
        packing=is_packed,
        lora_rank=chance.choice((8, 16, 64)),
        optimizer=_weighted(chance, OPTIMIZERS),
        micro_batch=chance.choice((1, 2, 4, 8)),
        seq_len=chance.choice((512, 1024, 2048, 4096)),
        grad_accum=chance.choice((1, 1, 2)),
        checkpointing=checkpointing,
        recomputed_layers=chance.randrange(1, spec.num_layers) if is_selective else None,
        loss=chance.choice(tuple(Loss)),
        fused_kernels=chance.random() < 0.3,
        compile=chance.random() < 0.05,
        sharding=sharding,
        offload=chance.choice(tuple(Offload)) if chance.random() < 0.05 else Offload.NONE,
        num_nodes=2 if sharding is Sharding.FSDP_HYBRID else 1,
        gpus_per_node=chance.choice((2, 4, 8)) if is_many else 1,
    )


def _draw_precision(chance: random.Random, half: Dtype) -> dict[str, Any]:
    """Number formats as the planner pairs them, and fp32 bases, which users can set."""
    is_fp16 = half is Dtype.FP16
    full = [Dtype.FP32] if is_fp16 else [half, Dtype.FP32]
    pairs = [(Method.FULL, weights) for weights in full]
    pairs += [(Method.LORA, weights) for weights in (half, Dtype.NF4, Dtype.INT8, Dtype.FP32)]
    method, weights = chance.choice(pairs)
    return {
        "method": method,
        "weights": weights,
        "compute": half,
        "adapter_dtype": half if half is Dtype.BF16 else Dtype.FP32,
        "autocast": is_fp16 and method is Method.LORA,
    }


def _weighted(chance: random.Random, weights: dict[Any, int]) -> Any:
    return chance.choices(list(weights), list(weights.values()))[0]
