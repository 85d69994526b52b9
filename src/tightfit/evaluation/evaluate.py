"""Score a model on a data file, next to the base model that it was tuned from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import InvalidInputError
from tightfit.core.progress import CountProgress, Progress
from tightfit.core.strategy import MAX_SEQ_LEN
from tightfit.core.training import DataSource
from tightfit.core.version import __version__
from tightfit.data.encode import EncodeRequest, encode_dataset
from tightfit.data.prompter import Prompter
from tightfit.data.token_store import TokenStore
from tightfit.data.tokenizer import load_tokenizer
from tightfit.evaluation.metrics import (
    LOSS,
    PERPLEXITY,
    AnswerScore,
    Metric,
    Question,
    ScoreKind,
    Scorer,
    choose_metrics,
    read_questions,
)
from tightfit.evaluation.model_outputs import GenerateRequest, RowLosses
from tightfit.evaluation.scored_models import (
    EvalPrompt,
    EvalTarget,
    ScoredModel,
    ScoredModels,
    find_eval_target,
    open_scored_models,
)
from tightfit.evaluation.scores import (
    BASE,
    TUNED,
    AnswerRow,
    Interval,
    MetricScore,
    ModelAnswer,
    Scores,
    ensure_writable,
    estimate_interval,
    write_scores,
)
from tightfit.runtime.artefacts import Artefact, find_artefact

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# From row scores to means, intervals and paired differences.

_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnResult:
    """The results of one model, by row."""

    losses: RowLosses | None
    texts: tuple[str, ...]
    scores: tuple[AnswerScore, ...]


def compare_columns(
    columns: Mapping[str, ColumnResult], kinds: Sequence[ScoreKind]
) -> tuple[MetricScore, ...]:
    """One entry per score: each model's, and the difference of tuned and base."""
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
    """The answers of all models by question."""
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
    """exp(loss). No interval is estimated for its difference."""

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


DEFAULT_BATCH = 16
MAX_DEFAULT_NEW_TOKENS = 512
SPARE_TOKENS = 32
"""Beyond the longest gold answer, where the user does not say how much may be generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRequest:
    """What to score, on what, and how."""

    target: str
    """A run folder, an adapter folder, or a model."""
    data: str
    metrics: tuple[Metric, ...] = ()
    """Empty: chosen by the data."""
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
class _Job:
    """Everything known before weights are loaded."""

    target: EvalTarget
    metrics: tuple[Metric, ...]
    store: TokenStore
    format: str
    questions: list[Question]
    prompter: Prompter
    beside: tuple[Artefact, ...]
    scorer: Scorer
    generation: GenerateRequest | None

    @property
    def longest_prompt(self) -> int:
        """Tokens that leave room for an answer among the model's positions."""
        most, asked = self.target.max_positions, self.generation
        return MAX_SEQ_LEN if most is None or asked is None else max(most - asked.max_new_tokens, 1)

    @property
    def notes(self) -> list[str]:
        """Caveats of the scores."""
        described, notes = self.store.description, []
        if described.num_truncated:
            notes.append(
                f"loss: {described.num_truncated:,} rows are cut to {described.seq_len:,} tokens"
            )
        num_long = sum(len(item.prompt_ids) > self.longest_prompt for item in self.questions)
        if num_long:
            notes.append(
                f"answers: {num_long:,} prompts are too long for the model and lose their beginning"
            )
        return notes + self.scorer.notes


def evaluate_model(request: EvaluateRequest) -> Scores:
    """Score the model. Files and data are checked before weights are loaded."""
    started = time.monotonic()
    job = _prepare(request)
    run = job.target.run
    folder = request.save_to or (None if run is None else run.path / "eval")
    if folder is not None:
        ensure_writable(folder)
    contestants = open_scored_models(
        job.target,
        job.prompter,
        with_base=request.with_base,
        beside=job.beside,
        batch=request.batch,
    )
    columns = {
        column: _measure(job, contestant, _for_stage(request.report, column))
        for column, contestant in contestants
    }
    scores = _summarize(request, job, columns, contestants)
    scores = scores.model_copy(update={"seconds": round(time.monotonic() - started, 3)})
    if folder is None:
        return scores
    answers = list_answers(job.questions, columns)
    return write_scores(scores, answers, folder, _result_name(request))


def _prepare(request: EvaluateRequest) -> _Job:
    target = find_eval_target(request.target)
    if request.template is not None:
        target = replace(target, template=request.template)
    source = DataSource(path=request.data, take=str(request.limit) if request.limit else None)
    encoded = encode_dataset(
        EncodeRequest(
            sources=[source],
            model_folder=target.tokenizer,
            template=target.template,
            train_on=target.train_on,
            seq_len=target.seq_len,
        )
    )
    prompter = Prompter(load_tokenizer(target.tokenizer), target.template)
    data_format, questions = read_questions(source, prompter)
    metrics = request.metrics or choose_metrics(data_format, questions)
    if not questions and set(metrics) != {Metric.LOSS}:
        raise InvalidInputError(
            f"{request.data} is plain text and asks for no answers.", remedy="--metric loss"
        )
    databases = request.databases or _databases_next_to(Path(request.data).expanduser())
    scorer = Scorer(metrics, questions, databases=databases)
    return _Job(
        target=target,
        metrics=metrics,
        store=encoded.train,
        format=data_format,
        questions=questions,
        prompter=prompter,
        beside=tuple(find_artefact(name) for name in request.beside),
        scorer=scorer,
        generation=_generation(request, metrics, questions, encoded.train),
    )


def _generation(
    request: EvaluateRequest,
    metrics: Sequence[Metric],
    questions: Sequence[Question],
    store: TokenStore,
) -> GenerateRequest | None:
    if set(metrics) == {Metric.LOSS}:
        return None
    longest = max(item.num_gold_tokens for item in questions)
    room = min(longest + SPARE_TOKENS, max(MAX_DEFAULT_NEW_TOKENS, longest))
    return GenerateRequest(
        max_new_tokens=request.max_new_tokens or room,
        stop_ids=store.description.stop_token_ids,
        pad_id=store.description.pad_token_id,
        batch=request.batch,
    )


def _measure(
    job: _Job, contestant: ScoredModel, watch: Callable[[str], CountProgress | None]
) -> ColumnResult:
    losses = None
    if Metric.LOSS in job.metrics:
        losses = contestant.measure_loss(job.store, watch("loss"))
    if job.generation is None:
        return ColumnResult(losses=losses, texts=(), scores=())
    asked = [
        EvalPrompt(messages=item.messages, tokens=item.prompt_ids[-job.longest_prompt :])
        for item in job.questions
    ]
    texts = tuple(contestant.answer(asked, job.generation, watch("answers")))
    scores = tuple(job.scorer.score(place, text) for place, text in enumerate(texts))
    return ColumnResult(losses=losses, texts=texts, scores=scores)


def _summarize(
    request: EvaluateRequest,
    job: _Job,
    columns: dict[str, ColumnResult],
    contestants: ScoredModels,
) -> Scores:
    return Scores(
        tightfit_version=__version__,
        model=job.target.name,
        base_model=str(job.target.base or job.target.artefact.path),
        data=request.data,
        format=job.format,
        num_rows=len(job.questions) or len(job.store),
        columns=tuple(columns),
        metrics=compare_columns(columns, job.scorer.kinds),
        template=job.store.description.template,
        device=contestants.device_name,
        dtype=contestants.dtype_name,
        batch=request.batch,
        max_new_tokens=job.generation.max_new_tokens if job.generation else 0,
        seconds=0,
        notes=tuple(job.notes),
    )


def _databases_next_to(data: Path) -> Path | None:
    """A folder `databases` beside the data file, as the demo data has it."""
    folder = data.parent / "databases"
    return folder if folder.is_dir() else None


def _for_stage(report: Progress | None, column: str) -> Callable[[str], CountProgress | None]:
    def of_stage(what: str) -> CountProgress | None:
        if report is None:
            return None
        return lambda done, of: report(f"{column}: {what}", done, of)

    return of_stage


def _result_name(request: EvaluateRequest) -> str:
    """`test` for `data/test.jsonl.gz`; a part of the rows does not replace the scores of all."""
    name = Path(request.data).name.partition(".")[0] or "data"
    return name if request.limit is None else f"{name}-first-{request.limit}"
