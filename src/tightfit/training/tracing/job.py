"""TraceJob: the input of a trace, by value; a process without the model's files can run it."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from tightfit.core.frozen import Frozen
from tightfit.core.settings import Offload
from tightfit.core.strategy import Strategy

STAGES = ("eval", "generate", "save", "resume")
"""Stages of a job beside loading and training steps."""
MAX_TRACED_TOKENS = 8 * 2**20
"""Of a batch: the values of its labels are computed for real, and larger tensors' are not
(`_MAX_BYTES` in concrete_values.py, at 8 bytes each)."""


class Document(Frozen):
    """One text of a batch."""

    num_tokens: PositiveInt
    num_prompt: NonNegativeInt = 0
    """The first tokens, which have no loss."""


class TraceJob(Frozen):
    """One job on one kind of GPU."""

    config: dict[str, Any]
    """The model's config.json."""
    strategy: Strategy
    compute_capability: tuple[int, int] | None
    """Of the GPU; None if it is not NVIDIA's."""
    rows: tuple[tuple[Document, ...], ...] | None = None
    """The texts of each sequence of a micro-batch. None: the largest batch that the plan allows."""
    document_len: PositiveInt | None = None
    """Mean tokens of a packed document. None: one document fills a row."""
    stages: tuple[str, ...] = STAGES
    room_bytes: PositiveInt | None = None
    """Memory for torch's allocator. If given, the job is traced with the fewest recomputed layers
    that fit in it."""
    random_weights: bool = False
    """Whether the base model's weights are random instead of read from files: the order in which
    tensors are allocated differs."""
    expandable_segments: bool = True
    """True as `tightfit train` sets torch's allocator; False is torch's default."""
    is_full_depth: bool = False
    """Trace every layer even if a few would do."""


def find_trace_obstacle(strategy: Strategy) -> str:
    """Why a trace of this strategy would be wrong, as a clause; empty if it would not."""
    num_tokens = strategy.tokens_per_micro_batch
    if not strategy.is_trained:
        return "nothing is trained"
    if strategy.offload is not Offload.NONE:
        return "fake tensors cannot tell the card from the host it offloads to"
    if strategy.weights.is_quantized and strategy.sharding.shards_weights:
        return "packed weights cannot be cut into fake shards"
    if num_tokens > MAX_TRACED_TOKENS:
        return (
            f"a batch of {num_tokens:,} tokens is more than a trace follows ({MAX_TRACED_TOKENS:,})"
        )
    return ""
