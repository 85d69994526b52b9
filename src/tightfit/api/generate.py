"""`generate`: answer every prompt of a file once, resumably, with statistics."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.api.call import accepts_keywords
from tightfit.api.options.engines import (
    PromptOptions,
    SamplingOptions,
    engine_request,
    read_sampling,
)
from tightfit.api.options.serving import GenerateOptions
from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError, UserError
from tightfit.core.files import check_writable, write_atomic
from tightfit.core.options import list_given
from tightfit.core.progress import Progress
from tightfit.core.reading import read_text
from tightfit.core.text import shorten
from tightfit.engines.open import EngineRequest, open_prompter
from tightfit.engines.protocol import EngineInfo
from tightfit.farming.estimate import FarmWorkload, record_single_engine
from tightfit.runtime.model_files import find_artefact
from tightfit.serving.generate.journal import Journal, open_journal
from tightfit.serving.generate.prediction import (
    InferencePrediction,
    measure_prompts,
    predict_inference,
    require_fit,
)
from tightfit.serving.generate.prompts import STDIN, PromptRequest, check_template, read_prompts
from tightfit.serving.generate.run import (
    EngineRun,
    GenerateJob,
    OnAnswer,
    describe_settings,
    run_engine,
    write_failures,
)
from tightfit.serving.generate.statistics import GenerateStatistics, sum_run

NUM_PREVIEWED_PROMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePreview:
    """A run before anything is loaded: its first prompts, memory and speed."""

    job: GenerateJob
    rendered: tuple[str, ...]
    """The first prompts as the model will read them."""
    prediction: InferencePrediction | None
    """None: the model's shapes are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersResult:
    """The answers to a file of prompts."""

    out: Path
    num_answers: int
    """That were asked for; without the failed ones they are in `out`."""
    num_failed: int = 0
    failures_path: Path | None = None
    """The prompts that could not be answered, and why."""
    was_finished: bool = False
    """An earlier call had answered everything."""

    @property
    def error(self) -> UserError | None:
        """What to report where prompts failed."""
        if not self.num_failed:
            return None
        others = f"; the others are in {self.out}" if self.num_failed < self.num_answers else ""
        return UserError(
            f"{self.num_failed:,} of {self.num_answers:,} answers could not be given{others}.",
            remedy=f"{self.out}.failed.jsonl says why; the same command, or one with a larger "
            "--context, tries those again",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult(AnswersResult):
    """What a run wrote."""

    statistics: GenerateStatistics | None = None
    """Of the answers that this call computed; None where there were none."""

    def read_rows(self) -> list[dict[str, Any]]:
        """The answers in the prompts' order, one row for each prompt and sample."""
        return [json.loads(line) for line in self.out.read_bytes().splitlines()]


class GenerateWatcher:
    """Receives what happens during a run; a subclass overrides what it wants to show."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    def resumed(self, num_earlier: int, num_answers: int) -> None:
        """Some answers are there from an earlier run."""

    def loaded(self, info: EngineInfo) -> None:
        """The model is loaded."""

    @contextlib.contextmanager
    def answering(self, num_earlier: int, num_answers: int) -> Iterator[OnAnswer | None]:
        """Entered while the engine loads and answers; yields what is called after each answer."""
        progress = self._progress

        def report(num_done: int, num_failed: int, _num_tokens: int) -> None:
            if progress is not None:
                progress("answers", num_earlier + num_done + num_failed, num_answers)

        yield report

    def interrupted(self, num_kept: int, num_answers: int) -> None:
        """The run was interrupted; a later one resumes it."""


@accepts_keywords(GenerateOptions)
def generate(options: GenerateOptions) -> GenerateResult:
    """Answer every prompt of a file. A run that was interrupted is resumed by the same call."""
    return run_generate(options, GenerateWatcher(options.progress))


@accepts_keywords(GenerateOptions)
def preview_generate(options: GenerateOptions) -> GeneratePreview:
    """The first prompts as they are sent, and the predicted memory and speed."""
    job, request = _read(options)
    prompter = open_prompter(request)
    rendered = tuple(
        prompt.text if job.is_raw else prompter.render(prompt.messages, prompt.tools)
        for prompt in job.prompts[:NUM_PREVIEWED_PROMPTS]
    )
    return GeneratePreview(job=job, rendered=rendered, prediction=predict_job(request, job))


def run_generate(options: GenerateOptions, watcher: GenerateWatcher) -> GenerateResult:
    """`generate` with a watcher."""
    job, request = _read(options)
    out = choose_out(options)
    if options.stats is not None:
        check_writable(options.stats)
    settings = describe_settings(request, job)
    seed = job.sampling.seed
    with open_journal(out, settings, seed=seed, is_fresh=options.fresh) as journal:
        if journal.is_finished:
            return GenerateResult(out=out, num_answers=job.num_answers, was_finished=True)
        result = _answer(options, request, job, journal, watcher)
    if options.stats is not None and result.statistics is not None:
        write_atomic(options.stats, result.statistics.model_dump_json(indent=2) + "\n")
    return result


def read_generate_job(
    prompts: PromptOptions, sampling: SamplingOptions, *, verb: str, model: str
) -> GenerateJob:
    """What is asked and how, with all prompts read."""
    if prompts.prompts is None:
        raise UsageError(
            "No prompts were named.",
            remedy=f"tightfit {verb} {shorten(model)} --prompts prompts.txt",
        )
    request = _prompt_request(prompts)
    _require_other_file(prompts)
    if request.path == STDIN and sys.stdin is None:  # closed by the parent process
        raise UsageError("`--prompts -` reads stdin, which is closed.", remedy="--prompts FILE")
    job = GenerateJob(
        prompts=read_prompts(request, sys.stdin.buffer if request.path == STDIN else None),
        sampling=read_sampling(sampling),
        num_samples=prompts.n or 1,
        is_raw=prompts.raw,
    )
    if job.num_samples > 1 and not job.sampling.temperature:
        raise UsageError(
            f"`--n {job.num_samples}` at temperature 0 gives the same answer every time.",
            remedy="--temperature 0.8",
        )
    return job


def choose_out(options: PromptOptions) -> Path:
    """The output file: as given, or named after the prompts, in this folder."""
    if options.out is not None:
        return options.out
    if options.prompts in (None, STDIN):
        return Path("answers.jsonl")
    return Path(f"{Path(str(options.prompts)).name.partition('.')[0] or 'prompts'}.answers.jsonl")


def predict_job(request: EngineRequest, job: GenerateJob) -> InferencePrediction | None:
    """Memory and speed of a job; None where the model's shapes are not known."""
    lengths = measure_prompts(job.prompts, open_prompter(request), is_raw=job.is_raw)
    return predict_inference(request, lengths, job.sampling)


def _read(options: GenerateOptions) -> tuple[GenerateJob, EngineRequest]:
    job = read_generate_job(options, options, verb="generate", model=options.model)
    return job, engine_request(options, find_artefact(options.model))


def _answer(
    options: GenerateOptions,
    request: EngineRequest,
    job: GenerateJob,
    journal: Journal,
    watcher: GenerateWatcher,
) -> GenerateResult:
    """Answer what the journal lacks, and write the output."""
    num_earlier = journal.num_done
    if num_earlier:
        watcher.resumed(num_earlier, job.num_answers)
    run: EngineRun | None = None
    prediction: InferencePrediction | None = None
    if num_earlier < job.num_answers:
        prediction = predict_job(request, job)
        if prediction is not None and options.check:
            require_fit(prediction, request)
        try:
            with watcher.answering(num_earlier, job.num_answers) as on_answer:
                run = run_engine(request, job, journal, on_answer, announce=watcher.loaded)
        except KeyboardInterrupt:
            watcher.interrupted(journal.num_done, job.num_answers)
            raise
    failures = () if run is None else run.failures
    journal.finish(is_complete=not failures)
    failures_path = write_failures(journal.out, failures)
    statistics = None
    if run is not None and run.timings:
        statistics = sum_run(run, job, prediction, num_earlier=num_earlier)
        if prediction is not None and not statistics.num_earlier_answers:
            # Keep the measured rate for the estimate of the next farm.
            workload = FarmWorkload(
                num_answers=statistics.num_answers,
                num_new_tokens=statistics.new_tokens,
                threads=request.threads,
            )
            record_single_engine(prediction, workload, rate=statistics.rates.new_per_second)
    return GenerateResult(
        out=journal.out,
        num_answers=job.num_answers,
        num_failed=len(failures),
        failures_path=failures_path,
        statistics=statistics,
    )


def _require_other_file(options: PromptOptions) -> None:
    """Answers must not replace their own prompts."""
    if options.out is None or options.prompts in (None, STDIN):
        return
    prompts = Path(str(options.prompts)).expanduser()
    if options.out.exists() and prompts.exists() and options.out.samefile(prompts):
        raise UsageError(
            f"`--out` and `--prompts` are the same file, {options.prompts}.",
            remedy="--out answers.jsonl",
        )


def _prompt_request(options: PromptOptions) -> PromptRequest:
    named = list(list_given(options, ("column", "template", "template_text")))
    if len(named) > 1:
        raise UsageError(
            f"`{named[0]}` and `{named[1]}` both say what the prompt is.", remedy="keep one of them"
        )
    if options.raw and options.system is not None:
        raise UsageError(
            "`--raw` continues plain text, which has no system message.",
            remedy="leave --system out, or --raw",
        )
    template = options.template_text
    if options.template is not None:
        template = _read_template(options.template)
    if template is not None:
        check_template(template)
    return PromptRequest(
        path=options.prompts or "",
        is_whole=options.whole,
        column=options.column,
        template=template,
        system=options.system,
        is_raw=options.raw,
        limit=options.limit,
    )


def _read_template(path: Path) -> str:
    try:
        return read_text(path).removesuffix("\n")
    except FileNotFoundError as error:
        raise NotFoundError(
            f"There is no file {path}.",
            remedy="--template FILE names a file; --template-text 'Summarize: {article}' is text",
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.",
            remedy="name a text file in UTF-8",
        ) from error
