"""Levers: the choices that make a plan faster or smaller, one record each.

What a lever is called, when it is pulled, how it is turned back, and how much it must bring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Loss, Method, Offload, Optimizer, Sharding, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One choice of the strategy, and the strategy without it."""

    name: str
    is_pulled: Callable[[Strategy], bool]
    turned_back: dict[str, Any]
    is_for_memory: bool = False
    """Pulled to make room: any speed-up beside it comes from elsewhere and is not its merit."""
    handicap: float = 1.0
    """How much faster it must make a plan before the plan is preferred to one without it."""
    is_plain: bool = True
    """False: of two plans that are as good, the one without it comes first."""
    details: tuple[str, ...] = ()
    """Further fields that ask for it; the first that is turned back always does."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Of the strategy, that ask for it. The rest of what is turned back only depends on it."""
        return (next(iter(self.turned_back)), *self.details)


def _uses(optimizer: Optimizer, strategy: Strategy) -> bool:
    return strategy.optimizer is optimizer


LEVERS: tuple[Lever, ...] = (
    Lever(
        name="no recomputation",
        is_pulled=lambda s: not s.checkpointing,
        turned_back={"checkpointing": True},
    ),
    Lever(
        name="recomputing activations",
        is_plain=False,
        is_pulled=lambda s: s.checkpointing,
        turned_back={"checkpointing": False, "recomputed_layers": None},
        details=("recomputed_layers",),
    ),
    Lever(
        name="fused kernels",
        is_plain=False,
        is_pulled=lambda s: s.fused_kernels,
        turned_back={"fused_kernels": False},
    ),
    Lever(
        name="fused LoRA",
        is_pulled=lambda s: s.fused_lora,
        turned_back={"fused_lora": False},
    ),
    Lever(name="fp8 products", is_pulled=lambda s: s.fp8, turned_back={"fp8": False}),
    Lever(
        name="fp8 gradients",
        is_pulled=lambda s: s.fp8_gradients,
        turned_back={"fp8_gradients": False},
    ),
    Lever(
        name="dequantized base",
        is_plain=False,
        is_pulled=lambda s: s.dequantized_base,
        turned_back={"dequantized_base": False},
    ),
    Lever(
        name="a loss that never holds all logits",
        is_pulled=lambda s: s.loss is not Loss.PLAIN,
        turned_back={"loss": Loss.PLAIN, "loss_chunk_factor": 1},
    ),
    Lever(
        name="large loss chunks",
        is_plain=False,
        is_pulled=lambda s: s.loss_chunk_factor > 1,
        turned_back={"loss_chunk_factor": 1},
    ),
    # A compiled model takes minutes to warm up, and ran at 0.97x of fused kernels where both were
    # measured (7B LoRA on one H200: 16,557 against 17,130 tokens/s).
    Lever(
        name="compiled layers",
        is_plain=False,
        handicap=1.2,
        is_pulled=lambda s: s.compile,
        turned_back={"compile": False},
    ),
    Lever(
        name="packing",
        is_plain=False,
        is_pulled=lambda s: s.packing,
        turned_back={"packing": False},
    ),
    Lever(
        name="flash attention",
        handicap=1.01,
        is_pulled=lambda s: s.attention is Attention.FLASH,
        turned_back={"attention": Attention.SDPA},
    ),
    *(
        Lever(
            name=optimizer.record.lever,
            is_pulled=partial(_uses, optimizer),
            turned_back={"optimizer": Optimizer.ADAMW},
        )
        for optimizer in Optimizer
        if optimizer.record.lever
    ),
    Lever(
        name="bf16 adapters",
        is_pulled=lambda s: s.method is Method.LORA and s.adapter_dtype is Dtype.BF16,
        turned_back={"adapter_dtype": Dtype.FP32, "fused_lora": False},
    ),
    # Offload ties up pinned host memory and the bus.
    Lever(
        name="offload to host memory",
        is_plain=False,
        handicap=1.3,
        is_for_memory=True,
        is_pulled=lambda s: s.offload is not Offload.NONE and s.world_size > 1,
        turned_back={"offload": Offload.NONE},
    ),
    Lever(
        name="offload to host memory",
        is_plain=False,
        handicap=1.3,
        is_for_memory=True,
        is_pulled=lambda s: s.offload is not Offload.NONE and s.world_size == 1,
        turned_back={"offload": Offload.NONE, "sharding": Sharding.SINGLE},
    ),
    Lever(
        name="sharding over the GPUs",
        is_pulled=lambda s: (
            s.sharding.shards_optimizer and s.world_size > 1 and s.offload is Offload.NONE
        ),
        turned_back={"sharding": Sharding.DDP},
    ),
)
