"""Scores of one answer against its gold text: exact match and ROUGE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tightfit.core.errors import EnvironmentFaultError

ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")


def match_exactly(answer: str, gold: str) -> bool:
    """Every character alike, but for white space around them."""
    return answer.strip() == gold.strip()


def match_loosely(answer: str, gold: str) -> bool:
    """The same words in the same order, whatever white space is between them."""
    return answer.split() == gold.split()


def make_rouge() -> Callable[[str, str], dict[str, float]]:
    """A function (answer, gold) -> F1 of ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 1.

    Google's implementation with stemming, as most published SAMSum figures use it.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as fault:
        raise EnvironmentFaultError(
            "ROUGE needs the rouge-score package, which is not installed.",
            remedy="pip install 'tightfit[eval]', or leave it out with --metric loss",
        ) from fault
    scorer: Any = RougeScorer(list(ROUGE_NAMES), use_stemmer=True)

    def score(answer: str, gold: str) -> dict[str, float]:
        found = scorer.score(gold, answer)
        return {name: float(found[name].fmeasure) for name in ROUGE_NAMES}

    return score
