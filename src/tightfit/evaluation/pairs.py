"""Scores of pairs: which answer a model finds likelier, and its rewards as training has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tightfit.core.objectives import Objective
from tightfit.evaluation.scored_models import RowLosses
from tightfit.evaluation.scores import BASE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PairScore(NamedTuple):
    """One score of every pair, by column; a column that cannot have it is left out."""

    name: str
    """Of a `ScoreKind` of the metric."""
    values: dict[str, NDArray[np.float64]]
    counts: NDArray[np.float64] | None = None
    """`values` are sums over so many tokens."""


def score_pairs(
    losses: Mapping[str, RowLosses], *, objective: Objective, beta: float, notes: list[str]
) -> Iterator[PairScore]:
    """From the losses of two rows for each pair, the chosen one's first.

    As in `training/preference.py`: a reward is beta times the log-ratio of an answer to the base's,
    or, where the objective has no reference, beta times its log-probability per token.
    """
    record = objective.record
    log_probs = {name: -rows.sums for name, rows in losses.items()}
    rewards: dict[str, NDArray[np.float64]] = {}
    if not record.needs_reference:
        rewards = {name: beta * -rows.sums / rows.num_tokens for name, rows in losses.items()}
    elif BASE in log_probs:
        base = log_probs[BASE]
        rewards = {name: beta * (own - base) for name, own in log_probs.items() if name != BASE}
    else:
        notes.append("rewards: they are log-ratios to a base model, and none is scored here")
    if rewards:
        notes.append(f"rewards are those of {objective.value} with beta {beta:g}")
        margins = {name: own[0::2] - own[1::2] for name, own in rewards.items()}
        accurate = {name: (own > 0).astype(float) for name, own in margins.items()}
        yield PairScore("reward_accuracy", accurate)
        yield PairScore("reward_margin", margins)
    likelier = {name: (own[0::2] > own[1::2]).astype(float) for name, own in log_probs.items()}
    yield PairScore("likelier", likelier)
    chosen = {name: rows.sums[0::2] for name, rows in losses.items()}
    counts = next(iter(losses.values())).num_tokens[0::2].astype(float)
    yield PairScore("chosen_loss", chosen, counts)
