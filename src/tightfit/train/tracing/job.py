"""TraceJob: what is to be traced, by value, so that a process without our files could do it."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from tightfit.core.frozen import Frozen
from tightfit.core.strategy import Offload, Strategy

STAGES = ("eval", "generate", "save", "resume")
"""What a job does beside loading and stepping."""
MAX_TRACED_TOKENS = 8 * 2**20
"""Of a batch: the values of its labels are computed for real, and larger tensors' are not
(`_MAX_BYTES` in shadows.py, at 8 bytes each)."""


class Document(Frozen):
    """One text of a batch."""

    num_tokens: PositiveInt
    num_prompt: NonNegativeInt = 0
    """Of them, from the first, that carry no loss."""


class TraceJob(Frozen):
    """One job on one kind of card."""

    config: dict[str, Any]
    """The model's config.json."""
    strategy: Strategy
    compute_capability: tuple[int, int] | None
    """Of the card; None for cards that are not NVIDIA's."""
    rows: tuple[tuple[Document, ...], ...] | None = None
    """The texts of each sequence of a micro-batch. None: the largest batch that the plan allows."""
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


def find_trace_obstacle(strategy: Strategy) -> str:
    """Why a trace of this would be wrong, as a clause; empty where it would not."""
    num_tokens = strategy.micro_batch * strategy.seq_len
    if not strategy.is_trained:
        return "nothing is trained"
    if strategy.compile:
        return "compiled layers allocate what the compiler decides"
    if strategy.offload is not Offload.NONE:
        return "fake tensors cannot tell the card from the host it offloads to"
    if strategy.weights.is_quantized and strategy.sharding.shards_weights:
        return "packed weights cannot be cut into fake shards"
    if num_tokens > MAX_TRACED_TOKENS:
        return (
            f"a batch of {num_tokens:,} tokens is more than a trace follows ({MAX_TRACED_TOKENS:,})"
        )
    return ""
