"""`verify_models`: the same text and prompts through each artefact, compared with the first."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, InvalidInputError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.progress import Progress
from tightfit.core.version import __version__
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import Engine, EngineInfo
from tightfit.export.formats import StepKind
from tightfit.export.verify.files import (
    choose_weights,
    compare_settings,
    diagnose,
    measure_size,
    read_stored_dtype,
)
from tightfit.export.verify.judge import (
    EPSILON,
    LEAST_POSITIONS,
    MAKE_AGAIN,
    Step,
    find_noise,
    judge,
    recognise_step,
)
from tightfit.export.verify.sample import (
    WINDOW,
    Answer,
    Sample,
    ask_all,
    compare_answers,
    make_sample,
)
from tightfit.export.verify.scores import (
    ScoreComparison,
    ScoreStore,
    Summary,
    compare_scores,
    record_scores,
    summarise,
)
from tightfit.export.verify.tokenizers import (
    TRICKY_TEXT,
    TokenizerFacts,
    compare_tokenizers,
    read_tokenizer_facts,
)
from tightfit.export.verify.verdict import Comparison, Finding, Level, Verdict
from tightfit.runtime.artefacts import Artefact, ArtefactKind

DEFAULT_TOKENS = 2048
CHECKS_FOLDER = "checks"
LEAST_SAME_ANSWERS = 0.75
"""Of a model without logits; near-ties may change the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """Which artefacts to compare with which reference."""

    reference: Artefact
    others: tuple[Artefact, ...]
    broken: Mapping[str, UserError] = field(default_factory=dict)
    """By name: artefacts that could not be read; each gets a row."""
    text: Path | None = None
    """None: the package's own, and rows of the run where there is one."""
    prompts: tuple[str, ...] | None = None
    """None: a few of our own, and of the run. Empty: none."""
    num_tokens: int = DEFAULT_TOKENS
    steps: Mapping[str, StepKind] = field(default_factory=dict)
    """By the artefact's name, where the kind is not derived from the formats."""
    weights: Dtype | None = None
    """Of unquantized artefacts in memory. None: fp32 where it fits, else as stored."""
    device: str = "auto"
    threads: int | None = None
    saves: bool = True
    """Keep the verdict in the run's folder, where there is a run."""
    report: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """What is kept of the reference once its engine is closed."""

    artefact: Artefact
    info: EngineInfo
    stored: str
    sample: Sample
    words: TokenizerFacts
    answers: list[Answer]
    scores: ScoreStore | None


def verify_models(request: VerifyRequest) -> Verdict:
    """One model in memory at a time. Raises `UserError` where the reference cannot be opened."""
    reference = _read_reference(request)
    try:
        rows = [_compare(request, reference, other) for other in request.others]
    finally:
        if reference.scores is not None:
            reference.scores.close()
    rows += [_unreadable(name, 0, error) for name, error in request.broken.items()]
    perplexities = [row.reference_perplexity for row in rows if row.reference_perplexity]
    verdict = Verdict(
        reference=request.reference.name,
        reference_format=reference.stored,
        reference_size_bytes=measure_size(request.reference),
        reference_perplexity=perplexities[0] if perplexities else None,
        text=reference.sample.source,
        num_tokens=sum(map(len, reference.sample.windows)),
        window=WINDOW,
        dtype=reference.info.format,
        device=reference.info.device,
        rows=tuple(rows),
        is_good=all(row.is_good for row in rows),
        checked_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        tightfit=__version__,
    )
    return _save(request, verdict) if request.saves else verdict


def _read_reference(request: VerifyRequest) -> _Reference:
    artefact = request.reference
    engine = _open(request, artefact)
    try:
        sample = make_sample(
            engine.prompter,
            text=request.text,
            prompts=request.prompts,
            num_tokens=request.num_tokens,
            run=artefact.run,
        )
        has_scores = not engine.prompter.tokenizer.is_encoder_decoder
        watch = _Progress(request, artefact.name, sample, has_scores=has_scores)
        return _Reference(
            artefact=artefact,
            info=engine.info,
            stored=read_stored_dtype(artefact) or engine.info.format,
            sample=sample,
            words=read_tokenizer_facts(artefact, engine, (TRICKY_TEXT, sample.text)),
            answers=ask_all(engine, sample.prompts, watch.answered),
            scores=record_scores(engine, sample.windows, watch.scored) if has_scores else None,
        )
    finally:
        engine.close()


def _compare(request: VerifyRequest, reference: _Reference, artefact: Artefact) -> Comparison:
    start = time.monotonic()
    size = measure_size(artefact)
    try:
        engine = _open(request, artefact)
    except (InvalidInputError, DoesNotFitError) as error:
        if isinstance(error, DoesNotFitError):
            raise
        return _unreadable(artefact.name, size, error)
    try:
        info = engine.info
        words = read_tokenizer_facts(artefact, engine, (TRICKY_TEXT, reference.sample.text))
        watch = _Progress(
            request, artefact.name, reference.sample, has_scores=reference.scores is not None
        )
        answers = ask_all(engine, reference.sample.prompts, watch.answered)
        scores = (
            compare_scores(engine, reference.scores, watch.scored)
            if reference.scores is not None
            else None
        )
    finally:
        engine.close()
    stored = read_stored_dtype(artefact) or info.format
    kind = request.steps.get(artefact.name) or recognise_step(
        reference.stored, stored, is_same_engine=info.engine == reference.info.engine
    )
    row = Comparison(
        name=artefact.name,
        format=stored,
        engine=info.engine,
        size_bytes=size,
        kind=kind,
        num_prompts=len(answers),
    )
    row = _add_text_checks(row, reference, words, answers)
    findings = [*row.findings, *compare_settings(reference.artefact, artefact)]
    if scores is not None:
        computed = info.format if info.engine == "transformers" else stored
        row, found = _add_scores(row, reference, scores, (stored, computed))
        findings += found
        if any(finding.level is Level.FAIL for finding in found):
            findings += diagnose(reference.artefact, artefact)
    else:
        findings += _judge_without_scores(row, reference.artefact, artefact)
    return row.model_copy(
        update={"findings": _ordered(findings), "seconds": time.monotonic() - start}
    )


def _add_text_checks(
    row: Comparison, reference: _Reference, words: TokenizerFacts, answers: list[Answer]
) -> Comparison:
    compared, stops = compare_answers(reference.sample.prompts, reference.answers, answers)
    differing = compare_tokenizers(reference.words, words)
    failed = {
        part: any(finding.level is Level.FAIL for finding in found)
        for part, found in differing.items()
    }
    return row.model_copy(
        update={
            "answers": compared,
            "num_same_answers": sum(answer.first_difference is None for answer in compared),
            "template_same": not failed["template"],
            "tokenizer_same": not failed["tokenizer"],
            "specials_same": not failed["specials"],
            "stops_like_reference": not stops,
            "findings": (*(f for found in differing.values() for f in found), *stops),
        }
    )


def _add_scores(
    row: Comparison, reference: _Reference, scores: ScoreComparison, dtypes: tuple[str, str]
) -> tuple[Comparison, list[Finding]]:
    assert row.kind is not None
    stored = max(dtypes, key=lambda dtype: find_noise(dtype, scores.score))
    noise = max(find_noise(stored, scores.score), find_noise(reference.info.format, scores.score))
    summary: Summary = summarise(scores, noise=noise)
    findings = judge(scores, summary, Step(kind=row.kind, stored=stored, noise=noise))
    if summary.num_positions < LEAST_POSITIONS:
        findings.append(
            Finding(
                level=Level.WARNING,
                text=f"Only {summary.num_positions} places were compared.",
                remedy="--text FILE with more text, or --tokens with a larger number",
            )
        )
    measured = {
        "num_positions": summary.num_positions,
        "top1_fraction": summary.top1.value,
        "top1_low": summary.top1.low,
        "top1_high": summary.top1.high,
        "mean_kl": _finite(summary.kl.value),
        "max_kl": _finite(summary.max_kl),
        "max_abs_logit_diff": _finite(summary.max_diff),
        "perplexity": _finite(summary.perplexity),
        "reference_perplexity": _finite(summary.reference_perplexity),
        "perplexity_change_fraction": _finite(summary.perplexity_change.value),
        "perplexity_change_low": _finite(summary.perplexity_change.low),
        "perplexity_change_high": _finite(summary.perplexity_change.high),
    }
    return row.model_copy(update=measured), findings


def _judge_without_scores(
    row: Comparison, reference: Artefact, artefact: Artefact
) -> list[Finding]:
    """An encoder-decoder has no logits here: its values, where they must be equal, and answers."""
    if row.kind is not StepKind.EXACT:
        return []
    rounding = 4 * max(EPSILON.get(row.format, 0.0), EPSILON["fp32"])
    found = [
        finding.model_copy(update={"level": Level.FAIL})
        for finding in diagnose(reference, artefact, far=rounding)
    ]
    if row.num_same_answers < LEAST_SAME_ANSWERS * row.num_prompts:
        text = f"Only {row.num_same_answers} of {row.num_prompts} answers are the same."
        found.append(Finding(level=Level.FAIL, text=text, remedy=MAKE_AGAIN))
    return found


def _unreadable(name: str, size: int, error: UserError) -> Comparison:
    problem = Finding(level=Level.FAIL, text=error.problem, remedy=error.remedy)
    return Comparison(name=name, size_bytes=size, findings=(problem,))


def _open(request: VerifyRequest, artefact: Artefact) -> Engine:
    weights = choose_weights(artefact, request.weights, request.device)
    wanted = EngineRequest(
        artefact=artefact,
        weights=weights,
        device=request.device,
        slots=1,
        # Only llama.cpp takes threads; other artefacts may run on other engines.
        threads=request.threads if artefact.kind is ArtefactKind.GGUF else None,
        needs_logits=True,
    )
    try:
        return open_engine(wanted)
    except DoesNotFitError:
        if weights is not Dtype.FP32 or request.weights is not None:
            raise
        return open_engine(replace(wanted, weights=None))


def _ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    order = [Level.FAIL, Level.WARNING, Level.NOTE]
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.level)))


def _finite(value: float) -> float | None:
    """JSON has no infinity; the findings report it."""
    return value if abs(value) < float("inf") else None


def _save(request: VerifyRequest, verdict: Verdict) -> Verdict:
    """Save in the reference's run, where it has one."""
    run = request.reference.run
    if run is None:
        return verdict
    stem = "-".join(_slug(artefact) for artefact in request.others) or "unopened"
    path = run.path / CHECKS_FOLDER / f"{stem[:100]}.json"
    saved = verdict.model_copy(update={"saved_to": str(path)})
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, saved.model_dump_json(indent=2) + "\n")
    return saved


def _slug(artefact: Artefact) -> str:
    name = Path(artefact.name).name.removesuffix(".gguf")
    return "".join(sign if sign.isalnum() or sign in "._" else "_" for sign in name)


class _Progress:
    """Progress of one artefact: tokens scored and answers given, on one bar."""

    def __init__(
        self, request: VerifyRequest, name: str, sample: Sample, *, has_scores: bool
    ) -> None:
        self._report = request.report
        self._name = Path(name).name
        self._done = 0
        tokens = sum(map(len, sample.windows)) if has_scores else 0
        self._of = tokens + len(sample.prompts) * WINDOW // 2

    def scored(self, num_tokens: int) -> None:
        self._add(num_tokens)

    def answered(self) -> None:
        self._add(WINDOW // 2)

    def _add(self, amount: int) -> None:
        self._done += amount
        if self._report is not None:
            self._report(self._name, min(self._done, self._of), self._of)
