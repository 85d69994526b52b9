"""`verify_models`: the same text and prompts through each artefact, compared with the first."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from math import inf
from pathlib import Path

from tightfit.core.dtypes import Dtype, find_plain_dtype
from tightfit.core.errors import DoesNotFitError, InvalidInputError, NotFoundError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.findings import Finding, Status
from tightfit.core.packages import __version__
from tightfit.core.progress import Progress
from tightfit.core.reading import read_text
from tightfit.core.sampling import Sampling
from tightfit.data.formats import ASSISTANT, USER, Message
from tightfit.data.sources import open_source, read_source
from tightfit.data.templates import Prompter, TemplateRenderError
from tightfit.data.token_store import TokenStore
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import Done, Engine, EngineInfo, FinishReason, Request, answer_all
from tightfit.export.formats import StepKind
from tightfit.export.verify.files import (
    TRICKY_TEXT,
    TokenizerFacts,
    choose_weights,
    compare_settings,
    compare_tokenizers,
    diagnose,
    read_rounding_factor,
    read_stored_dtype,
    read_tokenizer_facts,
)
from tightfit.export.verify.scores import (
    EPSILON,
    ScoreStore,
    Summary,
    Window,
    compare_scores,
    find_noise,
    judge,
    recognise_step,
    record_scores,
    summarise,
)
from tightfit.export.verify.verdict import (
    AnswerComparison,
    Comparison,
    Verdict,
    fail,
    find_difference,
)
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.model_files import Artefact, ArtefactKind

# What artefacts are compared on: windows of text, prompts, and the greedy answers to them.

WINDOW = 512
"""Tokens that are read in one go."""
LEAST_WINDOW = 32
"""A shorter remainder is left out."""
TEXT_FILE = "check_text.txt"
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
    "What is 12 times 12?",
    "Write a SQL query that counts the rows of the table `orders`.",
    "Explain in two sentences why ice floats.",
)
NUM_RUN_PROMPTS = 4
RUN_FRACTION = 0.5
"""Of the tokens, from the run's own rows where there are some."""

Prompt = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The same for every artefact of a check."""

    source: str
    """What the text is, for the report."""
    text: str
    """For the tokenizers; empty where the windows come from elsewhere alone."""
    windows: tuple[Window, ...]
    prompts: tuple[Prompt, ...]


def make_sample(
    prompter: Prompter,
    *,
    text: Path | None,
    prompts: Sequence[str] | None,
    num_tokens: int,
    run: RunFolder | None,
) -> Sample:
    """A given text alone; else rows of the run, where it has some, and the package's own text."""
    windows: list[Window] = []
    sources = []
    if text is None and run is not None and not prompter.tokenizer.is_encoder_decoder:
        windows = list(_limit(_run_windows(run), int(num_tokens * RUN_FRACTION)))
        sources += ["rows of the run"] if windows else []
    content = _read_text(text)
    room = num_tokens - sum(map(len, windows))
    windows += _limit(_cut(content, prompter), room)
    sources.append(text.name if text is not None else "the package's own text")
    if sum(map(len, windows)) < LEAST_WINDOW:
        raise InvalidInputError(
            f"{text or 'The text'} has too few tokens to compare anything.",
            remedy="--text FILE with a page of text or more",
        )
    asked: list[Prompt] = [(Message(USER, words),) for words in prompts or ()]
    if prompts is None:
        asked = _run_prompts(run) if run is not None else []
        asked += [(Message(USER, words),) for words in PROMPTS[: len(PROMPTS) - len(asked) // 2]]
    return Sample(
        source=" and ".join(sources),
        text=content[: 20 * WINDOW],
        windows=tuple(windows),
        prompts=tuple(asked),
    )


def read_prompts(path: Path) -> tuple[str, ...]:
    """Lines of a text file, or the questions of a data file in any format that `train` reads."""
    if path.suffix.lower() in (".txt", ".text", ".raw", ""):
        lines = [line.strip() for line in _read_text(path).splitlines()]
        found = [line for line in lines if line]
    else:
        found = [messages[-1].content for messages in _rows_before_answers(str(path))]
    if not found:
        raise InvalidInputError(f"{path} holds no prompts.", remedy="write one on each line")
    return tuple(found)


def _read_text(path: Path | None) -> str:
    if path is None:
        return resources.files("tightfit.catalogue").joinpath(TEXT_FILE).read_text("utf-8")
    try:
        return read_text(path)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"There is no file {str(path)!r}.", remedy="--text with a file of plain text"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path} cannot be read as text: {error}.", remedy="--text with a UTF-8 text file"
        ) from error


def _cut(text: str, prompter: Prompter) -> Iterator[Window]:
    """Consecutive windows, each with the tokenizer's own start tokens."""
    tokenizer = prompter.tokenizer
    first = [] if tokenizer.begins_with is None else [tokenizer.token_id(tokenizer.begins_with)]
    start = [number for number in first if number is not None]
    tokens = tokenizer.encode(text)
    size = WINDOW - len(start)
    for at in range(0, len(tokens), size):
        yield (*start, *tokens[at : at + size])


def _run_windows(run: RunFolder) -> Iterator[Window]:
    """Rows as they were trained on or held back; none where the cache no longer has them."""
    with contextlib.suppress(UserError, OSError):
        folders = run.read_tokens()
        store = TokenStore(Path(folders.eval or folders.train))
        for index in range(len(store)):
            yield tuple(int(token) for token in store.row(index).tokens[:WINDOW])


def _limit(windows: Iterator[Window], most: int) -> Iterator[Window]:
    held = 0
    for window in windows:
        part = window[: most - held]
        if len(part) < LEAST_WINDOW:
            if held + len(part) >= most:
                return
            continue
        held += len(part)
        yield part


def _run_prompts(run: RunFolder) -> list[Prompt]:
    """Questions of the run's rows, validation rows first."""
    with contextlib.suppress(UserError, OSError):
        training = run.read_plan().training
        sources = [] if training is None else sorted(training.data, key=lambda s: s.split)
        for source in sources:
            rows = _rows_before_answers(source.path)
            return list(itertools.islice(rows, NUM_RUN_PROMPTS))
    return []


def _rows_before_answers(path: str) -> Iterator[Prompt]:
    from tightfit.core.strategy import DataSource

    for row, row_format in read_source(open_source(DataSource(path=path))):
        messages = row_format.to_messages(row)
        asked = [at for at, message in enumerate(messages) if message.role == ASSISTANT]
        if asked and asked[-1] and row_format.name != "text":
            yield tuple(messages[: asked[-1]])
        elif not asked and messages:
            yield tuple(messages)


# Greedy answers, and where two engines' answers differ.

ANSWER_TOKENS = 48
ANSWERS_AT_ONCE = 8
"""Where memory is taken as answers grow; llama.cpp reserves the whole context of each."""
ANSWER_WEIGHT = WINDOW // 2
"""Of one answer on the progress bar, in tokens scored."""
LEAST_STOPPED = 3
"""Answers of the reference that must stop by themselves for the test to mean anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one prompt."""

    text: str
    tokens: tuple[int, ...]
    is_stopped: bool
    """It ended by itself, not at the limit."""


_NONE = Answer(text="", tokens=(), is_stopped=False)
"""To a prompt that could not be asked."""


def ask_all(
    engine: Engine, prompts: Sequence[Prompt], report: Callable[[int], None]
) -> list[Answer]:
    """Each prompt by the engine's own template and tokenizer, greedily, several at once.

    One that the template or the engine refuses has an empty answer.
    """
    answers = [_NONE] * len(prompts)
    requests: dict[int, Request] = {}
    for number, prompt in enumerate(prompts):
        with contextlib.suppress(InvalidInputError, TemplateRenderError):
            requests[number] = _make_request(engine, prompt)
    asked, tokens = list(requests), [list[int]() for _ in requests]
    ends = answer_all(
        engine, requests.values(), on_delta=lambda at, delta: tokens[at].extend(delta.tokens)
    )
    report(ANSWER_WEIGHT * (len(prompts) - len(asked)))
    for at, end in ends:
        if isinstance(end, Done):
            is_stopped = end.reason is FinishReason.STOP
            answers[asked[at]] = Answer(
                text=end.text, tokens=tuple(tokens[at]), is_stopped=is_stopped
            )
        elif not isinstance(end.error, InvalidInputError):
            raise end.error  # non-finite logits, which are refused so, are judged with the scores
        report(ANSWER_WEIGHT)
    return answers


def compare_answers(
    prompts: Sequence[Prompt], reference: Sequence[Answer], other: Sequence[Answer]
) -> tuple[tuple[AnswerComparison, ...], list[Finding]]:
    """Pairs of answers, and findings about stop tokens."""
    rows = tuple(
        AnswerComparison(
            prompt=prompt[-1].content,
            reference=one.text,
            other=two.text,
            first_difference=None
            if (one.text, one.is_stopped) == (two.text, two.is_stopped)
            else find_difference(one.tokens, two.tokens),
            reference_stopped=one.is_stopped,
            other_stopped=two.is_stopped,
        )
        for prompt, one, two in zip(prompts, reference, other, strict=True)
    )
    return rows, _judge_stops(rows)


def _judge_stops(rows: Sequence[AnswerComparison]) -> list[Finding]:
    """A model that gives the same answer and does not stop has lost its stop token."""
    runs_on = [
        row
        for row in rows
        if row.reference_stopped
        and not row.other_stopped
        and row.reference.strip()
        and row.other.startswith(row.reference)
    ]
    ended = [row for row in rows if row.reference_stopped]
    never = len(ended) >= LEAST_STOPPED and not any(row.other_stopped for row in rows)
    if not runs_on and not never:
        return []
    finding = (
        f"gives the same answer to {runs_on[0].prompt[:40]!r} and runs on where the reference stops"
        if runs_on
        else f"never ends an answer by itself; the reference ends {len(ended)} of {len(rows)}"
    )
    remedy = (
        "the end-of-turn token is lost: compare eos_token_id in generation_config.json and "
        "tokenizer_config.json with the reference's, and make this one again"
    )
    return [fail("answers", f"It {finding}.", remedy)]


def _make_request(engine: Engine, prompt: Prompt) -> Request:
    ids = engine.prompter.chat(prompt)
    room = max(1, min(ANSWER_TOKENS, engine.info.max_context - len(ids) - 1))
    return Request(prompt=ids, sampling=Sampling(max_new_tokens=room))


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
        reference_size_bytes=request.reference.size_bytes,
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
        advance = _make_progress(request, artefact.name, sample, has_scores=has_scores)
        return _Reference(
            artefact=artefact,
            info=engine.info,
            stored=read_stored_dtype(artefact) or engine.info.format,
            sample=sample,
            words=read_tokenizer_facts(artefact, engine, (TRICKY_TEXT, sample.text)),
            answers=ask_all(engine, sample.prompts, advance),
            scores=record_scores(engine, sample.windows, advance) if has_scores else None,
        )
    finally:
        engine.close()


def _compare(request: VerifyRequest, reference: _Reference, artefact: Artefact) -> Comparison:
    start = time.monotonic()
    size, sample = artefact.size_bytes, reference.sample
    try:
        engine = _open(request, artefact)
    except InvalidInputError as error:
        return _unreadable(artefact.name, size, error)
    try:
        info = engine.info
        words = read_tokenizer_facts(artefact, engine, (TRICKY_TEXT, sample.text))
        has_scores = reference.scores is not None
        advance = _make_progress(request, artefact.name, sample, has_scores=has_scores)
        answers = ask_all(engine, sample.prompts, advance)
        scores = None
        if reference.scores is not None:
            scores = compare_scores(engine, reference.scores, advance)
    finally:
        engine.close()
    stored = read_stored_dtype(artefact) or info.format
    kind = request.steps.get(artefact.name) or recognise_step(
        reference.stored, stored, is_same_engine=info.engine == reference.info.engine
    )
    compared, stops = compare_answers(sample.prompts, reference.answers, answers)
    findings = [*compare_tokenizers(reference.words, words), *stops]
    different = {finding.area for finding in findings if finding.status is Status.ERROR}
    row = Comparison(
        name=artefact.name,
        format=stored,
        engine=info.engine,
        size_bytes=size,
        kind=kind,
        num_prompts=len(answers),
        answers=compared,
        num_same_answers=sum(answer.first_difference is None for answer in compared),
        template_same="template" not in different,
        tokenizer_same="tokenizer" not in different,
        specials_same="specials" not in different,
        stops_like_reference=not stops,
    )
    findings += compare_settings(reference.artefact, artefact)
    measured: dict[str, float | None] = {}
    if scores is None:
        findings += _judge_without_scores(row, reference.artefact, artefact)
    else:
        computed = info.format if info.engine == "transformers" else stored
        coarsest = max(stored, computed, key=lambda dtype: find_noise(dtype, scores.score))
        noise = max(find_noise(d, scores.score) for d in (coarsest, reference.info.format))
        noise *= read_rounding_factor(reference.artefact)
        summary = summarise(scores, noise=noise)
        found = judge(scores, summary, kind=kind, stored=coarsest, noise=noise)
        if any(finding.status is Status.ERROR for finding in found):
            found += diagnose(reference.artefact, artefact)
        findings += found
        measured = _list_figures(summary)
    order = list(Status)
    findings = sorted(dict.fromkeys(findings), key=lambda one: -order.index(one.status))
    seconds = time.monotonic() - start
    return row.model_copy(update={**measured, "findings": tuple(findings), "seconds": seconds})


def _list_figures(summary: Summary) -> dict[str, float | None]:
    figures = {
        "num_positions": summary.num_positions,
        "top1_fraction": summary.top1.value,
        "top1_low": summary.top1.low,
        "top1_high": summary.top1.high,
        "mean_kl": summary.kl.value,
        "max_kl": summary.max_kl,
        "max_abs_logit_diff": summary.max_diff,
        "perplexity": summary.perplexity,
        "reference_perplexity": summary.reference_perplexity,
        "perplexity_change_fraction": summary.perplexity_change.value,
        "perplexity_change_low": summary.perplexity_change.low,
        "perplexity_change_high": summary.perplexity_change.high,
    }
    # JSON has no infinity; the findings report it.
    return {name: value if abs(value) < inf else None for name, value in figures.items()}


def _judge_without_scores(
    row: Comparison, reference: Artefact, artefact: Artefact
) -> list[Finding]:
    """An encoder-decoder has no logits here: its values, where they must be equal, and answers."""
    if row.kind is not StepKind.EXACT:
        return []
    rounding = 4 * EPSILON[find_plain_dtype(row.format) or Dtype.FP32]
    found = [
        finding.model_copy(update={"status": Status.ERROR})
        for finding in diagnose(reference, artefact, far=rounding)
    ]
    if row.num_same_answers < LEAST_SAME_ANSWERS * row.num_prompts:
        text = f"Only {row.num_same_answers} of {row.num_prompts} answers are the same."
        found.append(fail("answers", text))
    return found


def _unreadable(name: str, size: int, error: UserError) -> Comparison:
    found = (fail("file", error.problem, error.remedy),)
    return Comparison(name=name, size_bytes=size, findings=found)


def _open(request: VerifyRequest, artefact: Artefact) -> Engine:
    weights = choose_weights(artefact, request.weights, request.device)
    wanted = EngineRequest(
        artefact=artefact,
        weights=weights,
        device=request.device,
        slots=1 if artefact.kind is ArtefactKind.GGUF else ANSWERS_AT_ONCE,
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


def _save(request: VerifyRequest, verdict: Verdict) -> Verdict:
    """Save in the reference's run, where it has one."""
    run = request.reference.run
    if run is None:
        return verdict
    names = [Path(artefact.name).name.removesuffix(".gguf") for artefact in request.others]
    stem = re.sub(r"[^\w.\-]", "_", "-".join(names)) or "unopened"
    path = run.path / CHECKS_FOLDER / f"{stem[:100]}.json"
    saved = verdict.model_copy(update={"saved_to": str(path)})
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, saved.model_dump_json(indent=2) + "\n")
    return saved


def _make_progress(
    request: VerifyRequest, name: str, sample: Sample, *, has_scores: bool
) -> Callable[[int], None]:
    """Progress of one artefact in tokens scored and answered, on one bar."""
    tokens = sum(map(len, sample.windows)) if has_scores else 0
    of, done = tokens + len(sample.prompts) * ANSWER_WEIGHT, 0

    def advance(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        if request.report is not None:
            request.report(Path(name).name, min(done, of), of)

    return advance
