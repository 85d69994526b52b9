"""What sharding, offload and the optimizers cannot be combined with."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Offload, Optimizer, Sharding
from tightfit.planning.case import Rule

_DEEPSPEED = "https://www.deepspeed.ai/docs/config-json/"
_FSDP2 = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
_PEFT_FSDP = "https://huggingface.co/docs/peft/accelerate/fsdp"
_PEFT_ZERO = "https://huggingface.co/docs/peft/accelerate/deepspeed"
_8BIT = (Optimizer.ADAMW_8BIT, Optimizer.ADAMW_PAGED_8BIT)

SHARDING_RULES: tuple[Rule, ...] = (
    # Sharding and offload
    Rule(
        name="single-many",
        reason="sharding `single` runs on one GPU; {s.world_size} were asked for",
        source="tightfit's launcher",
        violated=lambda c: c.strategy.sharding is Sharding.SINGLE and c.strategy.world_size > 1,
    ),
    Rule(
        name="needless-sharding",
        reason="{s.sharding.value} on one GPU shards nothing; use single",
        source="https://arxiv.org/abs/1910.02054",
        violated=lambda c: (
            c.strategy.world_size == 1
            and c.strategy.sharding is not Sharding.SINGLE
            and c.strategy.offload is Offload.NONE
        ),
        severity="warning",
    ),
    Rule(
        name="hybrid-one-node",
        reason="fsdp-hybrid replicates between nodes; there is one node: use fsdp",
        source=_FSDP2,
        violated=lambda c: c.strategy.sharding is Sharding.FSDP_HYBRID and c.strategy.num_nodes < 2,
    ),
    Rule(
        name="offload-unsharded",
        reason="{s.sharding.value} keeps all state on the GPU; offload needs fsdp or zero "
        "(or a paged optimizer)",
        source=_DEEPSPEED,
        violated=lambda c: (
            c.strategy.offload is not Offload.NONE and not c.strategy.sharding.shards_optimizer
        ),
    ),
    Rule(
        name="fsdp-partial-offload",
        reason="FSDP offloads weights, gradients and optimizer together; `{s.offload.value}` alone "
        "is not possible: use all",
        source=_FSDP2,
        violated=lambda c: (
            c.strategy.sharding.is_fsdp
            and c.strategy.offload in (Offload.OPTIMIZER, Offload.PARAMS)
        ),
    ),
    Rule(
        name="zero-param-offload",
        reason="weights are offloaded with zero3 only, not with {s.sharding.value}",
        source=_DEEPSPEED,
        violated=lambda c: (
            c.strategy.sharding in (Sharding.ZERO1, Sharding.ZERO2)
            and c.strategy.offload.moves_params
        ),
    ),
    Rule(
        name="int8-sharded",
        reason="int8 weights cannot be sharded: only 4-bit weights can be stored as floats for "
        "{s.sharding.value}",
        source=_PEFT_FSDP,
        violated=lambda c: c.strategy.weights is Dtype.INT8 and c.strategy.sharding.shards_weights,
    ),
    Rule(
        name="gptq-sharded",
        reason="GPTQ weights are packed integers, which {s.sharding.value} cannot shard",
        source=_PEFT_FSDP,
        violated=lambda c: c.strategy.weights is Dtype.GPTQ4 and c.strategy.sharding.shards_weights,
    ),
    Rule(
        name="nf4-zero3-offload",
        reason="nf4 weights with zero3 work without offload; offload them with fsdp",
        source=_PEFT_ZERO,
        violated=lambda c: (
            c.strategy.weights is Dtype.NF4
            and c.strategy.sharding is Sharding.ZERO3
            and c.strategy.offload.moves_params
        ),
    ),
    # The optimizer
    Rule(
        name="adamw-kernel-sharded",
        reason="adamw-kernel updates whole tensors on one GPU; {s.sharding.value} shards their "
        "state: use adamw",
        source="tightfit.runtime.adamw",
        violated=lambda c: (
            c.strategy.optimizer is Optimizer.ADAMW_KERNEL and c.strategy.sharding.shards_optimizer
        ),
    ),
    Rule(
        name="8bit-optimizer-fsdp",
        reason="8-bit optimizers fail on FSDP's sharded tensors (illegal memory access)",
        source="https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633",
        violated=lambda c: c.strategy.optimizer in _8BIT and c.strategy.sharding.is_fsdp,
    ),
    Rule(
        name="8bit-optimizer-offload",
        reason="an offloaded optimizer steps on the CPU; {s.optimizer.value} steps on the GPU",
        source=_DEEPSPEED,
        violated=lambda c: c.strategy.optimizer in _8BIT and c.strategy.offload.moves_optimizer,
    ),
    Rule(
        name="adafactor-flattened",
        reason="{s.sharding.value} flattens weights, which leaves Adafactor no rows and columns",
        source="deepspeed/runtime/zero/stage_1_and_2.py, 0.19",
        violated=lambda c: (
            c.strategy.optimizer is Optimizer.ADAFACTOR and c.strategy.sharding.is_zero
        ),
    ),
    Rule(
        name="adafactor-fsdp",
        reason="torch's Adafactor takes sums over rows and columns, which fail on FSDP's shards",
        source="torch/optim/_adafactor.py, 2.13",
        violated=lambda c: (
            c.strategy.optimizer is Optimizer.ADAFACTOR and c.strategy.sharding.is_fsdp
        ),
    ),
    Rule(
        name="in-backward-accumulation",
        reason="an optimizer inside the backward pass frees gradients at once, so {s.grad_accum} "
        "micro-batches cannot be summed",
        source="https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html",
        violated=lambda c: c.strategy.optimizer_in_backward and c.strategy.grad_accum > 1,
    ),
    Rule(
        name="in-backward-scaler",
        reason="fp16's gradient scaler must see all gradients before a step; an optimizer inside "
        "the backward pass does not wait",
        source="https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
        violated=lambda c: c.strategy.optimizer_in_backward and c.strategy.compute is Dtype.FP16,
    ),
    Rule(
        name="in-backward-sharded",
        reason="DeepSpeed owns the optimizer step; it cannot move inside the backward pass",
        source=_DEEPSPEED,
        violated=lambda c: c.strategy.optimizer_in_backward and c.strategy.sharding.is_zero,
    ),
)
