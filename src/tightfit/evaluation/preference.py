"""Scores of preferences: rewards as training has them, and which answer a model finds likelier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tightfit.core.objectives import Objective
from tightfit.evaluation.scored_models import RowLosses
from tightfit.evaluation.scores import BASE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = dict[str, NDArray[np.float64]]


class PreferenceScore(NamedTuple):
    """One score of every example, by column; a column that cannot have it is left out."""

    name: str
    """Of a `ScoreKind` of the metric."""
    values: Values
    counts: NDArray[np.float64] | None = None
    """`values` are sums over so many tokens."""


def score_pairs(losses: Mapping[str, RowLosses], rewards: Values) -> Iterator[PreferenceScore]:
    """From the losses and rewards of two rows for each pair, the chosen one's first."""
    margins = {name: own[0::2] - own[1::2] for name, own in rewards.items()}
    if margins:
        accurate = {name: (own > 0).astype(float) for name, own in margins.items()}
        yield PreferenceScore("reward_accuracy", accurate)
        yield PreferenceScore("reward_margin", margins)
    likelier = {
        name: (rows.sums[0::2] < rows.sums[1::2]).astype(float) for name, rows in losses.items()
    }
    yield PreferenceScore("likelier", likelier)
    yield _chosen_loss(losses, slice(0, None, 2))


def score_labelled(
    losses: Mapping[str, RowLosses], rewards: Values, is_good: NDArray[np.bool_]
) -> Iterator[PreferenceScore]:
    """From the losses and rewards of one row for each labelled answer."""
    import numpy as np

    if is_good.any() and not is_good.all():
        # Mann and Whitney's U over the number of couples, which is the area under the ROC curve.
        ranked = {}
        for name, own in rewards.items():
            bad = np.sort(own[~is_good])
            below = np.searchsorted(bad, own[is_good], "left")
            not_above = np.searchsorted(bad, own[is_good], "right")
            ranked[name] = (below + not_above) / (2 * len(bad))
        if ranked:
            yield PreferenceScore("reward_ranking", ranked)
    for score, kept in (("reward_good", is_good), ("reward_bad", ~is_good)):
        if rewards and kept.any():
            yield PreferenceScore(score, {name: own[kept] for name, own in rewards.items()})
    if is_good.any():
        yield _chosen_loss(losses, is_good)


def _chosen_loss(
    losses: Mapping[str, RowLosses], kept: slice | NDArray[np.bool_]
) -> PreferenceScore:
    counts = next(iter(losses.values())).num_tokens[kept].astype(float)
    sums = {name: rows.sums[kept] for name, rows in losses.items()}
    return PreferenceScore("chosen_loss", sums, counts)


def compute_rewards(
    losses: Mapping[str, RowLosses], *, objective: Objective, beta: float, notes: list[str]
) -> Values:
    """The reward of each row by column.

    As in `training/preference.py`: beta times the log-ratio of an answer to the base's, or, where
    the objective has no reference, beta times its log-probability per token.
    """
    if not objective.record.needs_reference:
        rewards = {name: beta * -rows.sums / rows.num_tokens for name, rows in losses.items()}
    elif BASE in losses:
        base = losses[BASE].sums
        rewards = {name: beta * (base - rows.sums) for name, rows in losses.items() if name != BASE}
    else:
        notes.append("rewards: they are log-ratios to a base model, and none is scored here")
        return {}
    notes.append(f"rewards are those of {objective.value} with beta {beta:g}")
    return rewards
