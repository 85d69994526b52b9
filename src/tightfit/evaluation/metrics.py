"""Metrics: which there are, which suit which data, and the score of each answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.training import DataSource
from tightfit.data.formats import ASSISTANT, Message, to_messages
from tightfit.data.prompter import Prompter
from tightfit.data.sources import open_source, read_source
from tightfit.data.streams import ReadMeter
from tightfit.evaluation.sql import (
    SqlTask,
    database_of,
    extract_query,
    find_tables,
    judge_answer,
    make_task,
)
from tightfit.evaluation.sql_sandbox import QueryError, QueryLimits

# Questions of a data file.


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row: the messages before its last answer, and that answer as gold."""

    place: str
    values: Mapping[str, Any]
    """The whole row, which may name a database."""
    messages: tuple[Message, ...]
    """Everything before the answer."""
    prompt_ids: tuple[int, ...]
    gold: str
    num_gold_tokens: int

    @property
    def prompt(self) -> str:
        """The messages as plain text."""
        return "\n\n".join(message.content for message in self.messages)


def read_questions(source: DataSource, prompter: Prompter) -> tuple[str, list[Question]]:
    """The format of the rows, and a question for each row that has an answer."""
    questions: list[Question] = []
    formats: dict[str, None] = {}
    for row, row_format in read_source(open_source(source), ReadMeter()):
        formats[row_format.name] = None
        messages = to_messages(row, row_format)
        asked = [at for at, message in enumerate(messages) if message.role == ASSISTANT]
        if row_format.name == "text" or not asked or not asked[-1]:
            continue
        before, gold = messages[: asked[-1]], messages[asked[-1]].content
        questions.append(
            Question(
                place=row.place,
                values=row.values,
                messages=tuple(before),
                prompt_ids=prompter.ask(before, place=row.place),
                gold=gold,
                num_gold_tokens=prompter.count_tokens(gold),
            )
        )
    return "+".join(formats), questions


# Exact match and ROUGE.

ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")


def match_exactly(answer: str, gold: str) -> bool:
    """Equal but for white space around the text."""
    return answer.strip() == gold.strip()


def match_loosely(answer: str, gold: str) -> bool:
    """Equal but for white space between words."""
    return answer.split() == gold.split()


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
    scorer: Any = RougeScorer(list(ROUGE_NAMES), use_stemmer=True)

    def score(answer: str, gold: str) -> dict[str, float]:
        found = scorer.score(gold, answer)
        return {name: float(found[name].fmeasure) for name in ROUGE_NAMES}

    return score


_SQL_FRACTION = 0.9
_NUM_SAMPLED = 100


class Metric(str, Enum):
    """A metric."""

    LOSS = "loss"
    """Mean negative log-likelihood of the answers' tokens, and perplexity."""
    EXACT = "exact"
    """Share of answers equal to the gold text: strictly, and but for white space."""
    ROUGE = "rouge"
    EXECUTION = "execution"
    """Share of SQL answers that find what the gold query finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreKind:
    """One number of a metric, as tables and files call it."""

    name: str
    title: str
    is_percent: bool = True
    is_lower_better: bool = False


LOSS = ScoreKind(name="loss", title="loss, nats a token", is_percent=False, is_lower_better=True)
PERPLEXITY = ScoreKind(
    name="perplexity", title="perplexity", is_percent=False, is_lower_better=True
)
SCORE_KINDS = {
    Metric.EXECUTION: (ScoreKind(name="execution", title="execution accuracy"),),
    Metric.ROUGE: (
        ScoreKind(name="rouge1", title="ROUGE-1 F1"),
        ScoreKind(name="rouge2", title="ROUGE-2 F1"),
        ScoreKind(name="rougeL", title="ROUGE-L F1"),
    ),
    Metric.EXACT: (
        ScoreKind(name="exact", title="exact match"),
        ScoreKind(name="exact_words", title="exact, spaces aside"),
    ),
}
"""By metric: its scores, the most informative first."""


def choose_metrics(data_format: str, questions: Sequence[Question]) -> tuple[Metric, ...]:
    """The metrics that suit the data: always loss, and one that compares answers."""
    if not questions:
        return (Metric.LOSS,)
    if data_format == "dialogue-summary":
        return (Metric.LOSS, Metric.ROUGE)
    if _asks_for_sql(questions):
        return (Metric.LOSS, Metric.EXECUTION, Metric.EXACT)
    return (Metric.LOSS, Metric.EXACT)


def _asks_for_sql(questions: Sequence[Question]) -> bool:
    sampled = questions[:_NUM_SAMPLED]
    num_sql = sum(
        extract_query(item.gold) is not None
        and (database_of(item.values) is not None or bool(find_tables(item.prompt)))
        for item in sampled
    )
    return num_sql >= _SQL_FRACTION * len(sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScore:
    """All scores of one answer. A score that this row cannot have is left out."""

    values: dict[str, float]
    query: str | None = None
    problem: str | None = None


class Scorer:
    """Scores answers to a fixed list of questions; gold queries are run once, at the start."""

    def __init__(
        self,
        metrics: Sequence[Metric],
        questions: Sequence[Question],
        *,
        databases: Path | None,
        limits: QueryLimits | None = None,
    ) -> None:
        self.notes: list[str] = []
        self._metrics = metrics
        self._questions = questions
        self._limits = limits or QueryLimits()
        self._rouge: Callable[[str, str], dict[str, float]] | None = (
            make_rouge() if Metric.ROUGE in metrics else None
        )
        self._tasks: list[SqlTask | None] = []
        if Metric.EXECUTION in metrics:
            self._tasks = self._run_gold(databases)

    @property
    def kinds(self) -> list[ScoreKind]:
        return [
            kind
            for metric, kinds in SCORE_KINDS.items()
            if metric in self._metrics
            for kind in kinds
        ]

    def score(self, place: int, answer: str) -> AnswerScore:
        """All scores of the answer to the question at `place`."""
        gold = self._questions[place].gold
        values: dict[str, float] = {}
        query = problem = None
        if Metric.EXACT in self._metrics:
            values["exact"] = float(match_exactly(answer, gold))
            values["exact_words"] = float(match_loosely(answer, gold))
        if self._rouge is not None:
            values |= self._rouge(answer, gold)
        task = self._tasks[place] if self._tasks else None
        if task is not None:
            verdict = judge_answer(task, answer, self._limits)
            values["execution"] = float(verdict.is_right)
            query, problem = verdict.query, verdict.problem
        return AnswerScore(values=values, query=query, problem=problem)

    def _run_gold(self, databases: Path | None) -> list[SqlTask | None]:
        tasks: list[SqlTask | None] = []
        errors: list[str] = []
        for item in self._questions:
            try:
                task = make_task(
                    item.values,
                    prompt=item.prompt,
                    gold_answer=item.gold,
                    folder=databases,
                    limits=self._limits,
                )
            except QueryError as error:
                errors.append(f"{item.place}: {error}")
                tasks.append(None)
            else:
                tasks.append(task)
        self._note_gold_errors([task for task in tasks if task is not None], errors)
        return tasks

    def _note_gold_errors(self, tasks: Sequence[SqlTask], errors: Sequence[str]) -> None:
        if not tasks:
            raise InvalidInputError(
                f"None of the {len(errors):,} gold answers can be run as a query; "
                f"the first, {errors[0]}.",
                remedy="--metric exact, or name the folder of the databases with --databases",
            )
        if errors:
            self.notes.append(
                f"execution: {len(errors):,} rows are left out, their gold query cannot be run; "
                f"the first, {errors[0]}"
            )
        num_synthetic = sum(task.is_synthetic for task in tasks)
        if num_synthetic:
            self.notes.append(
                f"execution: {num_synthetic:,} rows name no database that is here; their queries "
                "ran on synthetic rows, made from the CREATE TABLE statements"
            )
        num_empty = sum(task.finds_nothing for task in tasks)
        if num_empty:
            self.notes.append(
                f"execution: in {num_empty:,} rows the gold query finds nothing, so that any "
                "query that finds nothing counts as right"
            )
