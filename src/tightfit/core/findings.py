"""Results of checks: findings, and measured values with their intervals."""

from __future__ import annotations

from enum import Enum
from math import sqrt

from tightfit.core.frozen import Frozen


class Status(str, Enum):
    """How a finding stands, best first."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Finding(Frozen):
    """One thing that a check looked at, its status, and what to do about it."""

    area: str
    """`gpu`, `disk`, `packages`, ...; of a compared model `scores`, `template`, `tokenizer`, ..."""
    name: str = ""
    status: Status
    detail: str
    remedy: str | None = None
    """The next step; every warning and error has one."""


# Intervals of proportions.

Z95, Z99 = 1.95996, 2.57583
"""Of the normal distribution, both sides."""


class Interval(Frozen):
    """A value and the interval around it."""

    value: float
    low: float
    high: float


def estimate_share(num_true: int, num_trials: int, *, z: float = Z95) -> Interval:
    """Wilson's interval (J. Am. Stat. Assoc. 22, 1927), which holds near 0 and 1 too."""
    share, scale = num_true / num_trials, 1 + z * z / num_trials
    centre = (share + z * z / (2 * num_trials)) / scale
    spread = share * (1 - share) / num_trials + z * z / (4 * num_trials * num_trials)
    error = z * sqrt(spread) / scale
    return Interval(value=share, low=max(0.0, centre - error), high=min(1.0, centre + error))


def estimate_share_difference(
    *, both: int, first_only: int, second_only: int, neither: int
) -> Interval:
    """The 95% interval of the first share minus the second, over the same trials.

    Source: Newcombe, Statistics in Medicine 17 (1998) 2635, method 10: Wilson's two intervals,
    joined with the correlation of the pairs.
    """
    num_trials = both + first_only + second_only + neither
    one = estimate_share(both + first_only, num_trials)
    two = estimate_share(both + second_only, num_trials)
    product = both * neither - first_only * second_only
    margins = (both + first_only) * (second_only + neither)
    margins *= (both + second_only) * (first_only + neither)
    correlation = 0.0
    if margins:
        if product > 0:  # the paper's correction for continuity
            correlation = max(product - num_trials / 2, 0.0) / sqrt(margins)
        else:
            correlation = product / sqrt(margins)

    def join(a: float, b: float) -> float:
        return sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))

    value = one.value - two.value
    return Interval(
        value=value,
        low=value - join(one.value - one.low, two.high - two.value),
        high=value + join(one.high - one.value, two.value - two.low),
    )
