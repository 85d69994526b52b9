"""The settings of a strategy, each declared once: type, bounds, default, help, and how it is used.

Light on purpose, without pydantic: the command line derives options, words and completion from
these before anything heavy is loaded. `core/strategy.py` makes the validated model of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from tightfit.core.dtypes import Dtype
from tightfit.core.optimizers import Optimizer

if TYPE_CHECKING:
    from tightfit.core.frozen import Frozen as _Declared
else:
    _Declared = object

MAX_MICRO_BATCH = 65_536
MAX_SEQ_LEN = 16_777_216
MAX_WORLD_SIZE = 65_536
MAX_LORA_RANK = 65_536
MAX_LOSS_CHUNK_FACTOR = 1024
ALL_LINEAR = "all-linear"


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

    @cached_property
    def handicap(self) -> float:
        """How much faster it must make a plan to be preferred: DeepSpeed is one more package."""
        return 1.1 if self.is_zero else 1.01 if self.is_fsdp else 1.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a field of the strategy is for."""

    help: str
    """One line of `--help`."""
    changes_learning: bool = False
    """It decides what is learnt: a run that goes on with other hardware keeps it."""
    is_searched: bool = True
    """The planner may choose it. False: it takes it from the job."""
    is_of_adapters: bool = False
    """Of no meaning without adapters."""
    recipe_key: str = ""
    """Where a recipe states it, if not under `strategy`."""
    words: tuple[str, ...] = ()
    """What an option of its own accepts, where that is less than the type."""
    example: str = ""
    """A value that works, for messages."""


class StrategySettings(_Declared):
    """Every setting of a strategy. `Strategy` is the model that checks them."""

    method: Annotated[
        Method,
        Setting(
            help="What is trained", changes_learning=True, is_searched=False, recipe_key="method"
        ),
    ] = Method.LORA
    weights: Annotated[
        Dtype,
        Setting(help="How base weights are stored. [default: by card]", changes_learning=True),
    ] = Dtype.BF16
    """How the base weights are stored."""
    double_quant: Annotated[
        bool,
        Setting(
            help="Quantize nf4's scales too. [default: on]",
            changes_learning=True,
            is_searched=False,
        ),
    ] = True
    """Quantize nf4's scales too."""
    upcast_unquantized: Annotated[
        bool,
        Setting(
            help="Norms, embeddings and head in fp32 beside quantized weights. [default: off]",
            changes_learning=True,
            is_searched=False,
        ),
    ] = False
    """Keep norms, embeddings and head in fp32 beside quantized weights, as peft's
    `prepare_model_for_kbit_training` does."""
    compute: Annotated[
        Dtype,
        Setting(
            help="Arithmetic. [default: by weights and card]",
            changes_learning=True,
            words=("fp32", "fp16", "bf16"),
        ),
    ] = Dtype.BF16
    """Arithmetic. Where it differs from unquantized `weights`, autocast does the casting."""
    autocast: Annotated[
        bool,
        Setting(
            help="Autocast even where weights are 16 bit. [default: by card]", changes_learning=True
        ),
    ] = False
    """Run under autocast even where weights are 16 bit: fp32 adapters, which a gradient scaler
    needs, then multiply in the compute dtype. fp32 weights imply it."""
    adapter_dtype: Annotated[
        Dtype,
        Setting(
            help="LoRA weights. [default: by compute]",
            changes_learning=True,
            words=("fp32", "fp16", "bf16"),
            is_of_adapters=True,
        ),
    ] = Dtype.BF16
    """LoRA weights, and with them their gradients and optimizer state."""
    lora_rank: Annotated[
        int,
        Gt(0),
        Le(MAX_LORA_RANK),
        Setting(
            help="Rank. [default: 16]",
            changes_learning=True,
            is_searched=False,
            recipe_key="lora.rank",
            example="16",
        ),
    ] = 16
    lora_targets: Annotated[
        tuple[str, ...],
        Setting(
            help="Names of the modules that get adapters. [default: all-linear]",
            changes_learning=True,
            is_searched=False,
            recipe_key="lora.targets",
            example=ALL_LINEAR,
        ),
    ] = (ALL_LINEAR,)
    """Suffixes of module names, or the single word `all-linear`."""
    lora_dropout: Annotated[
        float,
        Ge(0),
        Lt(1),
        Setting(
            help="Dropout before each adapter. [default: 0]",
            changes_learning=True,
            is_searched=False,
            recipe_key="lora.dropout",
        ),
    ] = 0.0
    """Each adapter then keeps a dropped copy of its input, and the mask."""
    dora: Annotated[
        bool,
        Setting(
            help="Weight-decomposed LoRA. [default: off]",
            changes_learning=True,
            is_searched=False,
            recipe_key="lora.dora",
        ),
    ] = False
    """Train each target's column norms apart from its direction (arXiv:2402.09353)."""
    train_embeddings: Annotated[
        bool,
        Setting(
            help="LoRA with fully trained embeddings and head.",
            changes_learning=True,
            is_searched=False,
        ),
    ] = False
    """LoRA with fully trained embeddings and lm_head, for added tokens."""
    optimizer: Annotated[
        Optimizer, Setting(help="Update rule. [default: adamw, fused]", changes_learning=True)
    ] = Optimizer.ADAMW
    micro_batch: Annotated[
        int,
        Gt(0),
        Le(MAX_MICRO_BATCH),
        Setting(help="Sequences per GPU at once. [default: 1]", example="4"),
    ] = 1
    seq_len: Annotated[
        int,
        Gt(0),
        Le(MAX_SEQ_LEN),
        Setting(
            help="Tokens per sequence. [default: 2048]",
            is_searched=False,
            recipe_key="seq_len",
            example="2048",
        ),
    ] = 2048
    grad_accum: Annotated[
        int,
        Gt(0),
        Le(MAX_MICRO_BATCH),
        Setting(help="Micro-batches per step. [default: 1]", example="8"),
    ] = 1
    packing: Annotated[
        bool,
        Setting(
            help="Several documents in a row. [default: by data]",
            changes_learning=True,
            recipe_key="packing",
        ),
    ] = False
    checkpointing: Annotated[
        bool, Setting(help="Recompute layers in the backward pass. [default: on]")
    ] = True
    """Recompute each layer in the backward pass instead of keeping its activations."""
    recomputed_layers: Annotated[
        Annotated[int, Gt(0), Le(MAX_LORA_RANK)] | None,
        Setting(help="How many layers are recomputed. [default: all]"),
    ] = None
    """How many, counted from the first; the others keep theirs. None: all, with checkpointing."""
    attention: Annotated[Attention, Setting(help="Kernel. [default: sdpa]")] = Attention.SDPA
    repeat_keys: Annotated[
        bool, Setting(help="Repeat grouped keys before SDPA. [default: by card]")
    ] = False
    """Expand grouped keys and values before SDPA, which has no fused kernel for grouped heads
    before Ampere or in fp32 and would hold the whole score matrix."""
    loss: Annotated[Loss, Setting(help="How logits become a loss. [default: plain]")] = Loss.PLAIN
    loss_chunk_factor: Annotated[
        int,
        Gt(0),
        Le(MAX_LOSS_CHUNK_FACTOR),
        Setting(help="Size of the fused loss's chunks. [default: 1]"),
    ] = 1
    """How many times wider than by default the fused loss cuts its slices of tokens: fewer, larger
    products, and so many times the logits at once. Liger's `chunk_mem_const`."""
    fused_kernels: Annotated[
        bool, Setting(help="Fused norm, rotary and gated-MLP kernels. [default: off]")
    ] = False
    """Fused norm, rotary and gated-MLP kernels that save only their inputs."""
    fused_lora: Annotated[
        bool, Setting(help="LoRA scaled and added inside its matmuls. [default: off]")
    ] = False
    """Scale and add LoRA's product as part of its matmuls, and not in passes of their own over each
    output and its gradient. Modules that do not allow it keep peft's forward."""
    fp8: Annotated[bool, Setting(help="Multiply in fp8. [default: off]")] = False
    """Multiply in 8 bits inside the blocks, where the card can; under LoRA the frozen matrices are
    kept so too. Never chosen for anybody: it rounds more coarsely than bf16."""
    fp8_gradients: Annotated[
        bool, Setting(help="Multiply in fp8 in the backward pass. [default: off]")
    ] = False
    """The same in the backward pass alone, where weights are trained: results and the loss are
    bf16's, and gradients are rounded. Never chosen for anybody either."""
    dequantized_base: Annotated[
        bool, Setting(help="nf4 weights unpacked once, not in every pass. [default: off]")
    ] = False
    """Unpack nf4 matrices once, after loading, and keep them in the compute dtype: the values that
    each step would unpack, in the memory and time of 16-bit LoRA. With `fp8` in fp8, from there."""
    compile: Annotated[bool, Setting(help="Compile each layer. [default: off]")] = False
    sharding: Annotated[
        Sharding, Setting(help="How state is spread. [default: single on one GPU, else fsdp]")
    ] = Sharding.SINGLE
    offload: Annotated[Offload, Setting(help="To host RAM. [default: none]")] = Offload.NONE
    num_nodes: Annotated[
        int,
        Gt(0),
        Le(MAX_WORLD_SIZE),
        Setting(help="Nodes that take part. [default: 1]", is_searched=False),
    ] = 1
    gpus_per_node: Annotated[
        int, Gt(0), Le(MAX_WORLD_SIZE), Setting(help="GPUs of each node. [default: all]")
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSetting:
    """A setting with what its declaration says."""

    name: str
    kind: Any
    """The type, without bounds."""
    default: Any
    most: int | None
    setting: Setting

    @property
    def words(self) -> tuple[str, ...]:
        """The words it takes; empty where it takes numbers, truth or names."""
        if self.setting.words or not isinstance(self.kind, type):
            return self.setting.words
        return words_of(self.kind) if issubclass(self.kind, Enum) else ()

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"


@cache
def list_settings() -> dict[str, DeclaredSetting]:
    """By name, in the order of the declaration."""
    hints = get_type_hints(StrategySettings, include_extras=True)
    found = {}
    for name in StrategySettings.__annotations__:
        kind, *extras = get_args(hints[name])
        found[name] = DeclaredSetting(
            name=name,
            kind=kind,
            default=getattr(StrategySettings, name),
            most=next((cast(int, extra.le) for extra in extras if isinstance(extra, Le)), None),
            setting=next(extra for extra in extras if isinstance(extra, Setting)),
        )
    return found


def words_of(kind: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in kind)


def names_where(**facts: object) -> tuple[str, ...]:
    """Settings whose declaration says all of `facts`."""
    return tuple(
        name
        for name, declared in list_settings().items()
        if all(getattr(declared.setting, key) == value for key, value in facts.items())
    )


RENAMED_SETTINGS = {
    "folded_adapters": "fused_lora",
    "unpacked_base": "dequantized_base",
    "loss_slice_factor": "loss_chunk_factor",
}
"""Names that saved plans and recipes may still have, and today's."""
