"""Exact match, and ROUGE as the library itself gives it."""

from __future__ import annotations

import sys

import pytest

from tightfit.core.errors import SetupError
from tightfit.evaluation.metrics import make_rouge, match_exactly, match_loosely

PAIRS = [
    ("Ann will bring the cakes.", "Ann is bringing cakes to the party."),
    ("nothing alike", "Bob left"),
    ("", "empty answers score nothing"),
    ("the same words", "the same words"),
]


@pytest.mark.parametrize(
    ("answer", "gold", "is_exact", "is_loose"),
    [
        ("a  b", "a b", False, True),
        (" a b\n", "a b", True, True),
        ("a\nb", "a b", False, True),
        ("A b", "a b", False, False),
        ("ab", "a b", False, False),
    ],
)
def test_matching(answer: str, gold: str, is_exact: bool, is_loose: bool) -> None:
    assert match_exactly(answer, gold) is is_exact
    assert match_loosely(answer, gold) is is_loose


def test_rouge_is_the_librarys() -> None:
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    score = make_rouge()

    for answer, gold in PAIRS:
        expected = {name: value.fmeasure for name, value in scorer.score(gold, answer).items()}
        assert score(answer, gold) == pytest.approx(expected)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)

    with pytest.raises(SetupError, match="rouge-score") as caught:
        make_rouge()

    assert "pip install" in caught.value.remedy
