"""Score intervals of proportions, against their definitions and by counting every outcome."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tightfit.core.findings import Z95, estimate_share, estimate_share_difference
from tightfit.evaluation.scores import estimate_difference


@pytest.mark.parametrize(("num_true", "num_trials"), [(0, 4), (1, 7), (30, 100), (9, 9)])
def test_wilson_bounds_are_the_shares_that_a_test_just_accepts(
    num_true: int, num_trials: int
) -> None:
    found = estimate_share(num_true, num_trials)
    shares = np.linspace(0, 1, 200_001)
    spread = np.sqrt(shares * (1 - shares) / num_trials)
    accepted = shares[np.abs(num_true / num_trials - shares) <= Z95 * spread + 1e-12]

    assert found.value == num_true / num_trials
    assert found.low == pytest.approx(accepted.min(), abs=1e-4)
    assert found.high == pytest.approx(accepted.max(), abs=1e-4)


def test_no_difference_on_few_rows_lies_in_the_middle() -> None:
    """Both models answer nothing right: neither is shown to be better."""
    found = estimate_difference(np.zeros(4), np.zeros(4))

    assert found.value == 0
    assert found.low == -found.high
    assert found.high == pytest.approx(estimate_share(0, 4).high)


def test_models_change_places() -> None:
    tuned, base = np.array([1.0, 1, 1, 0, 1, 0]), np.array([1.0, 0, 0, 1, 0, 0])
    there, back = estimate_difference(tuned, base), estimate_difference(base, tuned)

    assert there.value == pytest.approx(2 / 6)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low))


@pytest.mark.parametrize(
    "chances", [(0.3, 0.2, 0.1, 0.4), (0.05, 0.1, 0.05, 0.8), (0, 0.3, 0, 0.7)]
)
def test_the_paired_interval_covers_as_often_as_it_promises(
    chances: tuple[float, float, float, float],
) -> None:
    """Over all outcomes of 20 pairs with these chances, each as likely as it is."""
    num = 20
    truth = chances[1] - chances[2]
    covered = total = 0.0
    for both in range(num + 1):
        for first in range(num + 1 - both):
            for second in range(num + 1 - both - first):
                counts = (both, first, second, num - both - first - second)
                ways = math.factorial(num) / math.prod(map(math.factorial, counts))
                weight = ways * math.prod(p**n for p, n in zip(chances, counts, strict=True))
                found = estimate_share_difference(
                    both=both, first_only=first, second_only=second, neither=counts[3]
                )
                total += weight
                covered += weight * (found.low <= truth <= found.high)

    assert total == pytest.approx(1)
    assert covered > 0.93
