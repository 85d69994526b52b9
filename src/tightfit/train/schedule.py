"""The learning rate of each step."""

from __future__ import annotations

import math

from tightfit.core.training import Schedule, Training


def learning_rate_at(step: int, num_steps: int, training: Training) -> float:
    """Rate of `step` (from 0): a linear rise, then down to zero or level.

    As transformers' `get_cosine_schedule_with_warmup` and its linear and constant
    sisters count it, so that runs can be compared: the first step of a warm-up has rate 0.
    """
    num_warmup = math.ceil(training.warmup_fraction * num_steps)
    if step < num_warmup:
        return training.learning_rate * step / num_warmup
    if training.schedule is Schedule.CONSTANT:
        return training.learning_rate
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    if training.schedule is Schedule.LINEAR:
        return training.learning_rate * max(0.0, 1.0 - done)
    return training.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
