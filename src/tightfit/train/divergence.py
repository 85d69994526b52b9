"""Telling a run that has gone wrong from one that is merely noisy."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from tightfit.core.errors import DivergedError
from tightfit.train.agreement import Agreed

_REMEMBERED = 20
_MAX_SKIPPED = 25
"""fp16's scale halves with each overflow: after so many in a row it is below a millionth."""
_TIMES_USUAL = 3.0


class Watch:
    """Sees every step; raises at the first that cannot be trusted."""

    def __init__(self, vocab_size: int, *, is_scaled: bool) -> None:
        self._hopeless = 2 * math.log(vocab_size)
        """Guessing at random costs ln(vocabulary); twice that is worse than knowing nothing."""
        self._is_scaled = is_scaled
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._num_skipped = 0

    def remember(self, losses: Iterable[float]) -> None:
        """What was usual before a resume: a run that was stopped here is not let through then."""
        self._losses.extend(losses)

    def check(self, step: int, agreed: Agreed, places: list[str]) -> None:
        """Raise where the step's loss or gradients are not finite, or the loss has exploded."""
        self._num_skipped = self._num_skipped + 1 if agreed.is_skipped else 0
        if not math.isfinite(agreed.loss):
            raise self._stopped(step, f"the loss is {agreed.loss}", places)
        if agreed.is_skipped and not self._is_scaled:
            raise self._stopped(step, "a gradient is not finite", places)
        if self._num_skipped >= _MAX_SKIPPED:
            raise self._stopped(step, f"fp16 overflowed {_MAX_SKIPPED} times in a row", places)
        if self._has_exploded(agreed.loss):
            usual = statistics.median(self._losses)
            raise self._stopped(
                step, f"the loss went from {usual:.2f} to {agreed.loss:.2f}", places
            )
        self._losses.append(agreed.loss)

    def _has_exploded(self, loss: float) -> bool:
        """From the second step on: a rate far too high shows at once, and then looks usual."""
        if not self._losses:
            return False
        return loss > self._hopeless and loss > _TIMES_USUAL * statistics.median(self._losses)

    def _stopped(self, step: int, what: str, places: list[str]) -> DivergedError:
        shown = "; ".join(places[:4]) + (f"; and {len(places) - 4} more" if places[4:] else "")
        recent = ", ".join(f"{loss:.3f}" for loss in list(self._losses)[-5:]) or "none"
        return DivergedError(
            f"Stopped at step {step}: {what}. Losses before: {recent}. Rows of the batch: {shown}.",
            remedy="look at those rows, or start again with a lower rate: --lr ... --fresh",
        )
