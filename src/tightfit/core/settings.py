"""The settings of a job, each declared once: type, bounds, default, help, and how it is used.

Light on purpose, without pydantic: the command line derives options, words and completion from
these before anything heavy is loaded. `Strategy`, `Training` and `Recipe` are the models of them.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.objectives import Objective
from tightfit.core.optimizers import Optimizer
from tightfit.core.trackers import TRACKERS, TrackerName

if TYPE_CHECKING:
    from tightfit.core.frozen import Frozen as _Declared
else:
    _Declared = object

MAX_MICRO_BATCH = 65_536
MAX_SEQ_LEN = 16_777_216
MAX_WORLD_SIZE = 65_536
MAX_LORA_RANK = 65_536
MAX_LOSS_CHUNK_FACTOR = 1024
MAX_MLP_TILES = 1024
MAX_COUNT = 10**9
ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""Beside `all-linear`: a mixture's router and experts, which are bare parameters, too."""
EMBEDDINGS = "embeddings"
"""Beside other targets: embeddings and head too."""
UNQUANTIZED = ("fp32", "fp16", "bf16")

Name = Annotated[str, MinLen(1), MaxLen(4096)]
TokenName = Annotated[str, MaxLen(512)]
Count = Annotated[int, Gt(0), Le(MAX_COUNT)]


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


class Schedule(str, Enum):
    """How the learning rate goes from its peak, after the warm-up, to its end."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


class TrainOn(str, Enum):
    """Which tokens carry loss."""

    ANSWERS = "answers"
    ALL = "all"


class RecipeMethod(str, Enum):
    """What to train, as a user says it; `auto` leaves it to the planner."""

    AUTO = "auto"
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"
    """LoRA on 4-bit base weights."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a setting is for."""

    help: str
    """One line of `--help`."""
    _: KW_ONLY
    changes_learning: bool = False
    """It decides what is learnt: a run that goes on with other hardware keeps it."""
    is_searched: bool = True
    """The planner may choose it. False: it takes it from the job."""
    is_of_adapters: bool = False
    """Of no meaning without adapters."""
    recipe_key: str = ""
    """Where a recipe states it: if not under `strategy`, or not at the top."""
    words: tuple[str, ...] = ()
    """What an option of its own accepts, where that is less than the type."""
    metavar: str = ""
    example: str = ""
    """A value that works, for messages."""


_of_job = partial(Setting, changes_learning=True, is_searched=False)
"""A setting that decides what is learnt, and that the planner takes from the job."""


class StrategySettings(_Declared):
    """Every setting of a strategy. `Strategy` is the model that checks them."""

    method: Annotated[Method, _of_job("What is trained", recipe_key="method")] = Method.LORA
    objective: Annotated[
        Objective,
        _of_job("What is learnt from the data. [default: sft]", recipe_key="objective"),
    ] = Objective.SFT
    """Where its examples are pairs, `micro_batch` counts pairs, and a micro-batch holds twice as
    many sequences."""
    precompute_reference: Annotated[
        bool,
        Setting("The reference's log-probabilities once, before training. [default: by method]"),
    ] = False
    """trl's `precompute_ref_log_probs`: they are kept on disk beside the data. Without it each step
    runs the reference too: the base with the adapters off or, in full tuning, a frozen copy."""
    weights: Annotated[
        Dtype, Setting("How base weights are stored. [default: by card]", changes_learning=True)
    ] = Dtype.BF16
    double_quant: Annotated[bool, _of_job("Quantize nf4's scales too. [default: on]")] = True
    upcast_unquantized: Annotated[
        bool, _of_job("Norms, embeddings and head in fp32 beside quantized weights. [default: off]")
    ] = False
    """As peft's `prepare_model_for_kbit_training` does."""
    compute: Annotated[
        Dtype,
        Setting(
            "Arithmetic. [default: by weights and card]", changes_learning=True, words=UNQUANTIZED
        ),
    ] = Dtype.BF16
    """Where it differs from unquantized `weights`, autocast does the casting."""
    autocast: Annotated[
        bool,
        Setting(
            "Autocast even where weights are 16 bit. [default: by card]", changes_learning=True
        ),
    ] = False
    """fp32 adapters, which a gradient scaler needs, then multiply in the compute dtype. fp32
    weights imply it."""
    adapter_dtype: Annotated[
        Dtype,
        Setting(
            "LoRA weights. [default: by compute]",
            changes_learning=True,
            words=UNQUANTIZED,
            is_of_adapters=True,
        ),
    ] = Dtype.BF16
    """And with them their gradients and optimizer state."""
    lora_rank: Annotated[
        int,
        Gt(0),
        Le(MAX_LORA_RANK),
        _of_job("Rank. [default: 16]", recipe_key="lora.rank", example="16"),
    ] = 16
    lora_targets: Annotated[
        tuple[Name, ...],
        MinLen(1),
        _of_job(
            "Names of the modules that get adapters; all-linear,experts: a mixture's experts too; "
            "all-linear,embeddings: embeddings and head too. [default: all-linear]",
            recipe_key="lora.targets",
            metavar=f"A,B|{ALL_LINEAR}",
            example=ALL_LINEAR,
        ),
    ] = (ALL_LINEAR,)
    """Suffixes of module names, or `all-linear`; then `experts`, `embeddings`."""
    lora_dropout: Annotated[
        float,
        Ge(0),
        Lt(1),
        _of_job("Dropout before each adapter. [default: 0]", recipe_key="lora.dropout"),
    ] = 0.0
    """Each adapter then keeps a dropped copy of its input, and the mask."""
    dora: Annotated[
        bool, _of_job("Weight-decomposed LoRA. [default: off]", recipe_key="lora.dora")
    ] = False
    """Train each target's column norms apart from its direction (arXiv:2402.09353)."""
    train_embeddings: Annotated[
        bool, _of_job("LoRA with fully trained embeddings and head. [default: off]")
    ] = False
    """All rows, in copies of their own."""
    add_tokens: Annotated[
        tuple[TokenName, ...],
        _of_job(
            "New tokens of the tokenizer; @FILE: one a line. [default: none]",
            recipe_key="add_tokens",
            metavar="A,B|@FILE",
            example="<sql>,</sql>",
        ),
    ] = ()
    """Read as one token wherever a text spells them. LoRA trains their rows of embeddings and head,
    and with `train_embeddings` all rows."""
    add_special_tokens: Annotated[
        tuple[TokenName, ...],
        _of_job(
            "New control tokens, which no message can spell. [default: none]",
            recipe_key="add_special_tokens",
            metavar="A,B|@FILE",
            example="<|sql|>",
        ),
    ] = ()
    optimizer: Annotated[
        Optimizer, Setting("Update rule. [default: adamw, fused]", changes_learning=True)
    ] = Optimizer.ADAMW
    micro_batch: Annotated[
        int,
        Gt(0),
        Le(MAX_MICRO_BATCH),
        Setting("Sequences, or pairs, per GPU at once. [default: 1]", example="4"),
    ] = 1
    seq_len: Annotated[
        int,
        Gt(0),
        Le(MAX_SEQ_LEN),
        Setting(
            "Tokens per sequence. [default: 2048]",
            is_searched=False,
            recipe_key="seq_len",
            example="2048",
        ),
    ] = 2048
    grad_accum: Annotated[
        int,
        Gt(0),
        Le(MAX_MICRO_BATCH),
        Setting("Micro-batches per step. [default: 1]", example="8"),
    ] = 1
    packing: Annotated[
        bool,
        Setting(
            "Several documents in a row. [default: by data]",
            changes_learning=True,
            recipe_key="packing",
        ),
    ] = False
    checkpointing: Annotated[
        bool, Setting("Recompute layers in the backward pass. [default: on]")
    ] = True
    """Instead of keeping their activations."""
    recomputed_layers: Annotated[
        Annotated[int, Gt(0), Le(MAX_LORA_RANK)] | None,
        Setting("How many layers are recomputed. [default: all]"),
    ] = None
    """Counted from the first; the others keep theirs. None: all, with checkpointing."""
    offloaded_inputs: Annotated[
        int,
        Ge(0),
        Le(MAX_LORA_RANK),
        Setting("Recomputed layers whose inputs go to host memory. [default: 0]"),
    ] = 0
    """Page-locked, and copied beside the computation. Counted from the first; never the last
    recomputed layer's, which the backward pass begins with."""
    mlp_tiles: Annotated[
        int,
        Gt(0),
        Le(MAX_MLP_TILES),
        Setting("Tiles of tokens that the MLPs of recomputed layers run in. [default: 1]"),
    ] = 1
    """One after another, in both passes: only a tile of the MLP's wide tensors exists at a time."""
    attention: Annotated[Attention, Setting("Kernel. [default: sdpa]")] = Attention.SDPA
    repeat_keys: Annotated[bool, Setting("Repeat grouped keys before SDPA. [default: by card]")] = (
        False
    )
    """SDPA has no fused kernel for grouped heads before Ampere or in fp32, and would hold the whole
    score matrix."""
    loss: Annotated[Loss, Setting("How logits become a loss. [default: plain]")] = Loss.PLAIN
    loss_chunk_factor: Annotated[
        int,
        Gt(0),
        Le(MAX_LOSS_CHUNK_FACTOR),
        Setting("Size of the fused loss's chunks. [default: 1]"),
    ] = 1
    """How many times wider than by default the fused loss cuts its slices of tokens: fewer, larger
    products, and so many times the logits at once. Liger's `chunk_mem_const`."""
    fused_kernels: Annotated[
        bool, Setting("Fused norm, rotary and gated-MLP kernels. [default: off]")
    ] = False
    """They save only their inputs."""
    fused_lora: Annotated[
        bool, Setting("LoRA scaled and added inside its matmuls. [default: off]")
    ] = False
    """And not in passes of their own over each output and its gradient. Modules that do not allow
    it keep peft's forward."""
    fp8: Annotated[bool, Setting("Multiply in fp8. [default: off]")] = False
    """Inside the blocks, where the card can; under LoRA the frozen matrices are kept so too. Never
    chosen by the planner: it rounds more coarsely than bf16."""
    fp8_gradients: Annotated[
        bool, Setting("Multiply in fp8 in the backward pass. [default: off]")
    ] = False
    """There alone, where weights are trained: results and the loss are bf16's, and gradients are
    rounded. Never chosen by the planner either."""
    dequantized_base: Annotated[
        bool, Setting("nf4 weights unpacked once, not in every pass. [default: off]")
    ] = False
    """After loading, and kept in the compute dtype: the values that each step would unpack, in the
    memory and time of 16-bit LoRA. With `fp8` in fp8, from there."""
    compile: Annotated[bool, Setting("Compile each layer. [default: off]")] = False
    router_loss_weight: Annotated[
        float,
        Ge(0),
        Le(10),
        _of_job("Weight of a mixture's load-balancing loss. [default: 0]", example="0.001"),
    ] = 0.0
    """transformers' `router_aux_loss_coef`. Off by default, as there unless `output_router_logits`
    is set: it helps where routers are trained, as in full tuning, and the model's config.json may
    say with which weight it was made. Under LoRA most routers are frozen, and the loss can only
    change what they read."""
    sharding: Annotated[
        Sharding, Setting("How state is spread. [default: single on one GPU, else fsdp]")
    ] = Sharding.SINGLE
    context_parallel: Annotated[
        int,
        Gt(0),
        Le(MAX_WORLD_SIZE),
        Setting("GPUs that share each row. [default: 1]", example="4"),
    ] = 1
    """Each computes a slice of its tokens; attention exchanges heads for tokens."""
    offload: Annotated[Offload, Setting("To host RAM. [default: none]")] = Offload.NONE
    num_nodes: Annotated[
        int,
        Gt(0),
        Le(MAX_WORLD_SIZE),
        Setting("Nodes that take part. [default: 1]", is_searched=False),
    ] = 1
    gpus_per_node: Annotated[
        int, Gt(0), Le(MAX_WORLD_SIZE), Setting("GPUs of each node. [default: all]")
    ] = 1


class TrainingSettings(_Declared):
    """The learning side of a job, as far as no memory estimate depends on it.

    `Training` is the model that checks it. A recipe has the same keys, where None is not stated.
    """

    eval_fraction: Annotated[
        float,
        Ge(0),
        Le(0.5),
        _of_job("Share of the training rows held back, drawn with `seed`.", example="0.05"),
    ] = 0.0
    template: Annotated[
        Name | None,
        _of_job(
            "Chat template in place of the tokenizer's own.", metavar="NAME|FILE", example="chatml"
        ),
    ] = None
    train_on: Annotated[TrainOn, _of_job("Which tokens carry loss. [default: answers]")] = (
        TrainOn.ANSWERS
    )
    beta: Annotated[
        Annotated[float, Gt(0), Le(1000)] | None,
        _of_job(
            "How strongly preferences are held to the reference; ORPO's weight of the odds ratio. "
            "[default: by objective, 0.1; simpo 2]",
            example="0.1",
        ),
    ] = None
    label_smoothing: Annotated[
        float,
        Ge(0),
        Lt(0.5),
        _of_job("Share of pairs taken to be the wrong way round; dpo, simpo.", example="0.1"),
    ] = 0.0
    simpo_gamma: Annotated[
        Annotated[float, Ge(0), Le(1000)] | None,
        _of_job("The margin between rewards that SimPO aims at. [default: 0.5]", example="0.5"),
    ] = None
    desirable_weight: Annotated[
        float, Ge(0), Le(1000), _of_job("KTO's weight of answers labelled good.", example="1")
    ] = 1.0
    undesirable_weight: Annotated[
        float, Ge(0), Le(1000), _of_job("KTO's weight of answers labelled bad.", example="1")
    ] = 1.0
    schedule: Annotated[Schedule, _of_job("The rate after its peak. [default: cosine]")] = (
        Schedule.COSINE
    )
    warmup_fraction: Annotated[
        float, Ge(0), Le(1), _of_job("Share of all steps in which the rate rises to its peak.")
    ] = 0.03
    weight_decay: Annotated[float, Ge(0), Le(1), _of_job("Weight decay.")] = 0.0
    max_grad_norm: Annotated[
        Annotated[float, Gt(0), Le(10**6)] | None, _of_job("Clip gradients to this norm.")
    ] = 1.0
    """None: no clipping."""
    max_steps: Annotated[
        Count | None, _of_job("Optimizer steps, in place of epochs.", example="100")
    ] = None
    shuffle: Annotated[bool, _of_job("Shuffle the rows of each epoch. [default: on]")] = True
    seed: Annotated[
        int, Ge(0), Le(2**32 - 1), _of_job("Order and dropout. [default: 0]", example="17")
    ] = 0
    lora_alpha: Annotated[
        Annotated[float, Gt(0), Le(10**6)] | None,
        _of_job("LoRA's alpha. [default: twice the rank]", recipe_key="lora.alpha", example="32"),
    ] = None
    rslora: Annotated[
        bool, _of_job("Scale by alpha / sqrt(rank). [default: off]", recipe_key="lora.rslora")
    ] = False
    """It keeps high ranks learning (arXiv:2312.03732)."""
    save_every: Annotated[
        Count | None,
        Setting("Steps between checkpoints. [default: about every ten minutes]", example="500"),
    ] = None
    keep_checkpoints: Annotated[
        int, Ge(0), Le(MAX_COUNT), Setting("Checkpoints to keep. [default: 2]")
    ] = 2
    """0: none is written, and what dies starts over."""
    eval_every: Annotated[
        Count | None,
        Setting(
            "Steps between evaluations. [default: at the start and after each epoch]", example="200"
        ),
    ] = None
    log_to: Annotated[
        tuple[TrackerName, ...],
        Setting(
            f"{', '.join(TRACKERS)}, or none. [default: tensorboard]",
            metavar="A,B",
            example="tensorboard",
        ),
    ] = ("tensorboard",)
    random_weights: Annotated[
        bool, Setting("Draw the base weights instead of reading them: for measuring a shape.")
    ] = False


class JobSettings(_Declared):
    """What a recipe states beside the two. None: not stated, so that the method decides."""

    epochs: Annotated[
        Annotated[float, Gt(0), Le(10_000)] | None,
        _of_job("Passes over the data. [default: 1]", example="3"),
    ] = None
    effective_batch: Annotated[
        Annotated[int, Gt(0), Le(10**7)] | None,
        _of_job(
            "Sequences, or pairs, per optimizer step, over all GPUs. [default: 16]", example="16"
        ),
    ] = None
    learning_rate: Annotated[
        Annotated[float, Gt(0), Le(10)] | None,
        _of_job(
            "Peak learning rate. [default: by objective and optimizer; AdamW 2e-4, full 2e-5; "
            "dpo 5e-6, full 5e-7]",
            example="2e-4",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSetting:
    """A setting with what its declaration says."""

    name: str
    kind: Any
    """The type, without bounds and without None."""
    default: Any
    least: Any
    most: Any
    """Of a number, both included."""
    setting: Setting

    @property
    def words(self) -> tuple[str, ...]:
        """The words it takes; empty where it takes numbers, truth or names."""
        if self.setting.words or not isinstance(self.kind, type):
            return self.setting.words
        return words_of(self.kind) if issubclass(self.kind, Enum) else ()


@cache
def list_settings(declaring: type = StrategySettings) -> dict[str, DeclaredSetting]:
    """Of one of the classes above, by name, in the order of the declaration."""
    hints = get_type_hints(declaring, include_extras=True)
    found = {}
    for name in declaring.__annotations__:
        kind, facts = _unwrap(hints[name])
        found[name] = DeclaredSetting(
            name=name,
            kind=kind,
            default=getattr(declaring, name),
            least=next((fact.ge for fact in facts if isinstance(fact, Ge)), 1),
            most=next((fact.le for fact in facts if isinstance(fact, Le)), None),
            setting=next(fact for fact in facts if isinstance(fact, Setting)),
        )
    return found


def find_setting(name: str) -> DeclaredSetting:
    return {
        **list_settings(JobSettings),
        **list_settings(TrainingSettings),
        **list_settings(StrategySettings),
    }[name]


def _unwrap(hint: Any) -> tuple[Any, list[Any]]:
    """The type inside `Annotated` and `| None`, and everything declared of it."""
    facts: list[Any] = []
    while True:
        facts += getattr(hint, "__metadata__", ())
        inner = [part for part in get_args(hint) if part is not type(None)]
        is_optional = type(None) in get_args(hint)
        if not hasattr(hint, "__metadata__") and not is_optional:
            return hint, facts
        hint = inner[0]


def words_of(kind: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in kind)


def names_where(**facts: object) -> tuple[str, ...]:
    """Settings of a strategy whose declaration says all of `facts`."""
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
