"""Metrics, one record each: its word, what it suits, its scores, and how an answer is scored.

Light to import: the command line takes the words from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, SetupError

if TYPE_CHECKING:
    from tightfit.evaluation.scored_models import Question

_SQL_FRACTION = 0.9
_NUM_SAMPLED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreKind:
    """One number of a metric, as tables and files call it."""

    name: str
    title: str
    is_percent: bool = True
    is_lower_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScore:
    """One metric's scores of one answer."""

    values: dict[str, float]
    """By name of a `ScoreKind`. A score that this row cannot have is left out."""
    query: str | None = None
    problem: str | None = None


Score = Callable[[int, str], AnswerScore]
"""Scores the answer to the question with this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    word: str
    help: str
    kinds: tuple[ScoreKind, ...]
    """Its numbers, the most informative first; no two metrics share a name."""
    suits: Callable[[str, Sequence[Question]], bool]
    """Whether it is chosen by default, by the format of the rows and the questions in them."""
    make_score: Callable[[Sequence[Question], Path | None, list[str]], Score] | None
    """From the questions, the folder of databases and a list that takes notes; None for one that
    needs no answers but the tokens' likelihood."""


# Exact match and ROUGE.


def match_exactly(answer: str, gold: str) -> bool:
    """Equal but for white space around the text."""
    return answer.strip() == gold.strip()


def match_loosely(answer: str, gold: str) -> bool:
    """Equal but for white space between words."""
    return answer.split() == gold.split()


def _score_exact(
    questions: Sequence[Question], _databases: Path | None, _notes: list[str]
) -> Score:
    def score(number: int, answer: str) -> AnswerScore:
        gold = questions[number].gold
        values = {
            "exact": float(match_exactly(answer, gold)),
            "exact_words": float(match_loosely(answer, gold)),
        }
        return AnswerScore(values=values)

    return score


def make_rouge() -> Callable[[str, str], dict[str, float]]:
    """A function (answer, gold) -> F1 of ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 1.

    Google's implementation with stemming, as most published SAMSum figures use it.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise SetupError(
            "ROUGE needs the rouge-score package, which is not installed.",
            remedy="pip install 'tightfit[eval]', or leave it out with --metric loss",
        ) from error
    names = ["rouge1", "rouge2", "rougeL"]
    scorer: Any = RougeScorer(names, use_stemmer=True)

    def score(answer: str, gold: str) -> dict[str, float]:
        found = scorer.score(gold, answer)
        return {name: float(found[name].fmeasure) for name in names}

    return score


def _score_rouge(
    questions: Sequence[Question], _databases: Path | None, _notes: list[str]
) -> Score:
    rouge = make_rouge()
    return lambda number, answer: AnswerScore(values=rouge(answer, questions[number].gold))


# Execution of SQL.


def _asks_for_sql(data_format: str, questions: Sequence[Question]) -> bool:
    from tightfit.evaluation.sql import database_of, extract_query, find_tables

    sampled = questions[:_NUM_SAMPLED]
    num_sql = sum(
        extract_query(item.gold) is not None
        and (database_of(item.values) is not None or bool(find_tables(item.prompt)))
        for item in sampled
    )
    is_sql = bool(sampled) and num_sql >= _SQL_FRACTION * len(sampled)
    return is_sql and not _asks_for_summary(data_format, questions)


def _score_execution(
    questions: Sequence[Question], databases: Path | None, notes: list[str]
) -> Score:
    """Gold queries are run once, here."""
    from tightfit.evaluation.sql import QueryError, QueryLimits, SqlTask, judge_answer, make_task

    limits = QueryLimits()
    tasks: dict[int, SqlTask] = {}
    errors: list[str] = []
    for number, item in enumerate(questions):
        try:
            tasks[number] = make_task(
                item.values,
                prompt=item.prompt,
                gold_answer=item.gold,
                folder=databases,
                limits=limits,
            )
        except QueryError as error:
            errors.append(f"{item.place}: {error}")
    if not tasks:
        raise InvalidInputError(
            f"None of the {len(errors):,} gold answers can be run as a query; "
            f"the first, {errors[0]}.",
            remedy="--metric exact, or name the folder of the databases with --databases",
        )
    if errors:
        notes.append(
            f"execution: {len(errors):,} rows are left out, their gold query cannot be run; "
            f"the first, {errors[0]}"
        )
    if num_synthetic := sum(task.is_synthetic for task in tasks.values()):
        notes.append(
            f"execution: {num_synthetic:,} rows name no database that is here; their queries "
            "ran on synthetic rows, made from the CREATE TABLE statements"
        )
    if num_empty := sum(task.finds_nothing for task in tasks.values()):
        notes.append(
            f"execution: in {num_empty:,} rows the gold query finds nothing, so that any "
            "query that finds nothing counts as right"
        )

    def score(number: int, answer: str) -> AnswerScore:
        if number not in tasks:
            return AnswerScore(values={})
        verdict = judge_answer(tasks[number], answer, limits)
        values = {"execution": float(verdict.is_right)}
        return AnswerScore(values=values, query=verdict.query, problem=verdict.problem)

    return score


# Tool calls.


def _asks_for_calls(_format: str, questions: Sequence[Question]) -> bool:
    return any(question.tools for question in questions)


def _score_calls(questions: Sequence[Question], _databases: Path | None, notes: list[str]) -> Score:
    """Of rows with tools. A row whose gold answer is text is right where nothing is called."""
    from tightfit.data.tools import ToolError, comparable

    if not any(question.tools for question in questions):
        raise InvalidInputError(
            "No row lists tools, so none can be called.",
            remedy="leave `--metric tool-calls` out, or give the rows a `tools` column",
        )
    if num_text := sum(bool(item.tools) and not item.gold_calls for item in questions):
        notes.append(
            f"tool-calls: rows whose right answer is text, so that no call is right: {num_text:,}"
        )

    def score(number: int, answer: str) -> AnswerScore:
        question = questions[number]
        if not question.tools or question.syntax is None:
            return AnswerScore(values={})
        gold = question.gold_calls
        try:
            calls = question.syntax.parse(answer).calls
        except ToolError as error:
            values = {"tool_calls": 0.0, "tool_names": 0.0, "tool_json": 0.0}
            return AnswerScore(values=values, problem=f"a tool call that {error}")
        # Parallel calls have no order.
        names = sorted(call.name for call in calls) == sorted(call.name for call in gold)
        is_right = sorted(map(comparable, calls)) == sorted(map(comparable, gold))
        values = {"tool_calls": float(is_right), "tool_names": float(names)}
        if gold:
            values["tool_json"] = float(bool(calls))
        return AnswerScore(values=values)

    return score


# The records.


def _asks_for_summary(data_format: str, questions: Sequence[Question]) -> bool:
    return bool(questions) and data_format == "dialogue-summary"


LOSS = ScoreKind(name="loss", title="loss, nats a token", is_percent=False, is_lower_better=True)
PERPLEXITY = ScoreKind(
    name="perplexity", title="perplexity", is_percent=False, is_lower_better=True
)
TOOL_CALLS = Metric(
    word="tool-calls",
    help="share of rows with tools whose last calls have the right names and arguments",
    kinds=(
        ScoreKind(name="tool_calls", title="right tool calls"),
        ScoreKind(name="tool_names", title="right tool names"),
        ScoreKind(name="tool_json", title="calls that can be read"),
    ),
    suits=_asks_for_calls,
    make_score=_score_calls,
)
PREFERENCE = Metric(
    word="preference",
    help="of pairs and labelled answers: rewards of the tuned model, and how well they tell "
    "good from bad",
    kinds=(
        ScoreKind(name="reward_accuracy", title="reward accuracy"),
        ScoreKind(name="reward_margin", title="reward margin", is_percent=False),
        ScoreKind(name="likelier", title="chosen answer likelier"),
        ScoreKind(name="reward_ranking", title="good above bad answers (ROC area)"),
        ScoreKind(name="reward_good", title="reward of good answers", is_percent=False),
        ScoreKind(
            name="reward_bad",
            title="reward of bad answers",
            is_percent=False,
            is_lower_better=True,
        ),
        ScoreKind(
            name="chosen_loss",
            title="loss of chosen, nats a token",
            is_percent=False,
            is_lower_better=True,
        ),
    ),
    suits=lambda _format, _questions: False,  # rows of preferences have no other metric
    make_score=None,
)
METRICS = {
    metric.word: metric
    for metric in (
        Metric(
            word="loss",
            help="mean negative log-likelihood of the answers' tokens, and perplexity",
            kinds=(LOSS, PERPLEXITY),
            suits=lambda _format, _questions: True,
            make_score=None,
        ),
        Metric(
            word="exact",
            help="share of answers equal to the gold text: strictly, and but for white space",
            kinds=(
                ScoreKind(name="exact", title="exact match"),
                ScoreKind(name="exact_words", title="exact, spaces aside"),
            ),
            suits=lambda data_format, questions: (
                bool(questions)
                and not _asks_for_summary(data_format, questions)
                and not _asks_for_calls(data_format, questions)
            ),
            make_score=_score_exact,
        ),
        Metric(
            word="rouge",
            help="overlap of words with the gold summary",
            kinds=(
                ScoreKind(name="rouge1", title="ROUGE-1 F1"),
                ScoreKind(name="rouge2", title="ROUGE-2 F1"),
                ScoreKind(name="rougeL", title="ROUGE-L F1"),
            ),
            suits=_asks_for_summary,
            make_score=_score_rouge,
        ),
        Metric(
            word="execution",
            help="share of SQL answers that find what the gold query finds",
            kinds=(ScoreKind(name="execution", title="execution accuracy"),),
            suits=_asks_for_sql,
            make_score=_score_execution,
        ),
        TOOL_CALLS,
        PREFERENCE,
    )  # the most particular
}
"""By word, from the general to the particular; tables show the particular first."""
