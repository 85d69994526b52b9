"""`tightfit generate`: Answer every prompt of a file, once each."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import RenderableType
from rich.text import Text

from tightfit.api.generate import (
    GeneratePreview,
    GenerateWatcher,
    preview_generate,
    run_generate,
)
from tightfit.api.options.serving import GenerateOptions, GenerateOutput
from tightfit.cli.terminal.error_report import end_with
from tightfit.cli.terminal.output import announce, show_json, write_err
from tightfit.cli.terminal.screen import (
    PIPED_COLUMNS,
    Cell,
    heading,
    make_table,
    plain,
    render_pairs,
    show,
    show_output,
)
from tightfit.core.errors import EXIT_REQUEUE, UserError
from tightfit.core.frozen import Frozen
from tightfit.core.text import count_of, sanitize, sanitize_lines
from tightfit.core.units import GB, TERA, render_bytes, render_seconds
from tightfit.engines.protocol import EngineInfo
from tightfit.serving.generate.run import OnAnswer
from tightfit.serving.generate.statistics import GenerateStatistics, Percentiles

LONGEST_SHOWN = 2000


def generate(options: GenerateOptions, output: GenerateOutput) -> None:
    """Answer the prompts of a file, or with --dry-run show what would be asked."""
    if output.dry_run:
        preview = _describe_preview(preview_generate(options))
        show_output(preview, _render_preview(preview), as_json=output.as_json)
        return
    try:
        result = run_generate(options, _GenerateScreen(as_json=output.as_json))
    except StopRequestedError:
        raise typer.Exit(EXIT_REQUEUE) from None
    if result.was_finished:
        out = sanitize(str(result.out))
        write_err(f"{out} is finished already; --fresh makes the answers again\n")
        if output.as_json:
            show_json({"finished": True, "out": str(result.out)})
        return
    written = (result.out, result.failures_path, options.stats if result.statistics else None)
    for path in filter(None, written):
        announce(path)
    show_result(result.out, result.statistics, result.error, _render, output.as_json)


Shown = TypeVar("Shown", bound=Frozen)


def show_result(
    out: Path,
    statistics: Shown | None,
    error: UserError | None,
    render: Callable[[Shown], Iterable[RenderableType]],
    as_json: bool,
    piped_columns: int = PIPED_COLUMNS,
    **extra: object,
) -> None:
    """The statistics, then the error about prompts that failed, if any."""
    if not as_json:
        if statistics is not None:
            show(render(statistics), piped_columns=piped_columns)
        if error is not None:
            raise error
        return
    document: dict[str, Any] = {"finished": error is None, "out": str(out)}
    document |= {} if statistics is None else statistics.model_dump(mode="json")
    document |= extra
    if error is not None:
        raise end_with(error, document, as_json=True)
    show_json(document)


def _describe_preview(preview: GeneratePreview) -> dict[str, Any]:
    """The first prompts as the model will see them, and what is predicted of the run."""
    prediction = preview.prediction
    return {
        "num_prompts": len(preview.job.prompts),
        "num_samples": preview.job.num_samples,
        "rendered": list(preview.rendered),
        "prediction": None
        if prediction is None
        else {
            "engine": prediction.choice.engine,
            "device": prediction.gpu.name,
            "why": prediction.choice.why,
            "num_slots": prediction.job.num_slots,
            "peak_bytes": prediction.estimate.peak_bytes,
            "free_bytes": prediction.capacity_bytes,
            "verdict": prediction.verdict.value,
            "components": prediction.estimate.components,
            "new_tokens_per_second": prediction.new_tokens_per_second,
            "bound": prediction.estimate.bound,
        },
    }


def _render_preview(preview: Mapping[str, Any]) -> Iterator[RenderableType]:
    samples = preview["num_samples"]
    times = f", {count_of(samples, 'answer')} each" if samples > 1 else ""
    yield heading(f"{count_of(preview['num_prompts'], 'prompt')}{times}")
    for number, text in enumerate(preview["rendered"], start=1):
        cut = text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + " ..."
        yield ""
        yield plain(f"prompt {number}, as the model sees it:")
        yield Text(sanitize_lines(cut))
    expected = preview["prediction"]
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
    yield make_table(["memory", ">"], rows)
    rate = expected["new_tokens_per_second"]
    yield plain(
        f"{expected['verdict'].replace('_', ' ')}; about {rate:,.0f} new tokens/s with "
        f"{expected['num_slots']} at a time, bound by {expected['bound']}"
    )


def _render(statistics: GenerateStatistics) -> Iterator[RenderableType]:
    answers = count_of(statistics.num_answers, "answer")
    yield heading(f"{statistics.model}: {answers} in {_took(statistics.seconds)}")
    yield plain(
        f"{statistics.engine}, {statistics.format} on {statistics.device}, "
        f"{statistics.num_slots} at a time; loaded in {_took(statistics.load_seconds)}"
    )
    if statistics.num_earlier_answers:
        earlier = count_of(statistics.num_earlier_answers, "answer")
        yield plain(f"Beside {earlier} of an earlier run, which the figures leave out.")
    if statistics.num_cut:
        cut = count_of(statistics.num_cut, "answer")
        yield plain(f"Cut off at the limit on new tokens (--max-new-tokens): {cut}.")
    yield ""
    yield render_pairs(_rows(statistics))
    yield ""
    yield heading(statistics.sentence)


def _rows(statistics: GenerateStatistics) -> Iterator[tuple[str, str]]:
    rates = statistics.rates
    cached = (
        f", {statistics.cached_prompt_tokens:,} of them cached"
        if statistics.cached_prompt_tokens
        else ""
    )
    yield ("tokens", f"{statistics.prompt_tokens:,} prompt{cached}; {statistics.new_tokens:,} new")
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
    if statistics.predicted_new_tokens_per_second is not None:
        yield ("predicted", f"{statistics.predicted_new_tokens_per_second:,.1f} new tokens/s")
    yield (
        "first token",
        f"{_percentiles(statistics.first_token_seconds)}; the wait for a slot included",
    )
    yield ("whole answer", _percentiles(statistics.answer_seconds))
    yield (
        "at a time",
        f"{statistics.mean_active:.1f} of {statistics.num_slots} slots in use, on average",
    )
    yield ("disk", _disk(statistics))
    yield from _traffic_rows(statistics)
    yield ("arithmetic", _arithmetic(statistics))
    yield ("peak memory", _memory(statistics))
    if statistics.energy_joules is not None:
        each = statistics.energy_joules / max(1, statistics.new_tokens)
        yield ("energy", f"{statistics.energy_joules:,.0f} J, {each:.2f} J per new token")


def _percentiles(of: Percentiles) -> str:
    return f"{_took(of.p50)} median; {_took(of.p90)} p90; {_took(of.p99)} p99"


def _disk(statistics: GenerateStatistics) -> str:
    disk = statistics.disk
    if disk.load_bytes is None:
        return "not reported by the system"
    text = f"{render_gb(disk.load_bytes)} read while loading"
    if disk.answer_bytes:
        text += f", {render_gb(disk.answer_bytes)} while answering"
    if disk.cached_fraction is not None and disk.cached_fraction > 0.05:
        text += f"; {disk.cached_fraction:.0%} of the weight files came from the page cache"
    return text


def _traffic_rows(statistics: GenerateStatistics) -> Iterator[tuple[str, str]]:
    traffic = statistics.traffic
    yield (
        "memory moved",
        f"{render_gb(traffic.bytes_moved)} in {traffic.num_passes:,.0f} passes (estimated)",
    )
    ceiling = traffic.measured_ceiling_bytes_per_second
    text = (
        f"{render_gb(traffic.average_bytes_per_second)}/s average, "
        f"{render_gb(traffic.peak_bytes_per_second)}/s peak (estimated)"
    )
    if ceiling and traffic.average_fraction is not None:
        share = f"{traffic.average_fraction:.0%} of the {render_gb(ceiling)}/s"
        text += f"; {share} that a copy reaches here"
    if traffic.paper_ceiling_bytes_per_second:
        text += f", {render_gb(traffic.paper_ceiling_bytes_per_second)}/s on paper"
    yield ("bandwidth", text)


def _arithmetic(statistics: GenerateStatistics) -> str:
    work = statistics.arithmetic
    text = f"{work.flops / TERA:,.2f} TFLOP, {_flops(work.flops_per_second)} (estimated)"
    if work.measured_ceiling_flops_per_second and work.fraction is not None:
        reached = _flops(work.measured_ceiling_flops_per_second)
        text += f"; {work.fraction:.1%} of the {reached} that a product reaches here"
    if work.paper_ceiling_flops_per_second:
        text += f", {_flops(work.paper_ceiling_flops_per_second)} on paper"
    return text


def _memory(statistics: GenerateStatistics) -> str:
    memory = statistics.memory
    is_cpu = statistics.device == "cpu"
    parts = {
        "{} resident" if is_cpu else "{} on the GPU": memory.device_bytes,
        "{} of it in tensors": memory.allocated_bytes,
        "{} on the host": None if is_cpu else memory.host_bytes,
        "predicted {}": memory.predicted_bytes,
    }
    return "; ".join(
        text.format(render_bytes(size)) for text, size in parts.items() if size is not None
    )


def _took(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else render_seconds(seconds)


def render_gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.1f} GB" if num_bytes >= 0.1 * GB else f"{num_bytes / 1e6:,.1f} MB"


def _flops(rate: float) -> str:
    return f"{rate / TERA:,.2f} TFLOP/s" if rate >= 0.01 * TERA else f"{rate / GB:,.1f} GFLOP/s"


class StopRequestedError(KeyboardInterrupt):
    """SIGTERM or SIGHUP: a batch system wants its machine back."""


class _GenerateScreen(GenerateWatcher):
    """Progress on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def resumed(self, num_earlier: int, num_answers: int) -> None:
        write_err(f"going on: {num_earlier:,} of {num_answers:,} answers are there already\n")

    def loaded(self, info: EngineInfo) -> None:
        if not self._as_json:
            where = f"{info.format} on {info.device}, {info.num_slots} at a time"
            write_err(f"{sanitize(info.model)}: {where}; {sanitize(info.why)}\n")

    @contextlib.contextmanager
    def answering(self, num_earlier: int, num_answers: int) -> Iterator[OnAnswer | None]:
        with _progress(num_answers, num_earlier) as on_answer, signals_caught():
            yield on_answer

    def interrupted(self, num_kept: int, num_answers: int) -> None:
        write_err(
            f"\nstopped: {num_kept:,} of {num_answers:,} answers are kept; "
            "the same command goes on\n"
        )


@contextlib.contextmanager
def signals_caught() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does, with the exit code that asks for a requeue."""

    def stop(_number: int, _frame: object) -> None:
        raise StopRequestedError

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


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
