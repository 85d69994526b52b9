"""Before and after: columns of row scores to means, intervals and paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tightfit.evaluate.intervals import Interval, estimate_interval
from tightfit.evaluate.loss import RowLosses
from tightfit.evaluate.metrics import LOSS, PERPLEXITY, AnswerScore, ScoreKind
from tightfit.evaluate.questions import Question
from tightfit.evaluate.scores import BASE, TUNED, AnswerRow, MetricScore, ModelAnswer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnResult:
    """What one model did, row by row."""

    losses: RowLosses | None
    texts: tuple[str, ...]
    scores: tuple[AnswerScore, ...]


def compare_columns(
    columns: Mapping[str, ColumnResult], kinds: Sequence[ScoreKind]
) -> tuple[MetricScore, ...]:
    """One line per number: each model's, and the difference where there are two."""
    import numpy as np

    metrics: list[MetricScore] = []
    for kind in kinds:
        values = {
            name: np.array(
                [score.values[kind.name] for score in column.scores if kind.name in score.values]
            )
            for name, column in columns.items()
        }
        metrics.append(_metric(kind, values, None))
    losses = {name: column.losses for name, column in columns.items() if column.losses is not None}
    if losses:
        sums = {name: rows.sums for name, rows in losses.items()}
        counts = next(iter(losses.values())).num_tokens.astype(float)
        loss = _metric(LOSS, sums, counts)
        metrics += [loss, _perplexity(loss)]
    return tuple(metrics)


def list_answers(
    questions: Sequence[Question], columns: Mapping[str, ColumnResult]
) -> list[AnswerRow]:
    """The answers of all models side by side, for people to read."""
    if not any(column.texts for column in columns.values()):
        return []
    return [
        AnswerRow(
            place=question.place,
            prompt=question.prompt,
            gold=question.gold,
            answers={name: _answer(column, place) for name, column in columns.items()},
        )
        for place, question in enumerate(questions)
    ]


def _answer(column: ColumnResult, place: int) -> ModelAnswer:
    score = column.scores[place]
    return ModelAnswer(
        text=column.texts[place], scores=score.values, query=score.query, problem=score.problem
    )


def _metric(
    kind: ScoreKind,
    values: Mapping[str, NDArray[np.float64]],
    counts: NDArray[np.float64] | None,
) -> MetricScore:
    difference = None
    if BASE in values and TUNED in values:
        difference = estimate_interval(values[TUNED] - values[BASE], counts)
    return MetricScore(
        name=kind.name,
        title=kind.title,
        is_percent=kind.is_percent,
        is_lower_better=kind.is_lower_better,
        num_rows=len(next(iter(values.values()))),
        scores={name: estimate_interval(rows, counts) for name, rows in values.items()},
        difference=difference,
    )


def _perplexity(loss: MetricScore) -> MetricScore:
    """The loss as e to its power; a difference of such numbers has no interval of its own here."""

    def raised(interval: Interval) -> Interval:
        return Interval(
            value=_exp(interval.value), low=_exp(interval.low), high=_exp(interval.high)
        )

    return loss.model_copy(
        update={
            "name": PERPLEXITY.name,
            "title": PERPLEXITY.title,
            "scores": {name: raised(interval) for name, interval in loss.scores.items()},
            "difference": None,
        }
    )


def _exp(value: float) -> float:
    return math.exp(min(value, _LARGEST_EXPONENT))
