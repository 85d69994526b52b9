"""A score with its 95% interval, by resampling rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUM_RESAMPLES = 2000
_SEED = 20_240_501
_TAILS = (2.5, 97.5)


class Interval(BaseModel):
    """A value and where 95% of the resampled values lie."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    low: float
    high: float


def estimate_interval(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> Interval:
    """The weighted mean of rows with its percentile bootstrap interval (Efron, 1979).

    `values` are sums over a row where `weights` are its counts. The draws depend on the
    number of rows alone, so the difference of two models resampled so is a paired one.
    """
    import numpy as np

    counts = np.ones_like(values) if weights is None else weights
    rng = np.random.default_rng(_SEED)
    means = np.empty(NUM_RESAMPLES)
    for turn in range(NUM_RESAMPLES):
        rows = rng.integers(0, len(values), len(values))
        means[turn] = values[rows].sum() / max(counts[rows].sum(), 1e-12)
    low, high = np.percentile(means, _TAILS)
    if weights is None and len(set(values.tolist())) == 1 and values[0] in (0.0, 1.0):
        # Nothing to resample: 3 / n bounds an event never seen in n trials (doi:10.1001/jama.1983.
        # 03330370053031).
        low, high = max(values[0] - 3 / len(values), 0.0), min(values[0] + 3 / len(values), 1.0)
    return Interval(value=float(values.sum() / counts.sum()), low=float(low), high=float(high))
