"""`tightfit generate`: answer every prompt of a file once, resumably, with statistics."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tightfit.api.options.engines import engine_request, sampling
from tightfit.cli.flags.serving import GenerateFlags
from tightfit.cli.terminal.output import announce, show_json, write_err
from tightfit.cli.terminal.screen import Cell, Column, heading, make_table, plain, show
from tightfit.core.errors import (
    EXIT_REQUEUE,
    InvalidInputError,
    NotFoundError,
    UsageError,
    UserError,
)
from tightfit.core.text import count_of, sanitize, sanitize_lines, shorten
from tightfit.core.units import GB, TERA, render_bytes, render_seconds
from tightfit.serve.generate.statistics import GenerateStatistics, Percentiles

if TYPE_CHECKING:
    from tightfit.data.prompter import Prompter
    from tightfit.engines.open import EngineRequest
    from tightfit.serve.generate.job import GenerateJob, GenerateOutcome, OnAnswer
    from tightfit.serve.generate.journal import Journal
    from tightfit.serve.generate.prediction import InferencePrediction
    from tightfit.serve.generate.prompts import PromptRequest


# A run of `generate` as text: before it what is predicted, after it what was measured.

SHOWN_PROMPTS = 3
LONGEST_SHOWN = 2000


def show_statistics(statistics: GenerateStatistics) -> None:
    show(_render(statistics))


def describe_dry_run(
    job: GenerateJob, prompter: Prompter, prediction: InferencePrediction | None
) -> dict[str, Any]:
    """The first prompts as the model will see them, and what is expected of the run."""
    shown = [
        prompt.text if job.is_raw else prompter.render(prompt.messages)
        for prompt in job.prompts[:SHOWN_PROMPTS]
    ]
    return {
        "num_prompts": len(job.prompts),
        "num_samples": job.num_samples,
        "rendered": shown,
        "prediction": None if prediction is None else _describe_prediction(prediction),
    }


def show_dry_run(told: Mapping[str, Any]) -> None:
    show(_render_dry_run(told))


def _describe_prediction(prediction: InferencePrediction) -> dict[str, Any]:
    estimate = prediction.estimate
    return {
        "engine": prediction.choice.engine,
        "device": prediction.gpu.name,
        "why": prediction.choice.why,
        "num_slots": prediction.job.num_slots,
        "peak_bytes": estimate.peak_bytes,
        "free_bytes": prediction.capacity_bytes,
        "verdict": prediction.verdict.value,
        "components": estimate.components,
        "new_tokens_per_second": estimate.new_tokens_per_second,
        "bound": estimate.bound,
    }


def _render_dry_run(told: Mapping[str, Any]) -> Iterator[RenderableType]:
    samples = told["num_samples"]
    times = f", {count_of(samples, 'answer')} each" if samples > 1 else ""
    yield heading(f"{count_of(told['num_prompts'], 'prompt')}{times}")
    for number, text in enumerate(told["rendered"], start=1):
        cut = text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + " ..."
        yield ""
        yield plain(f"prompt {number}, as the model sees it:")
        yield Text(sanitize_lines(cut))
    expected = told["prediction"]
    yield ""
    if expected is None:
        yield plain("No prediction: the model's shapes are not known.")
        return
    yield heading("Predicted")
    yield plain(expected["why"])
    rows: list[list[Cell]] = [
        [name.replace("_", " "), render_bytes(size)]
        for name, size in expected["components"].items()
    ]
    rows.append(["peak", render_bytes(expected["peak_bytes"])])
    rows.append([f"free on {expected['device']}", render_bytes(expected["free_bytes"])])
    yield make_table([Column(title="memory"), Column(title="", right=True)], rows)
    rate = expected["new_tokens_per_second"]
    yield plain(
        f"{expected['verdict'].replace('_', ' ')}; about {rate:,.0f} new tokens/s with "
        f"{expected['num_slots']} at a time, bound by {expected['bound']}"
    )


def _render(told: GenerateStatistics) -> Iterator[RenderableType]:
    yield heading(f"{told.model}: {count_of(told.num_answers, 'answer')} in {_took(told.seconds)}")
    yield plain(
        f"{told.engine}, {told.format} on {told.device}, {told.num_slots} at a time; "
        f"loaded in {_took(told.load_seconds)}"
    )
    for remark in _remarks(told):
        yield plain(remark)
    yield ""
    yield _grid(_rows(told))
    yield ""
    yield Text(told.sentence, style="bold")


def _grid(rows: Iterator[tuple[str, str]]) -> RenderableType:
    """Names and sentences, whose further lines hang under the first."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(heading(name), plain(text))
    return table


def _remarks(told: GenerateStatistics) -> Iterator[str]:
    if told.num_earlier_answers:
        earlier = count_of(told.num_earlier_answers, "answer")
        yield f"Beside {earlier} of an earlier run, which the figures leave out."
    if told.num_cut:
        cut = count_of(told.num_cut, "answer")
        yield f"Cut off at the limit on new tokens (--max-new-tokens): {cut}."


def _rows(told: GenerateStatistics) -> Iterator[tuple[str, str]]:
    rates = told.rates
    cached = f", {told.cached_prompt_tokens:,} of them cached" if told.cached_prompt_tokens else ""
    yield ("tokens", f"{told.prompt_tokens:,} prompt{cached}; {told.new_tokens:,} new")
    yield (
        "per second",
        f"{rates.prompt_per_second:,.1f} prompt; {rates.new_per_second:,.1f} new; "
        f"{rates.total_per_second:,.1f} in all",
    )
    yield (
        "per minute",
        f"{rates.prompt_per_minute:,.0f} prompt; {rates.new_per_minute:,.0f} new; "
        f"{rates.total_per_minute:,.0f} in all",
    )
    if told.predicted_new_tokens_per_second is not None:
        yield ("predicted", f"{told.predicted_new_tokens_per_second:,.1f} new tokens/s")
    yield ("first token", f"{_percentiles(told.first_token_seconds)}; the wait for a slot included")
    yield ("whole answer", _percentiles(told.answer_seconds))
    yield ("at a time", f"{told.mean_active:.1f} of {told.num_slots} slots in use, on average")
    yield ("disk", _disk(told))
    yield from _traffic_rows(told)
    yield ("arithmetic", _arithmetic(told))
    yield ("peak memory", _memory(told))
    if told.energy_joules is not None:
        each = told.energy_joules / max(1, told.new_tokens)
        yield ("energy", f"{told.energy_joules:,.0f} J, {each:.2f} J per new token")


def _percentiles(of: Percentiles) -> str:
    return f"{_took(of.p50)} median; {_took(of.p90)} p90; {_took(of.p99)} p99"


def _disk(told: GenerateStatistics) -> str:
    disk = told.disk
    if disk.load_bytes is None:
        return "not told by the system"
    text = f"{_gb(disk.load_bytes)} read while loading"
    if disk.answer_bytes:
        text += f", {_gb(disk.answer_bytes)} while answering"
    if disk.cached_fraction is not None and disk.cached_fraction > 0.05:
        text += f"; {disk.cached_fraction:.0%} of the weight files came from the page cache"
    return text


def _traffic_rows(told: GenerateStatistics) -> Iterator[tuple[str, str]]:
    traffic = told.traffic
    yield (
        "memory moved",
        f"{_gb(traffic.bytes_moved)} in {traffic.num_passes:,.0f} passes (estimated)",
    )
    ceiling = traffic.measured_ceiling_bytes_per_second
    text = (
        f"{_gb(traffic.average_bytes_per_second)}/s average, "
        f"{_gb(traffic.peak_bytes_per_second)}/s peak (estimated)"
    )
    if ceiling and traffic.average_fraction is not None:
        text += f"; {traffic.average_fraction:.0%} of the {_gb(ceiling)}/s that a copy reaches here"
    if traffic.paper_ceiling_bytes_per_second:
        text += f", {_gb(traffic.paper_ceiling_bytes_per_second)}/s on paper"
    yield ("bandwidth", text)


def _arithmetic(told: GenerateStatistics) -> str:
    work = told.arithmetic
    text = f"{work.flops / TERA:,.2f} TFLOP, {_flops(work.flops_per_second)} (estimated)"
    if work.measured_ceiling_flops_per_second and work.fraction is not None:
        reached = _flops(work.measured_ceiling_flops_per_second)
        text += f"; {work.fraction:.1%} of the {reached} that a product reaches here"
    if work.paper_ceiling_flops_per_second:
        text += f", {_flops(work.paper_ceiling_flops_per_second)} on paper"
    return text


def _memory(told: GenerateStatistics) -> str:
    memory = told.memory
    is_cpu = told.device == "cpu"
    parts = []
    if memory.device_bytes is not None:
        parts.append(
            f"{render_bytes(memory.device_bytes)} {'resident' if is_cpu else 'on the GPU'}"
        )
    if memory.allocated_bytes is not None:
        parts.append(f"{render_bytes(memory.allocated_bytes)} of it in tensors")
    if not is_cpu:
        parts.append(f"{render_bytes(memory.host_bytes)} on the host")
    if memory.predicted_bytes is not None:
        parts.append(f"predicted {render_bytes(memory.predicted_bytes)}")
    return "; ".join(parts)


def _took(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else render_seconds(seconds)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.1f} GB" if num_bytes >= 0.1 * GB else f"{num_bytes / 1e6:,.1f} MB"


def _flops(rate: float) -> str:
    return f"{rate / TERA:,.2f} TFLOP/s" if rate >= 0.01 * TERA else f"{rate / GB:,.1f} GFLOP/s"


STDIN = "-"


def generate(flags: GenerateFlags) -> None:
    """Read, predict, answer what is not answered yet, write, and say how it went."""
    if flags.prompts is None:
        raise UsageError(
            "No prompts were named.",
            remedy=f"tightfit generate {shorten(flags.model)} --prompts prompts.txt",
        )
    from tightfit.runtime.artefacts import find_artefact

    job = read_generate_job(flags)
    request = engine_request(flags, find_artefact(flags.model))
    if flags.dry_run:
        _show_dry_run(flags, request, job)
        return
    out = choose_out(flags)
    with _open_journal(out, flags, request, job) as journal:
        if journal.is_finished:
            _report_finished(out, flags)
            return
        statistics, failed = _answer(flags, request, job, journal)
    fault = None if failed is None else _error_of(failed, out, job)
    _show_end(flags, statistics, fault, out)
    if fault is not None and not flags.as_json:
        raise fault
    if fault is not None:  # stdout has its one document already, the fault in it
        write_err(f"error: {sanitize(fault.problem)}\n  try: {sanitize(fault.remedy)}\n")
        raise typer.Exit(fault.exit_code)


def read_generate_job(flags: GenerateFlags) -> GenerateJob:
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


class _StopRequestedError(KeyboardInterrupt):
    """A batch system wants its machine back."""


@contextlib.contextmanager
def _signals_caught() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does, with the code that asks for a requeue."""

    def stop(_number: int, _frame: object) -> None:
        raise _StopRequestedError

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
) -> tuple[GenerateStatistics | None, int | None]:
    """Statistics of what was answered now, and how many prompts failed."""
    from tightfit.serve.generate.job import write_failures
    from tightfit.serve.generate.run import EngineRun, run_engine

    num_earlier = journal.num_done
    if num_earlier:
        write_err(f"going on: {num_earlier:,} of {job.num_answers:,} answers are there already\n")
    run: EngineRun | None = None
    outcome: GenerateOutcome | None = None
    if num_earlier < job.num_answers:
        prediction = _predict(flags, request, job)
        try:
            with _progress(job.num_answers, num_earlier) as watch, _signals_caught():
                run = run_engine(request, job, journal, watch, announce=_announce_engine(flags))
        except KeyboardInterrupt as asked:
            write_err(_kept(journal, job))
            if isinstance(asked, _StopRequestedError):
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
    statistics: GenerateStatistics, prediction: InferencePrediction | None, *, threads: int | None
) -> None:
    """For the estimate of the next farm."""
    from tightfit.farm.estimate import FarmWorkload, record_single_engine

    num_new = statistics.new_tokens
    if prediction is not None and not statistics.num_earlier_answers:
        amount = FarmWorkload(
            num_answers=statistics.num_answers, num_new_tokens=num_new, threads=threads
        )
        record_single_engine(prediction, amount, rate=statistics.rates.new_per_second)


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
    from tightfit.serve.generate.job import describe_settings
    from tightfit.serve.generate.journal import open_journal

    settings = describe_settings(request, job)
    return open_journal(out, settings, seed=job.sampling.seed, is_fresh=flags.fresh)


def _predict(
    flags: GenerateFlags, request: EngineRequest, job: GenerateJob
) -> InferencePrediction | None:
    from tightfit.engines.open import open_prompter
    from tightfit.serve.generate.prediction import measure_prompts, predict_inference, require_fit

    lengths = measure_prompts(job.prompts, open_prompter(request), is_raw=job.is_raw)
    prediction = predict_inference(request, lengths, job.sampling)
    if prediction is not None and flags.check:
        require_fit(prediction, request)
    return prediction


def _show_dry_run(flags: GenerateFlags, request: EngineRequest, job: GenerateJob) -> None:
    from tightfit.engines.open import open_prompter

    prediction = _predict(replace(flags, check=False), request, job)
    told = describe_dry_run(job, open_prompter(request), prediction)
    if flags.as_json:
        show_json(told)
    else:
        show_dry_run(told)


def _show_end(
    flags: GenerateFlags, statistics: GenerateStatistics | None, fault: UserError | None, out: Path
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
        show_statistics(statistics)


def _error_of(failed: int, out: Path, job: GenerateJob) -> UserError:
    others = f"; the others are in {out}" if failed < job.num_answers else ""
    return UserError(
        f"{failed:,} of {job.num_answers:,} answers could not be given{others}.",
        remedy=f"{out}.failed.jsonl says why; the same command, or one with a larger --context, "
        "tries those again",
    )


def _report_finished(out: Path, flags: GenerateFlags) -> None:
    write_err(f"{sanitize(str(out))} is finished already; --fresh makes the answers again\n")
    if flags.as_json:
        show_json({"finished": True, "out": str(out)})


def _announce_engine(flags: GenerateFlags) -> Callable[[Any], None]:
    def tell(info: Any) -> None:
        if not flags.as_json:
            slots = f"{info.num_slots} at a time"
            where = f"{info.format} on {info.device}, {slots}"
            write_err(f"{sanitize(info.model)}: {where}; {sanitize(info.why)}\n")

    return tell


def _kept(journal: Journal, job: GenerateJob) -> str:
    return (
        f"\nstopped: {journal.num_done:,} of {job.num_answers:,} answers are kept; "
        "the same command goes on\n"
    )


@contextlib.contextmanager
def _progress(total: int, num_earlier: int) -> Iterator[OnAnswer | None]:
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
