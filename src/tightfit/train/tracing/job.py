"""TraceJob: what is to be traced, by value, so that a process without our files could do it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from tightfit.core.strategy import Optimizer, Strategy

STAGES = ("eval", "generate", "save", "resume")
"""What a job does beside loading and stepping."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Document(_Frozen):
    """One text of a batch."""

    num_tokens: PositiveInt
    num_prompt: NonNegativeInt = 0
    """Of them, from the first, that carry no loss."""


class TraceJob(_Frozen):
    """One job on one kind of card."""

    config: dict[str, Any]
    """The model's config.json."""
    strategy: Strategy
    compute_capability: tuple[int, int] | None
    """Of the card; None for cards that are not NVIDIA's."""
    rows: tuple[tuple[Document, ...], ...] | None = None
    """The texts of each sequence of a micro-batch. None: the largest batch that the plan allows."""
    is_padded: bool = True
    """Whether rows of a batch differ in length, so that attention gets a mask."""
    document_len: PositiveInt | None = None
    """Mean tokens of a packed document. None: one document fills a row."""
    stages: tuple[str, ...] = STAGES
    room_bytes: PositiveInt | None = None
    """What torch's allocator may have: then the fewest recomputed layers that fit are found, and
    the job is traced with them."""
    random_weights: bool = False
    """Whether the base model's values are drawn, not read from its files: they come to the card
    in another order."""
    expandable_segments: bool = True
    """As `tightfit train` sets torch's allocator; otherwise torch's default."""
    is_full_depth: bool = False
    """Trace every layer even where a few would do."""


def needs_bitsandbytes(strategy: Strategy) -> bool:
    """Whether the job runs any of its code."""
    of_8bit = (Optimizer.ADAMW_8BIT, Optimizer.ADAMW_PAGED_8BIT)
    return strategy.weights.is_quantized or strategy.optimizer in of_8bit
