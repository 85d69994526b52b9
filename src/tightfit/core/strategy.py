"""Strategy: one point of the search space, how a job runs, down to the micro-batch.

`train` obeys a Strategy: each field names something the training stack does, and is the only
home of its default. `Quirks` describes other training stacks, for estimates of their jobs.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import Any

from pydantic import Field, PositiveInt, model_validator

from tightfit.core.dtypes import Dtype
from tightfit.core.frozen import Frozen
from tightfit.core.optimizers import Optimizer

__all__ = [
    "ALL_LINEAR",
    "MAX_MICRO_BATCH",
    "MAX_SEQ_LEN",
    "MAX_SLICE_FACTOR",
    "MAX_WORLD_SIZE",
    "NO_QUIRKS",
    "RENAMED_SETTINGS",
    "Attention",
    "Loss",
    "Method",
    "Offload",
    "Optimizer",
    "Quirks",
    "Sharding",
    "Strategy",
]

# What other training stacks do, and ours does not, that changes what they hold in memory.


class Quirks(Frozen):
    """Habits of older or other software. All off in our own plans.

    They let an estimate speak of a job as somebody ran it, with transformers 4,
    FSDP1 or an old bitsandbytes; `benchmarks/published` names where each was found.
    """

    varying_lengths: bool = False
    """Each batch is padded to its own longest row and the allocator has no expandable segments,
    so it keeps blocks of outgrown sizes."""
    reentrant: bool = False
    """Recompute inside a nested backward pass, torch's `use_reentrant=True`: the default of
    transformers 4."""
    recomputes_shards: bool = False
    """The recomputed call goes around a layer's FSDP wrapper, as transformers 4 has it, and not
    inside."""
    flat_shards: bool = False
    """FSDP1: FullyShardedDataParallel with flat parameters instead of `fully_shard`."""
    mixes_frozen: bool = False
    """Flat parameters that hold frozen and trained values together get a gradient for both."""
    no_sync: bool = False
    """Sharded gradients accumulate unsharded, and are reduced once a step."""
    keeps_quantized_inputs: bool = False
    """4-bit matrices hold on to their input though they never need it: bitsandbytes < 0.43.2."""
    packs_subclasses: bool = False
    """nf4 and int8 loading packs linear layers of a model's own class too, as Falcon's:
    transformers 4 and lit-gpt."""
    narrow_loss: bool = False
    """The loss reads a shifted copy of the logits in the head's own dtype, in fp32 only where
    autocast says so, as much modelling code of 2023 does."""
    use_cache: bool = False
    """Fill a key-value cache while training too; it stays until the loss is there."""
    padding_mask: bool = False
    """Padded rows come with a mask, though a causal decoder needs none: attention is given a matrix
    and, grouped, gets its keys repeated."""
    outlier_columns: bool = False
    """Every column that enters an int8 MLP's last matrix has a value above the threshold and is
    kept in 16 bit: random weights of wide models do that, trained ones do not."""
    keeps_logits: bool = False
    """Logits live beside what the loss reads until the gradient is there: the caller holds on to
    them, or the loss reads a shifted copy."""
    optimizer_in_backward: bool = False
    """Each gradient is stepped and freed as soon as it is complete, as torchtune can."""
    wide_adafactor: bool = False
    """transformers' Adafactor, which works in fp32, instead of torch's."""

    @model_validator(mode="before")
    @classmethod
    def _forget_old_names(cls, given: Any) -> Any:
        """Plans of runs before padding went without a mask say whether rows are equally long."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if name != "equal_rows"}


NO_QUIRKS = Quirks()


MAX_MICRO_BATCH = 65_536
MAX_SEQ_LEN = 16_777_216
MAX_WORLD_SIZE = 65_536
MAX_SLICE_FACTOR = 1024


class Method(str, Enum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    LOAD = "load"
    """Nothing is trained: load and run the model."""


class Sharding(str, Enum):
    """How state is spread over GPUs. `SHARDS_WEIGHTS` etc. below say what each spreads."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    FSDP_GRAD_OP = "fsdp-grad-op"
    """FSDP that keeps gathered weights until the backward pass is done (SHARD_GRAD_OP)."""
    FSDP_HYBRID = "fsdp-hybrid"
    """Sharded inside a node, replicated between nodes."""
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"

    @cached_property
    def shards_optimizer(self) -> bool:
        return self not in (Sharding.SINGLE, Sharding.DDP)

    @cached_property
    def shards_gradients(self) -> bool:
        return self.shards_optimizer and self is not Sharding.ZERO1

    @cached_property
    def shards_weights(self) -> bool:
        return self.shards_gradients and self is not Sharding.ZERO2

    @cached_property
    def is_fsdp(self) -> bool:
        return self in (Sharding.FSDP, Sharding.FSDP_GRAD_OP, Sharding.FSDP_HYBRID)

    @cached_property
    def is_zero(self) -> bool:
        return self in (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)


class Offload(str, Enum):
    """What lives in host memory between uses."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMS = "params"
    ALL = "all"

    @cached_property
    def moves_optimizer(self) -> bool:
        return self in (Offload.OPTIMIZER, Offload.ALL)

    @cached_property
    def moves_params(self) -> bool:
        return self in (Offload.PARAMS, Offload.ALL)


class Attention(str, Enum):
    """How attention is computed: with an S x S matrix in memory, or without."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLASH = "flash"


class Loss(str, Enum):
    """How much of the logits exists at a time, and in which precision."""

    PLAIN = "plain"
    """Logits, upcast to fp32, with fp32 gradients."""
    KERNEL = "kernel"
    """Logits, upcast to fp32, with the gradient written in their place by one kernel."""
    CHUNKED = "chunked"
    """Logits whole, upcast a slice at a time."""
    FUSED = "fused"
    """Logits a slice at a time, head and loss in one kernel."""


ALL_LINEAR = "all-linear"


RENAMED_SETTINGS = {
    "folded_adapters": "fused_lora",
    "unpacked_base": "dequantized_base",
    "loss_slice_factor": "loss_chunk_factor",
}
"""Names that saved plans and recipes may still have, and today's."""


class Strategy(Frozen):
    """How one job runs. Illegal combinations are judged by `planning/rules`, not here."""

    method: Method = Method.LORA
    weights: Dtype = Dtype.BF16
    """How the base weights are stored."""
    double_quant: bool = True
    """Quantize nf4's scales too."""
    upcast_unquantized: bool = False
    """Keep norms, embeddings and head in fp32 beside quantized weights, as peft's
    `prepare_model_for_kbit_training` does."""
    compute: Dtype = Dtype.BF16
    """Arithmetic. Where it differs from unquantized `weights`, autocast does the casting."""
    autocast: bool = False
    """Run under autocast even where weights are 16 bit: fp32 adapters, which a gradient scaler
    needs, then multiply in the compute dtype. fp32 weights imply it."""
    adapter_dtype: Dtype = Dtype.BF16
    """LoRA weights, and with them their gradients and optimizer state."""
    lora_rank: PositiveInt = Field(default=16, le=65_536)
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    """Suffixes of module names, or the single word `all-linear`."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Each adapter then keeps a dropped copy of its input, and the mask."""
    dora: bool = False
    """Train each target's column norms apart from its direction (arXiv:2402.09353)."""
    train_embeddings: bool = False
    """LoRA with fully trained embeddings and lm_head, for added tokens."""
    optimizer: Optimizer = Optimizer.ADAMW
    micro_batch: PositiveInt = Field(default=1, le=MAX_MICRO_BATCH)
    seq_len: PositiveInt = Field(default=2048, le=MAX_SEQ_LEN)
    grad_accum: PositiveInt = Field(default=1, le=MAX_MICRO_BATCH)
    packing: bool = False
    checkpointing: bool = True
    """Recompute each layer in the backward pass instead of keeping its activations."""
    recomputed_layers: PositiveInt | None = Field(default=None, le=65_536)
    """How many, counted from the first; the others keep theirs. None: all, with checkpointing."""
    attention: Attention = Attention.SDPA
    repeat_keys: bool = False
    """Expand grouped keys and values before SDPA, which has no fused kernel for grouped heads
    before Ampere or in fp32 and would hold the whole score matrix."""
    loss: Loss = Loss.PLAIN
    loss_chunk_factor: PositiveInt = Field(default=1, le=MAX_SLICE_FACTOR)
    """How many times wider than by default the fused loss cuts its slices of tokens: fewer, larger
    products, and so many times the logits at once. Liger's `chunk_mem_const`."""
    fused_kernels: bool = False
    """Fused norm, rotary and gated-MLP kernels that save only their inputs."""
    fused_lora: bool = False
    """Scale and add LoRA's product as part of its matmuls, and not in passes of their own over each
    output and its gradient. Modules that do not allow it keep peft's forward."""
    fp8: bool = False
    """Multiply in 8 bits inside the blocks, where the card can; under LoRA the frozen matrices are
    kept so too. Never chosen for anybody: it rounds more coarsely than bf16."""
    fp8_gradients: bool = False
    """The same in the backward pass alone, where weights are trained: results and the loss are
    bf16's, and gradients are rounded. Never chosen for anybody either."""
    dequantized_base: bool = False
    """Unpack nf4 matrices once, after loading, and keep them in the compute dtype: the values that
    each step would unpack, in the memory and time of 16-bit LoRA. With `fp8` in fp8, from there."""
    compile: bool = False
    sharding: Sharding = Sharding.SINGLE
    offload: Offload = Offload.NONE
    num_nodes: PositiveInt = Field(default=1, le=MAX_WORLD_SIZE)
    gpus_per_node: PositiveInt = Field(default=1, le=MAX_WORLD_SIZE)
    quirks: Quirks = NO_QUIRKS
    """Habits of software other than ours; for speaking of other people's jobs."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_names(cls, given: Any) -> Any:
        for old in given if isinstance(given, dict) else ():
            if old in RENAMED_SETTINGS:
                raise ValueError(f"`{old}` is now called `{RENAMED_SETTINGS[old]}`")
        return given

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def num_shards(self) -> int:
        """Ranks that one copy of the state is spread over."""
        if not self.sharding.shards_optimizer:
            return 1
        return self.gpus_per_node if self.sharding is Sharding.FSDP_HYBRID else self.world_size

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Token slots of one optimizer step over all ranks, padding included."""
        return self.tokens_per_micro_batch * self.grad_accum * self.world_size

    @property
    def casts_weights(self) -> bool:
        """fp32 weights with 16-bit arithmetic, cast by autocast module by module.

        FSDP and ZeRO cast whole shards instead, and hand modules 16-bit weights.
        """
        casts_shards = self.sharding.is_fsdp or self.sharding.is_zero
        is_mixed = self.weights is Dtype.FP32 and self.compute is not Dtype.FP32
        return is_mixed and not casts_shards

    @property
    def is_autocast(self) -> bool:
        """Whether the forward pass runs under autocast, for whichever reason."""
        is_upcast = self.weights.is_quantized and self.upcast_unquantized
        return self.autocast or is_upcast or self.casts_weights

    @property
    def has_fp8(self) -> bool:
        """Whether blocks multiply in fp8, in both passes or in the backward one alone."""
        return self.fp8 or self.fp8_gradients

    @property
    def stores_fp8(self) -> bool:
        """Whether matrices inside the blocks are kept in fp8: frozen ones are."""
        return self.fp8 and self.method is Method.LORA

    @property
    def is_trained(self) -> bool:
        return self.method is not Method.LOAD

    def count_recomputed(self, num_layers: int) -> int:
        """Layers of a model of `num_layers` whose activations are computed again."""
        if not self.checkpointing:
            return 0
        return min(num_layers, self.recomputed_layers or num_layers)
