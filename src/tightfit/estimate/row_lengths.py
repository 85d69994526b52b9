"""How long the rows of a batch are, and the documents in them, by what is known of the data."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from tightfit.core.strategy import Strategy
from tightfit.core.workload import DataProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """Mean tokens."""

    row: float
    """Of a row of the batch, padding included."""
    context: float
    """Of what a token attends within: less than a packed row."""
    sequence: float
    """Of what attention is given as one: a row, or a packed document."""


def find_row_lengths(
    strategy: Strategy, profile: DataProfile | None, *, keeps_documents_apart: bool
) -> RowLengths:
    """`seq_len` where nothing is known of the data."""
    full = float(strategy.seq_len)
    if profile is None or (strategy.packing and not keeps_documents_apart):
        return RowLengths(row=full, context=full, sequence=full)
    mean = max(profile.mean_tokens, 1.0)
    if strategy.packing:
        context = min(full, _mean_context(profile))
        return RowLengths(row=full, context=context, sequence=min(full, mean))
    waste = padding_waste(profile, strategy.micro_batch)
    row = min(full, mean / (1.0 - waste))
    return RowLengths(row=row, context=row, sequence=row)


def _mean_context(profile: DataProfile) -> float:
    """Length of the document a packed token is in, on average: long ones hold more tokens."""
    tokens = sum(length * rows for length, rows in profile.histogram)
    squares = sum(length * length * rows for length, rows in profile.histogram)
    return max(1.0, squares / tokens if tokens else profile.mean_tokens)


def padding_waste(profile: DataProfile, micro_batch: int) -> float:
    """Share of padding in batches of this size, between the sizes that were sampled.

    Linear in the logarithm of the batch size; flat beyond the sampled sizes.
    """
    known = sorted((int(size), waste) for size, waste in profile.padding_waste_fraction.items())
    if not known:
        return 0.0
    below = max((pair for pair in known if pair[0] <= micro_batch), default=known[0])
    above = min((pair for pair in known if pair[0] >= micro_batch), default=known[-1])
    if below[0] >= above[0]:
        return min(below[1], 0.99)
    share = log(micro_batch / below[0]) / log(above[0] / below[0])
    return min(below[1] + share * (above[1] - below[1]), 0.99)
