"""Tasks of lm-eval on a model beside its base and its quantized forms: what was forgotten."""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from tightfit.core.errors import InvalidInputError, NotFoundError, UserError, first_line
from tightfit.core.files import write_atomic
from tightfit.core.findings import Interval
from tightfit.core.frozen import Frozen
from tightfit.core.packages import __version__
from tightfit.core.progress import Progress
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.evaluation.scored_models import find_eval_target
from tightfit.evaluation.scores import BASE, ensure_writable, estimate_difference
from tightfit.evaluation.suite_tasks import (
    TaskData,
    contained,
    find_data,
    find_tasks,
    open_task,
)
from tightfit.runtime.libraries import silence_libraries

if TYPE_CHECKING:
    from tightfit.engines.protocol import Engine
    from tightfit.runtime.model_files import Artefact

MAX_SUITE_CONTEXT = 4096
"""Where the user names none: llama.cpp reserves memory for all of it."""
SUITE_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRequest:
    """Which tasks, on which models, with which data."""

    target: str
    tasks: tuple[str, ...]
    data: Path
    own_tasks: Path | None = None
    """A folder of the user's YAML files."""
    allows_code: bool = False
    num_fewshot: int | None = None
    """None: as each task says."""
    uses_chat: bool = False
    """Prompts go through the model's chat template."""
    limit: int | None = None
    batch: int | None = None
    context: int | None = None
    with_base: bool = True
    beside: tuple[str, ...] = ()
    template: str | None = None
    save_to: Path | None = None
    report: Progress | None = None


class SuiteValue(Frozen):
    """A mean and its standard error."""

    value: float
    error: float | None
    """None where a task's own code computes the metric of all rows together."""


class SuiteScore(Frozen):
    """One metric of one task, for every model."""

    task: str
    metric: str
    filter: str = ""
    """How the answer was read, where a task reads it in several ways."""
    is_lower_better: bool
    num_rows: PositiveInt
    num_fewshot: NonNegativeInt
    scores: dict[str, SuiteValue]
    """By column."""
    differences: dict[str, Interval]
    """By column: it minus the base, on the same rows, with its 95% interval."""

    @property
    def title(self) -> str:
        return f"{self.metric} ({self.filter})" if self.filter else self.metric


class SuiteScores(Frozen):
    """What `tightfit eval --suite` found."""

    schema_version: int = SUITE_SCHEMA_VERSION
    tightfit_version: str
    lm_eval_version: str
    model: str
    tasks: tuple[str, ...]
    columns: tuple[str, ...]
    formats: dict[str, str]
    """Of each column's weights, with its engine."""
    context: PositiveInt
    is_chat: bool
    limit: int | None
    metrics: tuple[SuiteScore, ...]
    changes: tuple[str, ...]
    """A sentence for each score that became significantly worse or better."""
    seconds: NonNegativeFloat
    notes: tuple[str, ...] = ()
    path: str | None = None


class _TaskRows(Frozen):
    """One model's results of one task, by row: the file that an interrupted evaluation reads."""

    key: str
    """Of the model's files, the task, its data and the settings."""
    engine: str
    num_fewshot: NonNegativeInt
    rows: tuple[str, ...]
    """Digests of the rows, in order."""
    values: dict[str, tuple[Any, ...]]
    """By `metric,filter`."""
    scores: dict[str, float]
    is_lower_better: dict[str, bool]
    answers: tuple[str, ...] = ()
    """Where the task asks for any."""


def score_tasks(request: SuiteRequest) -> SuiteScores:
    """Score every model on every task. Names, data and files are checked before a model loads."""
    started = time.monotonic()
    if not request.data.is_dir():
        raise NotFoundError(
            f"There is no folder {str(request.data)!r}.",
            remedy="--suite-data FOLDER with the rows of each task",
        )
    if request.own_tasks is not None and not request.own_tasks.is_dir():
        raise NotFoundError(
            f"There is no folder {str(request.own_tasks)!r}.",
            remedy="--suite-tasks FOLDER with YAML files of lm-eval",
        )
    files = find_tasks(request.tasks, request.own_tasks, allows_code=request.allows_code)
    shots = {task.name: _count_fewshot(task.settings, request.num_fewshot) for task in files}
    found = [find_data(task, request.data, shots[task.name]) for task in files]
    silence_libraries()
    with contained():
        import logging

        import lm_eval

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        result = _score_columns(request, found, shots, str(lm_eval.__version__))
    result = result.model_copy(update={"seconds": round(time.monotonic() - started, 3)})
    if result.path is not None:
        write_atomic(Path(result.path), result.model_dump_json(indent=2) + "\n")
    return result


def _score_columns(
    request: SuiteRequest,
    found: Sequence[TaskData],
    shots: Mapping[str, int],
    lm_eval_version: str,
) -> SuiteScores:
    target = find_eval_target(request.target, template=request.template)
    artefacts = target.list_columns(request.beside, with_base=request.with_base)
    run = target.artefact.run
    folder = request.save_to or (run.path / "eval" if run else None)
    if folder is not None:
        folder = folder / "suite"
        ensure_writable(folder)
    most = target.max_positions
    context = request.context or min(most or MAX_SUITE_CONTEXT, MAX_SUITE_CONTEXT)
    if most is not None and context > most:
        raise InvalidInputError(
            f"The model reads {most:,} tokens, not {context:,}.", remedy=f"--context {most} or less"
        )

    columns: dict[str, dict[str, _TaskRows]] = {}
    for column, artefact in artefacts.items():
        columns[column] = {}
        with contextlib.ExitStack() as stack:
            engine: Engine | None = None
            for data in found:
                name = data.task.name
                key = _digest(request, data, artefact, shots[name], context)
                path = None if folder is None else folder / f"{_file_name(column, name)}.json"
                rows = _read_rows(path, key)
                if rows is None:
                    if engine is None:
                        engine = open_engine(_ask_for(request, artefact, context))
                        stack.callback(engine.close)
                    rows = _run_task(request, data, engine, key, column, shots[name])
                    if path is not None:
                        write_atomic(path, rows.model_dump_json() + "\n")
                columns[column][name] = rows

    metrics = [
        score
        for data in found
        for score in compare_rows(
            data.task.name, {column: rows[data.task.name] for column, rows in columns.items()}
        )
    ]
    changes = [line for score in metrics for line in _describe_changes(score)]
    num_compared = sum(len(score.differences) for score in metrics)
    notes = []
    if num_compared >= 20:
        notes.append(
            f"of {num_compared} differences with 95% intervals about {num_compared // 20} would "
            "be outside by chance alone"
        )
    return SuiteScores(
        tightfit_version=__version__,
        lm_eval_version=lm_eval_version,
        model=target.artefact.name,
        tasks=tuple(data.task.name for data in found),
        columns=tuple(columns),
        formats={
            column: next(iter(rows.values())).engine for column, rows in columns.items() if rows
        },
        context=context,
        is_chat=request.uses_chat,
        limit=request.limit,
        metrics=tuple(metrics),
        changes=tuple(changes),
        seconds=0,
        notes=tuple(notes),
        path=None if folder is None else str(folder / "suite.json"),
    )


def _count_fewshot(settings: Mapping[str, Any], asked: int | None) -> int:
    """As lm-eval: a task that states 0 keeps it, and whole texts have no examples."""
    if settings.get("output_type") == "loglikelihood_rolling":
        return 0
    stated = settings.get("num_fewshot")
    if stated == 0 or asked is None:
        return int(stated or 0)
    return asked


def _ask_for(request: SuiteRequest, artefact: Artefact, context: int) -> EngineRequest:
    return EngineRequest(artefact=artefact, context=context, slots=request.batch, needs_logits=True)


def _file_name(column: str, task: str) -> str:
    """Of no more than what file systems take, and one for each pair."""
    plain = re.sub(r"[^\w.-]+", "_", f"{column}--{task}")[:100]
    return f"{plain}-{hashlib.blake2b(f'{column}/{task}'.encode(), digest_size=3).hexdigest()}"


def _digest(
    request: SuiteRequest, data: TaskData, artefact: Artefact, num_fewshot: int, context: int
) -> str:
    """One for everything that the rows' results follow from."""
    facts = hashlib.blake2b(digest_size=16)
    words = (
        __version__, data.task.name, num_fewshot, request.uses_chat, request.limit, context,
        artefact.template, artefact.kind.value,
    )  # fmt: skip
    facts.update(repr(words).encode())
    facts.update(repr(sorted((str(k), repr(v)) for k, v in data.task.settings.items())).encode())
    for split, paths in sorted(data.splits.items()):
        for path in paths:
            facts.update(f"{split} {path.name} ".encode() + path.read_bytes())
    for place in filter(None, (artefact.path, artefact.base)):
        inside = sorted(place.iterdir()) if place.is_dir() else [place]
        for path in inside:
            if path.is_file():
                stated = path.stat()
                facts.update(f"{path.name} {stated.st_size} {stated.st_mtime_ns} ".encode())
    return facts.hexdigest()


def _read_rows(path: Path | None, key: str) -> _TaskRows | None:
    """What an earlier evaluation of the same files and settings found."""
    if path is None or not path.is_file():
        return None
    try:
        rows = _TaskRows.model_validate_json(path.read_bytes())
    except (OSError, ValidationError, ValueError):
        return None
    return rows if rows.key == key else None


def _run_task(
    request: SuiteRequest, data: TaskData, engine: Engine, key: str, column: str, num_fewshot: int
) -> _TaskRows:
    import numpy as np
    from jinja2 import TemplateError
    from lm_eval.evaluator import evaluate

    from tightfit.evaluation.suite_model import EngineModel

    name, report = data.task.name, request.report
    if engine.prompter.tokenizer.is_encoder_decoder:
        raise InvalidInputError(
            f"{engine.info.model} is an encoder-decoder, which lm-eval's tasks are not scored on "
            "here.",
            remedy="--data FILE",
        )
    if request.uses_chat and engine.prompter.template is None:
        raise InvalidInputError(
            f"{engine.info.model} has no chat template.", remedy="leave out --suite-chat"
        )
    task = open_task(data, num_fewshot)
    model = EngineModel(
        engine,
        None if report is None else lambda done, total: report(f"{column}: {name}", done, total),
    )
    random.seed(0)
    np.random.seed(1234)
    try:
        found = evaluate(
            lm=model,
            task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
            limit=request.limit,
            bootstrap_iters=0,
            apply_chat_template=request.uses_chat,
            fewshot_as_multiturn=request.uses_chat,
            confirm_run_unsafe_code=request.allows_code,
        )
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, LookupError,
            ImportError, OSError, ArithmeticError, TemplateError) as error:  # fmt: skip
        where = ", ".join(str(one) for files in data.splits.values() for one in files)
        raise InvalidInputError(
            f"lm-eval cannot score {name} on {where}: {type(error).__name__}: {first_line(error)}.",
            remedy="compare its rows with those of the dataset",
        ) from error
    samples: list[dict[str, Any]] = found["samples"][name]
    return read_samples(task, found["results"][name], samples, key, engine, num_fewshot)


def read_samples(
    task: Any,
    results: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    key: str,
    engine: Engine,
    num_fewshot: int,
) -> _TaskRows:
    """lm-eval's results as they are kept."""
    lower = task.higher_is_better()
    values: dict[str, list[Any]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            value = sample[metric]
            plain = value.item() if hasattr(value, "item") else value
            values.setdefault(f"{metric},{sample['filter']}", []).append(plain)
    scores = {
        name: float(results[name])
        for name in values
        if isinstance(results.get(name), int | float) and not isinstance(results[name], str)
    }
    first = samples[0]["filter"]
    own = [sample for sample in samples if sample["filter"] == first]
    asks = task.OUTPUT_TYPE == "generate_until"
    return _TaskRows(
        key=key,
        engine=f"{engine.info.format}, {engine.info.engine} on {engine.info.device}",
        num_fewshot=num_fewshot,
        rows=tuple(str(sample["doc_hash"]) for sample in own),
        values={name: tuple(values[name]) for name in scores},
        scores=scores,
        is_lower_better={name: not lower.get(name.partition(",")[0], True) for name in scores},
        answers=tuple(str(sample["resps"][0][0]) for sample in own) if asks else (),
    )


# From rows to errors and differences.


def compare_rows(task: str, columns: Mapping[str, _TaskRows]) -> list[SuiteScore]:
    """One entry for each metric: each model's, and its difference to the base by pairs of rows."""
    first = next(iter(columns.values()))
    if any(one.rows != first.rows for one in columns.values()):
        raise InvalidInputError(
            f"The models were asked different rows of {task}.", remedy="evaluate them again"
        )
    names = [name for name in first.scores if all(name in one.scores for one in columns.values())]
    filters = {name.partition(",")[2] for name in names}
    found = []
    for name in names:
        metric, _, how = name.partition(",")
        values = {column: _as_pairs(metric, one.values[name]) for column, one in columns.items()}
        scores = {
            column: SuiteValue(
                value=one.scores[name], error=_standard_error(metric, values[column])
            )
            for column, one in columns.items()
        }
        differences = {
            column: difference
            for column in columns
            if column != BASE and BASE in columns
            for difference in [_difference(metric, values[column], values[BASE])]
            if difference is not None
        }
        found.append(
            SuiteScore(
                task=task,
                metric=metric,
                filter=how if len(filters) > 1 else "",
                is_lower_better=first.is_lower_better[name],
                num_rows=len(first.rows),
                num_fewshot=first.num_fewshot,
                scores=scores,
                differences=differences,
            )
        )
    return found


PERPLEXITIES: dict[str, Callable[[float], float]] = {
    "perplexity": lambda mean: math.exp(min(-mean, 700)),
    "word_perplexity": lambda mean: math.exp(min(-mean, 700)),
    "byte_perplexity": lambda mean: math.exp(min(-mean, 700)),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}
"""What lm-eval makes of the mean log-likelihood, of a row or, by weights, of a word or byte."""

Pairs = tuple[Any, Any] | None
"""Values of the rows and their weights."""


def _as_pairs(metric: str, values: Sequence[Any]) -> Pairs:
    """None for metrics that are not a mean, such as F1 over all rows."""
    import numpy as np

    try:
        if metric in PERPLEXITIES and values and isinstance(values[0], tuple | list):
            table = np.array(values, dtype=float)
            return (table[:, 0], table[:, 1])
        sums = np.array(values, dtype=float)
    except (TypeError, ValueError):
        return None
    return (sums, np.ones_like(sums)) if sums.ndim == 1 else None


def _resample(metric: str, *columns: Any) -> Any:
    """Scores of resampled rows, one line for each column: the same rows for all of them."""
    import numpy as np

    rng = np.random.default_rng(20_240_501)
    count = len(columns[0][0])
    drawn = np.empty((len(columns), 1000))
    final = PERPLEXITIES[metric]
    for turn in range(drawn.shape[1]):
        rows = rng.integers(0, count, count)
        for place, (sums, weights) in enumerate(columns):
            drawn[place, turn] = final(sums[rows].sum() / max(weights[rows].sum(), 1e-12))
    return drawn


def _standard_error(metric: str, values: Pairs) -> float | None:
    """Of a mean as lm-eval has it; of a perplexity by resampling rows."""
    if values is None or len(values[0]) < 2:
        return None
    if metric in PERPLEXITIES:
        return float(_resample(metric, values)[0].std(ddof=1))
    return float(values[0].std(ddof=1) / math.sqrt(len(values[0])))


def _difference(metric: str, own: Pairs, base: Pairs) -> Interval | None:
    import numpy as np

    if own is None or base is None:
        return None
    if metric not in PERPLEXITIES:
        return estimate_difference(own[0], base[0])
    final = PERPLEXITIES[metric]
    drawn = _resample(metric, own, base)
    low, high = np.percentile(drawn[0] - drawn[1], (2.5, 97.5))
    value = final(own[0].sum() / own[1].sum()) - final(base[0].sum() / base[1].sum())
    return Interval(value=float(value), low=float(low), high=float(high))


def _describe_changes(score: SuiteScore) -> list[str]:
    lines = []
    for column, change in score.differences.items():
        if change.low <= 0 <= change.high:
            continue
        word = "better" if (change.value < 0) == score.is_lower_better else "worse"
        lines.append(
            f"{score.task} became {word} in {column}: {score.title} "
            f"{score.scores[BASE].value:.3f} to {score.scores[column].value:.3f}, "
            f"{change.value:+.3f} [{change.low:+.3f} to {change.high:+.3f}] on "
            f"{score.num_rows:,} rows."
        )
    return lines
