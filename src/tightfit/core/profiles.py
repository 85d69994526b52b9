"""Profiles that plans carry: a dataset's row lengths, and the moment of most memory."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tightfit.core.frozen import FiniteFrozen, Frozen


class DataProfile(Frozen):
    """Row lengths of a dataset in tokens, truncated to `seq_len`; made by `data/profile.py`.

    Of preferences a row is an example. A pair is as long as its longer answer with the prompt.
    """

    source: str
    format: str
    """`alpaca`, `chat`, `prompt-completion`, ...: see `data/formats.py`."""
    num_rows: PositiveInt
    num_tokens: PositiveInt
    """Real tokens of one epoch; of both answers of a pair, each with the prompt."""
    num_trained_tokens: PositiveInt
    """Tokens that carry loss: the answers."""
    mean_tokens: NonNegativeFloat
    max_tokens: PositiveInt
    percentiles: dict[str, int]
    """`p50`, `p90`, `p95`, `p99`."""
    histogram: tuple[tuple[int, int], ...]
    """(upper length, rows) pairs, ascending; enough to draw and to re-plan from."""
    num_truncated: int
    seq_len: PositiveInt
    tokenizer: str
    """Which tokenizer counted, or how lengths were guessed."""
    is_exact: bool
    """False: lengths are guessed from characters."""
    padding_waste_fraction: dict[str, float]
    """By micro-batch size as text: share of slots that padding fills in randomly drawn batches."""
    packing_waste_fraction: float
    """Share of slots left empty by best-fit packing at `seq_len`."""
    num_packed_rows: PositiveInt
    """Sequences of `seq_len` after best-fit packing."""
    num_counted_rows: int = 0
    """Rows whose tokens were counted; fewer than `num_rows` where a large file was sampled."""
    longest_row_tokens: int = 0
    """The longest row before truncation: the `seq_len` that would cut nothing."""
    num_lost_tokens: int = 0
    """Tokens that truncation cuts off in one epoch."""


class LengthCut(Frozen):
    """What one `seq_len` would cut off."""

    seq_len: PositiveInt
    num_truncated: NonNegativeInt
    """Rows, or examples of preferences, that lose their end."""
    num_lost_tokens: NonNegativeInt
    num_without_answer: NonNegativeInt
    """Of the rows cut: those that keep nothing to train on, and are left out."""


# Peak: the moment of most memory, tensor by tensor. Part of estimates and of traces.


class PeakTensor(FiniteFrozen):
    """Similar tensors alive at the peak."""

    num_bytes: NonNegativeInt
    """Of all of them together."""
    count: PositiveInt
    category: str
    op: str
    module: str
    """The layer's number replaced by `*`."""
    shape: tuple[int, ...]
    dtype: str


class Peak(FiniteFrozen):
    """The moment at which most memory is allocated, and the tensors alive then."""

    stage: str
    op: str
    module: str
    components: dict[str, int]
    """Category to bytes, summing to the peak."""
    tensors: tuple[PeakTensor, ...]
    """The largest groups, largest first."""
