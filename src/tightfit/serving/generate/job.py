"""One `generate` job: what is asked, the settings its answers depend on, and answering it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.sampling import Sampling, describe_sampling
from tightfit.engines.open import EngineRequest
from tightfit.engines.protocol import Done, Engine, Failed, FinishReason, Request, answer_all
from tightfit.runtime.artefacts import Artefact
from tightfit.serving.generate.journal import AnswerKey, Journal, to_json_line
from tightfit.serving.generate.prompts import Prompt, digest_prompts

_SEED_BITS = 31
"""What every engine takes as a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """What is asked, how, and how often."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    num_samples: int = 1
    is_raw: bool = False

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.num_samples

    def keys(self) -> Iterator[AnswerKey]:
        """Every answer that is wanted, in order."""
        for prompt in self.prompts:
            for sample in range(self.num_samples):
                yield AnswerKey(prompt.index, sample)


class AnswerTiming(NamedTuple):
    """One answer, as far as statistics need it. Times are of `time.monotonic()`."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int
    is_cut: bool
    """Ended by the limit on new tokens, not by the model."""
    submitted_s: float
    first_token_s: float
    finished_s: float


class FailedAnswer(NamedTuple):
    """A prompt that could not be answered."""

    prompt: Prompt
    sample: int
    error: UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutcome:
    """What one run of the command did; answers of earlier ones are in the journal alone."""

    timings: tuple[AnswerTiming, ...]
    failures: tuple[FailedAnswer, ...]


OnAnswer = Callable[[int, int, int], None]
"""Told after each answer: answers of this run, prompts failed, new tokens so far."""


def generate_answers(
    engine: Engine, job: GenerateJob, journal: Journal, watch: OnAnswer | None = None
) -> GenerateOutcome:
    """Answer what the journal has not. A prompt that cannot be answered is set aside.

    What is no fault of a prompt (the engine itself broke) is raised, with all answers so far
    safe in the journal.
    """
    feed = _RequestFeed(engine, job, journal)
    timings: list[AnswerTiming] = []
    num_tokens = 0
    try:
        for number, end in answer_all(engine, feed.requests()):
            prompt, sample = feed.asked.pop(number)
            if isinstance(end, Failed):
                if not isinstance(end.error, UserError):
                    raise end.error
                feed.failures.append(FailedAnswer(prompt, sample, end.error))
            elif end.reason is not FinishReason.CANCELLED:
                journal.add(
                    AnswerKey(prompt.index, sample), make_row(prompt, sample, end, job.is_raw)
                )
                timings.append(_timing(end))
                num_tokens += end.num_new_tokens
            if watch is not None:
                watch(len(timings), len(feed.failures), num_tokens)
    finally:
        journal.sync()
    failures = sorted(feed.failures, key=lambda failure: (failure.prompt.index, failure.sample))
    return GenerateOutcome(timings=tuple(timings), failures=tuple(failures))


def derive_seed(base: int, key: AnswerKey) -> int:
    """One seed for each answer, whatever was answered before it."""
    text = f"{base}:{key.prompt}:{key.sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> (64 - _SEED_BITS)


def encode_prompt(engine: Engine, prompt: Prompt, *, is_raw: bool) -> tuple[int, ...]:
    """The tokens behind which the answer is to follow."""
    try:
        if is_raw:
            return engine.prompter.continue_text(prompt.text)
        return engine.prompter.ask(prompt.messages, place=prompt.place)
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{prompt.place} holds half of a character (a lone surrogate).",
            remedy="correct that prompt",
        ) from error


def make_row(prompt: Prompt, sample: int, done: Done, is_raw: bool) -> dict[str, Any]:
    """A row that `tightfit train` reads, and how its answer came to be.

    Nothing in it depends on the clock, so that a run that was interrupted gives the same file.
    """
    row: dict[str, Any]
    if is_raw:
        row = {"prompt": prompt.text, "completion": done.text}
    else:
        turns = [message._asdict() for message in prompt.messages]
        row = {"messages": [*turns, {"role": "assistant", "content": done.text}]}
    return row | {
        "prompt_index": prompt.index,
        "sample": sample,
        "finish": done.reason.value,
        "num_prompt_tokens": done.num_prompt_tokens,
        "num_new_tokens": done.num_new_tokens,
    }


def failures_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.failed.jsonl")


def write_failures(out: Path, failures: Sequence[FailedAnswer]) -> Path | None:
    """The prompts without an answer and why, beside the output; an older such file goes."""
    path = failures_path(out)
    if not failures:
        path.unlink(missing_ok=True)
        return None
    rows = (
        {
            "prompt_index": failure.prompt.index,
            "sample": failure.sample,
            "reason": failure.error.problem,
            "remedy": failure.error.remedy,
            "place": failure.prompt.place,
            "messages": [message._asdict() for message in failure.prompt.messages],
        }
        for failure in failures
    )
    write_atomic(path, b"".join(to_json_line(row) + b"\n" for row in rows))
    return path


class _RequestFeed:
    """Requests as the engine takes them, and which prompt each one is of."""

    def __init__(self, engine: Engine, job: GenerateJob, journal: Journal) -> None:
        self.asked: dict[int, tuple[Prompt, int]] = {}
        self.failures: list[FailedAnswer] = []
        self._engine = engine
        self._job = job
        self._journal = journal

    def requests(self) -> Iterator[Request]:
        number = 0
        for prompt in self._job.prompts:
            keys = [AnswerKey(prompt.index, sample) for sample in range(self._job.num_samples)]
            wanted = [key for key in keys if key not in self._journal]
            if not wanted:
                continue
            try:
                tokens = encode_prompt(self._engine, prompt, is_raw=self._job.is_raw)
            except UserError as error:
                self.failures += [FailedAnswer(prompt, key.sample, error) for key in wanted]
                continue
            for key in wanted:
                self.asked[number] = (prompt, key.sample)
                number += 1
                seed = derive_seed(self._journal.seed, key)
                yield Request(prompt=tokens, sampling=replace(self._job.sampling, seed=seed))


def _timing(done: Done) -> AnswerTiming:
    return AnswerTiming(
        num_prompt_tokens=done.num_prompt_tokens,
        num_cached_tokens=done.num_cached_tokens,
        num_new_tokens=done.num_new_tokens,
        is_cut=done.reason is FinishReason.LENGTH,
        submitted_s=done.submitted_s,
        first_token_s=done.first_token_s,
        finished_s=done.finished_s,
    )


# The settings that answers depend on: equal settings give equal answers.

_MODEL_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja", ".model")


def describe_settings(request: EngineRequest, job: GenerateJob) -> dict[str, Any]:
    """For the journal's header. Answers do not depend on slots, threads and devices."""
    return {
        "prompts": digest_prompts(job.prompts),
        "model": _digest_model(request.artefact),
        "template": _digest_template(request.template),
        "engine": request.engine,
        "weights": "auto" if request.weights is None else request.weights.value,
        "n": job.num_samples,
        "raw": job.is_raw,
        **describe_sampling(job.sampling),
    }


def _digest_model(artefact: Artefact) -> str:
    """Over names, sizes and times of the files: reading them whole would take minutes."""
    digest = hashlib.blake2b(digest_size=16)
    for place in (artefact.path, artefact.base, artefact.tokenizer):
        for path in [] if place is None else _model_files(place):
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _model_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return sorted(path for path in place.iterdir() if path.suffix.lower() in _MODEL_ENDINGS)


def _digest_template(template: str | None) -> str | None:
    if template is None or not Path(template).is_file():
        return template
    return hashlib.blake2b(Path(template).read_bytes(), digest_size=16).hexdigest()
