"""Means with 99% intervals, so that a small sample neither fails a good model nor passes a bad."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, sqrt
from typing import TYPE_CHECKING

from tightfit.export.verify.scores import ScoreComparison

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Z99 = 2.5758
"""Of the normal distribution, both sides."""
BLOCK = 16
"""Neighbouring places lean the same way: they count as one when the spread is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean and its 99% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a verdict rests on."""

    num_positions: int
    top1: Mean
    settled_top1: Mean
    """Without disagreements where the reference itself could hardly decide."""
    kl: Mean
    max_kl: float
    max_diff: float
    first_max_diff: float
    """At the first place of each window alone."""
    perplexity: float
    reference_perplexity: float
    perplexity_change: Mean
    entropy_fraction: float
    is_finite: bool


def summarise(found: ScoreComparison, *, noise: float) -> Summary:
    """`noise`: differences of scores below it mean nothing."""
    import numpy as np

    is_settled = found.is_same | (found.gap <= 2 * noise)
    change = estimate_mean(found.loss - found.reference_loss)
    return Summary(
        num_positions=len(found.kl),
        top1=estimate_share(found.is_same),
        settled_top1=estimate_share(is_settled),
        kl=estimate_mean(found.kl),
        max_kl=_largest(found.kl),
        max_diff=_largest(found.max_diff),
        first_max_diff=_largest(found.max_diff[found.is_first]),
        perplexity=_exp(float(found.loss.mean())),
        reference_perplexity=_exp(float(found.reference_loss.mean())),
        perplexity_change=Mean(
            value=_exp(change.value) - 1, low=_exp(change.low) - 1, high=_exp(change.high) - 1
        ),
        entropy_fraction=float(found.entropy_fraction.mean()),
        is_finite=bool(np.isfinite(found.kl).all()),
    )


def estimate_mean(values: NDArray[np.float64]) -> Mean:
    """By the spread of blocks of neighbouring places."""
    import numpy as np

    value = float(values.mean())
    num_blocks = len(values) // BLOCK
    if num_blocks < 2:
        return Mean(value=value, low=-inf, high=inf)
    blocks = values[: num_blocks * BLOCK].reshape(num_blocks, BLOCK).mean(axis=1)
    error = Z99 * float(np.std(blocks, ddof=1)) / sqrt(num_blocks)
    return Mean(value=value, low=value - error, high=value + error)


def estimate_share(is_so: NDArray[np.bool_]) -> Mean:
    """Wilson's interval (J. Am. Stat. Assoc. 22, 1927), which holds near 0 and 1 too."""
    count = len(is_so)
    share = float(is_so.mean())
    z = Z99 * Z99
    centre = (share + z / (2 * count)) / (1 + z / count)
    error = Z99 * sqrt(share * (1 - share) / count + z / (4 * count * count)) / (1 + z / count)
    return Mean(value=share, low=max(0.0, centre - error), high=min(1.0, centre + error))


def _largest(values: NDArray[np.float64]) -> float:
    return float(values.max()) if len(values) else 0.0


def _exp(value: float) -> float:
    return exp(value) if value < 700 else inf
