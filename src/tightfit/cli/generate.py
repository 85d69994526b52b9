"""`tightfit generate`: every prompt of a file answered once, resumably, with statistics."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from tightfit.cli.engine_choice import engine_request, sampling
from tightfit.cli.exit_codes import EXIT_REQUEUE
from tightfit.cli.flags.generate import GenerateFlags
from tightfit.cli.terminal.harmless import harmless, shorten
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce, write_err
from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError, UserError

if TYPE_CHECKING:
    from tightfit.engines.open import EngineRequest
    from tightfit.serve.generate.job import GenerateJob, Outcome, Watch
    from tightfit.serve.generate.journal import Journal
    from tightfit.serve.generate.plan import Prediction
    from tightfit.serve.generate.prompts import PromptRequest
    from tightfit.serve.generate.statistics import Statistics

STDIN = "-"


def generate(flags: GenerateFlags) -> None:
    """Read, predict, answer what is not answered yet, write, and say how it went."""
    if flags.prompts is None:
        raise UsageError(
            "No prompts were named.",
            remedy=f"tightfit generate {shorten(flags.model)} --prompts prompts.txt",
        )
    from tightfit.runtime.artefacts import find_artefact

    job = read_job(flags)
    request = engine_request(flags, find_artefact(flags.model))
    if flags.dry_run:
        _show_dry_run(flags, request, job)
        return
    out = choose_out(flags)
    with _open_journal(out, flags, request, job) as journal:
        if journal.is_finished:
            _tell_finished(out, flags)
            return
        statistics, failed = _answer(flags, request, job, journal)
    fault = None if failed is None else _fault_of(failed, out, job)
    _show_end(flags, statistics, fault, out)
    if fault is not None and not flags.as_json:
        raise fault
    if fault is not None:  # stdout has its one document already, the fault in it
        write_err(f"error: {harmless(fault.problem)}\n  try: {harmless(fault.remedy)}\n")
        raise typer.Exit(fault.exit_code)


def read_job(flags: GenerateFlags) -> GenerateJob:
    """What is asked and how, all of it read."""
    from tightfit.serve.generate.job import GenerateJob
    from tightfit.serve.generate.prompts import read_prompts

    asked = _prompt_request(flags)
    _check_out(flags)
    prompts = read_prompts(asked, _open_stdin() if asked.path == STDIN else None)
    job = GenerateJob(
        prompts=prompts, sampling=sampling(flags), num_samples=flags.n or 1, is_raw=flags.raw
    )
    if job.num_samples > 1 and not job.sampling.temperature:
        raise UsageError(
            f"`--n {job.num_samples}` at temperature 0 gives the same answer every time.",
            remedy="--temperature 0.8",
        )
    return job


class _StopAskedError(KeyboardInterrupt):
    """A batch system wants its machine back."""


@contextlib.contextmanager
def _signals_heard() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does, with the code that asks for a requeue."""

    def stop(_number: int, _frame: object) -> None:
        raise _StopAskedError

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _open_stdin() -> BinaryIO:
    if sys.stdin is None:  # closed by whoever started us
        raise UsageError("`--prompts -` reads stdin, which is closed.", remedy="--prompts FILE")
    return sys.stdin.buffer


def _check_out(flags: GenerateFlags) -> None:
    """Answers must not take the place of their own prompts."""
    if flags.out is None or flags.prompts in (None, STDIN):
        return
    prompts = Path(str(flags.prompts)).expanduser()
    if flags.out.exists() and prompts.exists() and flags.out.samefile(prompts):
        raise UsageError(
            f"`--out` and `--prompts` are the same file, {flags.prompts}.",
            remedy="--out answers.jsonl",
        )


def _answer(
    flags: GenerateFlags, request: EngineRequest, job: GenerateJob, journal: Journal
) -> tuple[Statistics | None, int | None]:
    """Statistics of what was answered now, and how many prompts failed."""
    from tightfit.serve.generate.job import write_failures
    from tightfit.serve.generate.run import Run, run_engine

    num_earlier = journal.num_done
    if num_earlier:
        write_err(f"going on: {num_earlier:,} of {job.num_answers:,} answers are there already\n")
    run: Run | None = None
    outcome: Outcome | None = None
    if num_earlier < job.num_answers:
        prediction = _predict(flags, request, job)
        try:
            with _progress(job.num_answers, num_earlier) as watch, _signals_heard():
                run = run_engine(request, job, journal, watch, announce=_tell_engine(flags))
        except KeyboardInterrupt as asked:
            write_err(_kept(journal, job))
            if isinstance(asked, _StopAskedError):
                raise typer.Exit(EXIT_REQUEUE) from None
            raise
        outcome = run.outcome
    failures = () if outcome is None else outcome.failures
    journal.finish(is_complete=not failures)
    announce(journal.out)
    path = write_failures(journal.out, failures)
    if path is not None:
        announce(path)
    statistics = None
    if run is not None and run.outcome.timings:
        from tightfit.serve.generate.run import sum_run

        statistics = sum_run(run, job, prediction, num_earlier=num_earlier)
        _remember(statistics, prediction, threads=request.threads)
    return statistics, len(failures) or None


def _remember(
    statistics: Statistics, prediction: Prediction | None, *, threads: int | None
) -> None:
    """For the estimate of the next farm."""
    from tightfit.farm.estimate import Amount, remember_alone

    num_new = statistics.new_tokens
    if prediction is not None and not statistics.num_earlier_answers:
        amount = Amount(num_answers=statistics.num_answers, num_new_tokens=num_new, threads=threads)
        remember_alone(prediction, amount, rate=statistics.rates.new_per_second)


def _prompt_request(flags: GenerateFlags) -> PromptRequest:
    from tightfit.serve.generate.prompts import PromptRequest, check_template

    named = [
        name
        for name, value in (
            ("--column", flags.column),
            ("--template", flags.template),
            ("--template-text", flags.template_text),
        )
        if value is not None
    ]
    if len(named) > 1:
        raise UsageError(
            f"`{named[0]}` and `{named[1]}` both say what the prompt is.", remedy="keep one of them"
        )
    if flags.raw and flags.system is not None:
        raise UsageError(
            "`--raw` continues plain text, which has no system message.",
            remedy="leave --system out, or --raw",
        )
    template = flags.template_text
    if flags.template is not None:
        template = _read_template(flags.template)
    if template is not None:
        check_template(template)
    return PromptRequest(
        path=flags.prompts or "",
        is_whole=flags.whole,
        column=flags.column,
        template=template,
        system=flags.system,
        is_raw=flags.raw,
        limit=flags.limit,
    )


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8").removesuffix("\n")
    except FileNotFoundError as fault:
        raise NotFoundError(
            f"There is no file {path}.",
            remedy="--template FILE names a file; --template-text 'Summarize: {article}' is text",
        ) from fault
    except (OSError, ValueError) as fault:
        raise InvalidInputError(
            f"Cannot read {path}: {getattr(fault, 'strerror', None) or fault}.",
            remedy="name a text file in UTF-8",
        ) from fault


def choose_out(flags: GenerateFlags) -> Path:
    if flags.out is not None:
        return flags.out
    if flags.prompts in (None, STDIN):
        return Path("answers.jsonl")
    return Path(f"{Path(str(flags.prompts)).name.partition('.')[0] or 'prompts'}.answers.jsonl")


def _open_journal(
    out: Path, flags: GenerateFlags, request: EngineRequest, job: GenerateJob
) -> Journal:
    from tightfit.serve.generate.journal import open_journal
    from tightfit.serve.generate.settings import describe_settings

    settings = describe_settings(request, job)
    return open_journal(out, settings, seed=job.sampling.seed, is_fresh=flags.fresh)


def _predict(flags: GenerateFlags, request: EngineRequest, job: GenerateJob) -> Prediction | None:
    from tightfit.engines.open import open_prompter
    from tightfit.serve.generate.plan import measure_prompts, predict, require_fit

    lengths = measure_prompts(job.prompts, open_prompter(request), is_raw=job.is_raw)
    prediction = predict(request, lengths, job.sampling)
    if prediction is not None and flags.check:
        require_fit(prediction, request)
    return prediction


def _show_dry_run(flags: GenerateFlags, request: EngineRequest, job: GenerateJob) -> None:
    from tightfit.cli.render.generate import describe_dry_run, show_dry_run
    from tightfit.engines.open import open_prompter

    prediction = _predict(replace(flags, check=False), request, job)
    told = describe_dry_run(job, open_prompter(request), prediction)
    if flags.as_json:
        show_json(told)
    else:
        show_dry_run(told)


def _show_end(
    flags: GenerateFlags, statistics: Statistics | None, fault: UserError | None, out: Path
) -> None:
    if flags.stats is not None and statistics is not None:
        from tightfit.core.files import write_atomic

        write_atomic(flags.stats, statistics.model_dump_json(indent=2) + "\n")
        announce(flags.stats)
    if flags.as_json:
        told: dict[str, Any] = {"finished": fault is None, "out": str(out)}
        told |= {} if statistics is None else statistics.model_dump(mode="json")
        if fault is not None:
            told |= {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json(told)
    elif statistics is not None:
        from tightfit.cli.render.generate import show_statistics

        show_statistics(statistics)


def _fault_of(failed: int, out: Path, job: GenerateJob) -> UserError:
    others = f"; the others are in {out}" if failed < job.num_answers else ""
    return UserError(
        f"{failed:,} of {job.num_answers:,} answers could not be given{others}.",
        remedy=f"{out}.failed.jsonl says why; the same command, or one with a larger --context, "
        "tries those again",
    )


def _tell_finished(out: Path, flags: GenerateFlags) -> None:
    write_err(f"{harmless(str(out))} is finished already; --fresh makes the answers again\n")
    if flags.as_json:
        show_json({"finished": True, "out": str(out)})


def _tell_engine(flags: GenerateFlags) -> Callable[[Any], None]:
    def tell(info: Any) -> None:
        if not flags.as_json:
            slots = f"{info.num_slots} at a time"
            where = f"{info.format} on {info.device}, {slots}"
            write_err(f"{harmless(info.model)}: {where}; {harmless(info.why)}\n")

    return tell


def _kept(journal: Journal, job: GenerateJob) -> str:
    return (
        f"\nstopped: {journal.num_done:,} of {job.num_answers:,} answers are kept; "
        "the same command goes on\n"
    )


@contextlib.contextmanager
def _progress(total: int, num_earlier: int) -> Iterator[Watch | None]:
    """A bar on stderr where someone watches, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("answers", total=total, completed=num_earlier, rate="")
        began: list[float] = []

        def watch(num_done: int, num_failed: int, num_tokens: int) -> None:
            now = time.monotonic()
            began[:] = began or [now]
            took = now - began[0]
            rate = f"{num_tokens / took:,.0f} tokens/s" if took > 1 else ""
            bars.update(task, completed=num_earlier + num_done + num_failed, rate=rate)

        yield watch
