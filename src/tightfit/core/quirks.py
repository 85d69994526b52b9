"""What other training stacks do, and ours does not, that changes what they hold in memory."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Quirks(BaseModel):
    """Habits of older or other software. All off in our own plans.

    They let an estimate speak of a job as somebody ran it, with transformers 4,
    FSDP1 or an old bitsandbytes; `benchmarks/published` names where each was found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
