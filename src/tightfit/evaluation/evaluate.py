"""Score a model on a data file, next to the base model that it was tuned from."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import InvalidInputError
from tightfit.core.findings import Interval
from tightfit.core.objectives import ExampleKind, Objective
from tightfit.core.packages import __version__
from tightfit.core.progress import CountProgress, Progress
from tightfit.core.settings import MAX_SEQ_LEN, TrainOn
from tightfit.core.strategy import DataSource
from tightfit.data.encode import EncodeRequest, encode_dataset
from tightfit.data.preferences import (
    PREFERENCE_EXAMPLES,
    PreferenceFormat,
    find_preference_format,
    holds_preferences,
)
from tightfit.data.sources import open_source, read_part
from tightfit.data.templates import Prompter
from tightfit.data.token_store import TokenStore
from tightfit.data.tokenizer import load_tokenizer
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import EngineInfo
from tightfit.evaluation.metrics import (
    LOSS,
    METRICS,
    PERPLEXITY,
    PREFERENCE,
    TOOL_CALLS,
    Metric,
    Score,
    ScoreKind,
)
from tightfit.evaluation.preference import compute_rewards, score_labelled, score_pairs
from tightfit.evaluation.scored_models import (
    EvalTarget,
    Question,
    RowLosses,
    find_eval_target,
    generate_answers,
    measure_loss,
    read_questions,
)
from tightfit.evaluation.scores import (
    BASE,
    MODEL,
    TUNED,
    AnswerRow,
    MetricScore,
    ModelAnswer,
    Scores,
    ensure_writable,
    estimate_difference,
    estimate_interval,
    write_scores,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_BATCH = 16
MAX_DEFAULT_NEW_TOKENS = 512
SPARE_TOKENS = 32
"""Beyond the longest gold answer, where the user does not say how much may be generated."""
_ENCODED_AS = {ExampleKind.PAIR: Objective.DPO, ExampleKind.LABELLED: Objective.KTO}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRequest:
    """What to score, on what, and how."""

    target: str
    """A run folder, an adapter folder, or a model."""
    data: str
    metrics: tuple[str, ...] = ()
    """Words of `METRICS`. Empty: chosen by the data."""
    tools: str | None = None
    """A file of tools for rows that list none."""
    databases: Path | None = None
    limit: int | None = None
    batch: int = DEFAULT_BATCH
    max_new_tokens: int | None = None
    with_base: bool = True
    beside: tuple[str, ...] = ()
    """Other artefacts of the same model, each a column of its own."""
    template: str | None = None
    """None: the run's own, else the tokenizer's."""
    save_to: Path | None = None
    """None: the run's `eval` folder; without a run, nothing is written."""
    report: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnResult:
    """The results of one model, by row."""

    losses: RowLosses | None
    answers: tuple[ModelAnswer, ...]


def _find_preferences(
    request: EvaluateRequest, source: DataSource, target: EvalTarget
) -> PreferenceFormat | None:
    """The format of rows that are scored as preferences: where that is asked for, where they hold
    no other answer, or where the run learnt from such rows. Raises where they cannot be."""
    row = next(read_part(open_source(source)), None)
    found = None if row is None else find_preference_format(row)
    is_usual = found is not None and found.kind is target.objective.record.example
    is_wanted = PREFERENCE.word in request.metrics or (is_usual and not request.metrics)
    if row is None or not (is_wanted or holds_preferences(row)):
        return None
    if found is None:
        raise InvalidInputError(
            f"{row.place} holds neither a pair of answers nor a labelled one.",
            remedy="name rows like " + ", or ".join(PREFERENCE_EXAMPLES),
        )
    others = [word for word in request.metrics if word != PREFERENCE.word]
    if others:
        raise InvalidInputError(
            f"{row.place} holds {found.title}, which {others[0]} does not score.",
            remedy=f"--metric {PREFERENCE.word}",
        )
    return found


def evaluate_model(request: EvaluateRequest) -> Scores:
    """Score the model. Files and data are checked before weights are loaded."""
    started = time.monotonic()
    target = find_eval_target(request.target, template=request.template)
    artefact = target.artefact
    take = str(request.limit) if request.limit else None
    source = DataSource(path=request.data, take=take, tools=request.tools)
    preference = _find_preferences(request, source, target)
    encoding = EncodeRequest(
        sources=[source],
        model_folder=artefact.tokenizer,
        template=artefact.template,
        train_on=TrainOn.ANSWERS if preference else target.train_on,
        seq_len=target.seq_len,
        objective=_ENCODED_AS[preference.kind] if preference else Objective.SFT,
    )
    store = encode_dataset(encoding).train
    prompter = Prompter(load_tokenizer(artefact.tokenizer), artefact.template)
    # Rows that go on behind a call, with its result and an answer, are asked for the call.
    prefers_calls = not request.metrics or TOOL_CALLS.word in request.metrics
    questions = list[Question]()
    if preference:
        data_format, metrics = preference.name, [PREFERENCE]
    else:
        data_format, questions = read_questions(source, prompter, prefers_calls=prefers_calls)
        metrics = _choose_metrics(request, data_format, questions)
    notes: list[str] = []
    scores = _make_scores(request, metrics, questions, notes)
    max_new_tokens = _count_new_tokens(request, questions) if scores else 0
    artefacts = target.list_columns(request.beside, with_base=request.with_base)
    folder = request.save_to or (artefact.run.path / "eval" if artefact.run else None)
    if folder is not None:
        ensure_writable(folder)

    # Only as long as the rows need: llama.cpp reserves memory for all of it.
    most = target.max_positions or MAX_SEQ_LEN
    longest = max((item.num_prompt_tokens for item in questions), default=0) + max_new_tokens
    context = min(max(longest, int(store.lengths.max())) + 1, most)
    columns: dict[str, ColumnResult] = {}
    infos: dict[str, EngineInfo] = {}
    for name, scored in artefacts.items():
        wanted = EngineRequest(
            artefact=scored, context=context, slots=request.batch, needs_logits=True
        )
        with contextlib.closing(open_engine(wanted)) as engine:
            infos[name] = engine.info
            losses: RowLosses | None = None
            texts: list[str] = []
            if METRICS["loss"] in metrics or preference:
                losses = measure_loss(engine, store, _report(request, f"{name}: loss"))
            if scores:
                report = _report(request, f"{name}: answers")
                texts = generate_answers(
                    engine, questions, max_new_tokens=max_new_tokens, progress=report
                )
        answers = tuple(_score_answer(scores, number, text) for number, text in enumerate(texts))
        columns[name] = ColumnResult(losses=losses, answers=answers)

    own = infos[MODEL if target.base is None else TUNED]
    result = Scores(
        tightfit_version=__version__,
        model=artefact.name,
        base_model=str(target.base or artefact.path),
        data=request.data,
        format=data_format,
        num_rows=len(questions) or len(store) // store.description.rows_per_example,
        columns=tuple(columns),
        metrics=(
            _compare_preferences(columns, target, store.is_good, notes)
            if preference
            else _compare_columns(columns, metrics, notes)
        ),
        template=store.description.template,
        device=own.device,
        dtype=own.format,
        batch=request.batch,
        max_new_tokens=max_new_tokens,
        seconds=round(time.monotonic() - started, 3),
        notes=(*_note_cuts(store, questions, most - max_new_tokens), *notes),
    )
    if folder is None:
        return result
    rows = [
        AnswerRow(
            place=question.place,
            prompt=question.prompt,
            gold=question.gold,
            answers={name: column.answers[number] for name, column in columns.items()},
        )
        for number, question in enumerate(questions if scores else ())
    ]
    # `test` for `data/test.jsonl.gz`; a part of the rows does not replace the scores of all.
    name = Path(request.data).name.partition(".")[0] or "data"
    name = name if request.limit is None else f"{name}-first-{request.limit}"
    return write_scores(result, rows, folder, name)


def _choose_metrics(
    request: EvaluateRequest, data_format: str, questions: Sequence[Question]
) -> list[Metric]:
    """Those that are named, or else those that suit the rows."""
    return [
        metric
        for metric in METRICS.values()
        if metric.word in request.metrics
        or (not request.metrics and metric.suits(data_format, questions))
    ]


def _count_new_tokens(request: EvaluateRequest, questions: Sequence[Question]) -> int:
    longest = max(item.num_gold_tokens for item in questions)
    room = min(longest + SPARE_TOKENS, max(MAX_DEFAULT_NEW_TOKENS, longest))
    return request.max_new_tokens or room


def _make_scores(
    request: EvaluateRequest,
    metrics: Sequence[Metric],
    questions: Sequence[Question],
    notes: list[str],
) -> list[Score]:
    """The function of each metric that compares answers."""
    makers = [metric.make_score for metric in metrics if metric.make_score is not None]
    if makers and not questions:
        raise InvalidInputError(
            f"{request.data} is plain text and asks for no answers.", remedy="--metric loss"
        )
    databases = request.databases
    if databases is None:  # beside the data file, as the demo data has it
        folder = Path(request.data).expanduser().parent / "databases"
        databases = folder if folder.is_dir() else None
    return [make(questions, databases, notes) for make in makers]


def _report(request: EvaluateRequest, stage: str) -> CountProgress | None:
    report = request.report
    return None if report is None else lambda done, total: report(stage, done, total)


def _score_answer(scores: Sequence[Score], number: int, text: str) -> ModelAnswer:
    found = [score(number, text) for score in scores]
    return ModelAnswer(
        text=text,
        scores={name: value for one in found for name, value in one.values.items()},
        query=next((one.query for one in found if one.query is not None), None),
        problem=next((one.problem for one in found if one.problem is not None), None),
    )


def _note_cuts(store: TokenStore, questions: Sequence[Question], most_tokens: int) -> list[str]:
    described, notes = store.description, []
    if described.num_truncated:
        notes.append(
            f"loss: {described.num_truncated:,} rows are cut to {described.seq_len:,} tokens"
        )
    num_long = sum(item.num_prompt_tokens > most_tokens for item in questions)
    if num_long:
        notes.append(
            f"answers: {num_long:,} prompts are too long for the model and lose their beginning"
        )
    return notes


# From row scores to means, intervals and paired differences.

_LARGEST_EXPONENT = 700.0


def _compare_columns(
    columns: Mapping[str, ColumnResult], metrics: Sequence[Metric], notes: list[str]
) -> tuple[MetricScore, ...]:
    """One entry per score: each model's, and the difference of tuned and base, on the same rows."""
    import numpy as np

    compared: list[MetricScore] = []
    for kind in (
        kind for metric in reversed(metrics) if metric.make_score for kind in metric.kinds
    ):
        rows = [
            row
            for row in zip(*(column.answers for column in columns.values()), strict=True)
            if all(kind.name in one.scores for one in row)
        ]
        if not rows:
            notes.append(f"{kind.name}: no row has this score for every model")
            continue
        values = {
            name: np.array([row[place].scores[kind.name] for row in rows])
            for place, name in enumerate(columns)
        }
        compared.append(_metric(kind, values, None))
    losses = {name: column.losses for name, column in columns.items() if column.losses is not None}
    if losses:
        sums = {name: rows.sums for name, rows in losses.items()}
        counts = next(iter(losses.values())).num_tokens.astype(float)
        loss = _metric(LOSS, sums, counts)
        compared += [loss, _perplexity(loss)]
    return tuple(compared)


def _compare_preferences(
    columns: Mapping[str, ColumnResult],
    target: EvalTarget,
    is_good: NDArray[np.bool_] | None,
    notes: list[str],
) -> tuple[MetricScore, ...]:
    """`is_good` holds the labels, None for pairs."""
    losses = {name: column.losses for name, column in columns.items() if column.losses is not None}
    learnt_by = Objective.DPO if target.objective is Objective.SFT else target.objective
    rewards = compute_rewards(losses, objective=learnt_by, beta=target.beta, notes=notes)
    scores = (
        score_pairs(losses, rewards)
        if is_good is None
        else score_labelled(losses, rewards, is_good)
    )
    kinds = {kind.name: kind for kind in PREFERENCE.kinds}
    return tuple(_metric(kinds[one.name], one.values, one.counts) for one in scores)


def _metric(
    kind: ScoreKind,
    values: Mapping[str, NDArray[np.float64]],
    counts: NDArray[np.float64] | None,
) -> MetricScore:
    difference = None
    if BASE in values and TUNED in values:
        difference = estimate_difference(values[TUNED], values[BASE], counts)
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
    """exp(loss). No interval is estimated for its difference."""

    def exp(value: float) -> float:
        return math.exp(min(value, _LARGEST_EXPONENT))

    return loss.model_copy(
        update={
            "name": PERPLEXITY.name,
            "title": PERPLEXITY.title,
            "scores": {
                name: Interval(value=exp(one.value), low=exp(one.low), high=exp(one.high))
                for name, one in loss.scores.items()
            },
            "difference": None,
        }
    )
