"""Strategy and Training, the two halves of a job: how it runs, and what is learnt.

Memory depends on the Strategy alone. Both are in the Plan, so that a worker needs nothing else.
The settings are declared in `core/settings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tightfit.core.dtypes import Dtype
from tightfit.core.frozen import FiniteFrozen, Frozen
from tightfit.core.new_tokens import NewTokens
from tightfit.core.objectives import Objective
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import (
    EMBEDDINGS,
    RENAMED_SETTINGS,
    Loss,
    Method,
    Name,
    Sharding,
    StrategySettings,
    TrainingSettings,
)

# What other trainers do, and ours does not, that changes what they hold in memory.


class Quirks(Frozen):
    """Habits of older or other software. All off in our own plans.

    The records of `core/trainers.py` say which trainer has which, and where that is written.
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
    plain_modelling: bool = False
    """Experts, and the attention of Falcon, BLOOM and MPT, run as transformers' own code."""
    late_reference: bool = False
    """The reference runs after the trained model's forward pass, beside all that it keeps."""
    tiled_log_probs: bool = False
    """Log-probabilities of answers by trl's tiles of tokens and words, whose gradients are fp32."""
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


class Strategy(StrategySettings, Frozen):
    """How one job runs. Illegal combinations are judged by `planning/rules`, not here."""

    trainer: str = ""
    """Who runs it, as `--trainer` takes it; empty: tightfit itself."""
    quirks: Quirks = NO_QUIRKS
    """What that trainer does and ours does not."""

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
    def sequences_per_micro_batch(self) -> int:
        """A pair has two."""
        return self.micro_batch * self.objective.record.num_sequences

    @property
    def runs_reference(self) -> bool:
        """Whether each step runs the reference too."""
        needs_reference = self.objective.record.needs_reference and self.is_trained
        return needs_reference and not self.precompute_reference

    @property
    def copies_reference(self) -> bool:
        """Whether the reference is a frozen copy: adapters can be switched off, trained weights
        cannot."""
        return self.runs_reference and self.method is Method.FULL

    @property
    def uses_liger_loss(self) -> bool:
        """Whether Liger's kernels compute the loss. That of preferences is torch's alone."""
        return self.objective is Objective.SFT and self.loss in (Loss.KERNEL, Loss.FUSED)

    @property
    def num_batches(self) -> int:
        """Micro-batches that are computed at once: of each rank, or of ranks that share rows."""
        return max(1, self.world_size // self.context_parallel)

    @property
    def examples_per_step(self) -> int:
        """Sequences, or pairs, of one optimizer step over all ranks."""
        return self.micro_batch * self.grad_accum * self.num_batches

    @property
    def tokens_per_micro_batch(self) -> int:
        """Of one GPU: its slice, where rows are shared."""
        return self.sequences_per_micro_batch * -(-self.seq_len // self.context_parallel)

    @property
    def tokens_per_step(self) -> int:
        """Token slots of one optimizer step over all ranks, padding included."""
        return self.examples_per_step * self.objective.record.num_sequences * self.seq_len

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
    def new_tokens(self) -> NewTokens:
        return NewTokens(plain=self.add_tokens, special=self.add_special_tokens)

    @property
    def num_new_rows(self) -> int:
        """Rows of embeddings and head that LoRA trains alone."""
        if self.method is not Method.LORA or self.train_embeddings:
            return 0
        return len(self.add_tokens) + len(self.add_special_tokens)

    @property
    def trains_head(self) -> bool:
        """Whether a gradient of the head's whole matrix is computed."""
        is_full = self.method is Method.FULL
        return is_full or self.train_embeddings or self.copies_head

    @property
    def adapts_embeddings(self) -> bool:
        """Whether embeddings and head have adapters."""
        return self.method is Method.LORA and EMBEDDINGS in self.lora_targets

    @property
    def copies_head(self) -> bool:
        """Whether each step makes the head's matrix anew: with the rows of new tokens, or, for a
        loss that multiplies with it by itself, with its adapter."""
        return self.num_new_rows > 0 or (self.adapts_embeddings and self.loss is Loss.FUSED)

    @property
    def is_trained(self) -> bool:
        return self.method is not Method.LOAD

    def count_offloaded_inputs(self, num_layers: int) -> int:
        """Layers of a model of `num_layers` whose inputs are in host memory until they are
        recomputed."""
        return max(0, min(self.offloaded_inputs, self.count_recomputed(num_layers) - 1))

    def count_recomputed(self, num_layers: int) -> int:
        """Layers of a model of `num_layers` whose activations are computed again."""
        if not self.checkpointing:
            return 0
        return min(num_layers, self.recomputed_layers or num_layers)


# Training: what is learnt and how, as far as no memory estimate depends on it.


def default_learning_rate(
    method: Method, optimizer: Optimizer, objective: Objective = Objective.SFT
) -> float:
    """The optimizer's own for the method, times the objective's share of AdamW's."""
    is_full = method is Method.FULL
    own, adamw = (
        one.record.full_rate if is_full else one.record.lora_rate
        for one in (optimizer, Optimizer.ADAMW)
    )
    stated = objective.record.full_rate if is_full else objective.record.lora_rate
    return own if stated is None else own * (stated / adamw)


DEFAULT_ALPHA_PER_RANK = 2.0
"""LoRA's scale is alpha / rank; twice the rank is what most open recipes write."""

MEMORY_VARIABLE = "TIGHTFIT_MEMORY_LIMIT_BYTES"
"""Read by a worker, which then cannot take more."""


class DataSource(FiniteFrozen):
    """One file or folder of rows."""

    path: Name
    weight: float = Field(default=1.0, gt=0, le=10**6)
    """Times each row is seen in an epoch: 2 shows every row twice, 0.5 a fresh half each epoch."""
    split: Literal["train", "eval"] = "train"
    take: Name | None = None
    """A part of the rows, as people write it: `10`, `1%`, `[:10%]`, `train[10:20]`."""
    text_rows: Literal["file", "line"] = "file"
    """What is a row in files of plain text and Markdown: a whole file is one document."""
    tools: Name | None = None
    """A JSON file of the tools that every row may call which lists none itself."""

    def with_paths(self, change: Callable[[str], str]) -> DataSource:
        """With what `change` makes of each of its paths."""
        tools = None if self.tools is None else change(self.tools)
        return self.model_copy(update={"path": change(self.path), "tools": tools})


class Training(TrainingSettings, FiniteFrozen):
    """The learning side of a job."""

    model_path: Name
    """Folder with the base model's weights, tokenizer and config."""
    data: tuple[DataSource, ...] = ()
    learning_rate: Annotated[float, Field(gt=0)]
    keep_result: bool = True
    """False: what was learnt is dropped at the end: for measuring."""

    def beta_of(self, objective: Objective) -> float:
        """Stated, or the objective's own."""
        return (objective.record.beta or 0.0) if self.beta is None else self.beta

    def gamma_of(self, objective: Objective) -> float:
        """SimPO's target margin; 0 for others."""
        own = objective.record.gamma
        return 0.0 if own is None else own if self.simpo_gamma is None else self.simpo_gamma

    def scale_alpha(self, rank: int) -> float:
        """LoRA's alpha, stated or by rank."""
        return DEFAULT_ALPHA_PER_RANK * rank if self.lora_alpha is None else self.lora_alpha
