"""The DeepSpeed config of a plan: every number that the memory estimate counts on, written out."""

from __future__ import annotations

from typing import Any

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Sharding, Strategy
from tightfit.estimate.buffers import ZERO3_LIVE_VALUES, ZERO_BUCKET_VALUES
from tightfit.planning.plan import Plan

_STAGES = {Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}
_PERSISTENT_HIDDEN_SIZES = 10
"""ZeRO-3 leaves parameters below so many times the hidden size whole on every rank: norms and
biases, too small to be worth a message each. As transformers' Trainer sets it."""
_SUB_GROUP_VALUES = 1_000_000_000
"""Values that one optimizer call of ZeRO-3 takes; DeepSpeed's default."""


def make_zero_config(plan: Plan) -> dict[str, Any]:
    """What `deepspeed.initialize` is told. The optimizer is handed over apart.

    Meanings: https://www.deepspeed.ai/docs/config-json/.
    """
    strategy = plan.strategy
    clip = None if plan.training is None else plan.training.max_grad_norm
    return {
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.grad_accum,
        "gradient_clipping": clip or 0.0,
        # Torch's optimizers, offloaded or not: DeepSpeed knows them by no list of its own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
        **_precision(strategy.compute),
        "zero_optimization": _zero(plan, strategy),
    }


def _precision(compute: Dtype) -> dict[str, Any]:
    """16-bit weights and gradients beside an fp32 master copy, or fp32 throughout.

    A step whose gradients are not finite is left out in every precision.
    """
    return {
        "bf16": {"enabled": compute is Dtype.BF16, "check_grad_overflow": True},
        # Scaled as torch's GradScaler scales: from 2^16, halved at once, doubled after 2000 steps.
        "fp16": {
            "enabled": compute is Dtype.FP16,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
            "min_loss_scale": 1,
        },
        "data_types": {"grad_accum_dtype": compute.value},
    }


def _zero(plan: Plan, strategy: Strategy) -> dict[str, Any]:
    stage = _STAGES[strategy.sharding]
    fields = make_stage3_fields(plan.model.hidden_size) if stage == 3 else _stages_1_and_2()
    is_pinned = not plan.hardware.node.gpu.is_cpu
    if strategy.offload.moves_optimizer:
        fields["offload_optimizer"] = {"device": "cpu", "pin_memory": is_pinned}
    if strategy.offload.moves_params:
        fields["offload_param"] = {"device": "cpu", "pin_memory": is_pinned}
    return {"stage": stage, **fields}


def _stages_1_and_2() -> dict[str, Any]:
    return {
        "reduce_bucket_size": ZERO_BUCKET_VALUES,
        "allgather_bucket_size": ZERO_BUCKET_VALUES,
        "contiguous_gradients": True,
        # Overlap holds a second bucket, which the estimate does not.
        "overlap_comm": False,
        "reduce_scatter": True,
    }


def make_stage3_fields(hidden_size: int) -> dict[str, Any]:
    """Buckets of one square matrix, one for gradients and one ahead of the layer in use."""
    return {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": hidden_size**2,
        "stage3_max_live_parameters": ZERO3_LIVE_VALUES,
        "stage3_max_reuse_distance": ZERO3_LIVE_VALUES,
        "stage3_param_persistence_threshold": _PERSISTENT_HIDDEN_SIZES * hidden_size,
        "sub_group_size": _SUB_GROUP_VALUES,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
    }
