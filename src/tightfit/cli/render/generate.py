"""A run of `generate` as text: before it what is predicted, after it what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tightfit.cli.describe import count_of
from tightfit.cli.terminal.harmless import harmless_lines
from tightfit.cli.terminal.notes import heading, plain
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.cli.terminal.table import Cell
from tightfit.core.units import GB, TERA, render_bytes, render_seconds
from tightfit.serve.generate.statistics import Percentiles, Statistics

if TYPE_CHECKING:
    from tightfit.data.prompter import Prompter
    from tightfit.serve.generate.job import GenerateJob
    from tightfit.serve.generate.plan import Prediction

SHOWN_PROMPTS = 3
LONGEST_SHOWN = 2000


def show_statistics(statistics: Statistics) -> None:
    show(_render(statistics))


def describe_dry_run(
    job: GenerateJob, prompter: Prompter, prediction: Prediction | None
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


def _describe_prediction(prediction: Prediction) -> dict[str, Any]:
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
        yield Text(harmless_lines(cut))
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


def _render(told: Statistics) -> Iterator[RenderableType]:
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


def _remarks(told: Statistics) -> Iterator[str]:
    if told.num_earlier_answers:
        earlier = count_of(told.num_earlier_answers, "answer")
        yield f"Beside {earlier} of an earlier run, which the figures leave out."
    if told.num_cut:
        cut = count_of(told.num_cut, "answer")
        yield f"Cut off at the limit on new tokens (--max-new-tokens): {cut}."


def _rows(told: Statistics) -> Iterator[tuple[str, str]]:
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


def _disk(told: Statistics) -> str:
    disk = told.disk
    if disk.load_bytes is None:
        return "not told by the system"
    text = f"{_gb(disk.load_bytes)} read while loading"
    if disk.answer_bytes:
        text += f", {_gb(disk.answer_bytes)} while answering"
    if disk.cached_fraction is not None and disk.cached_fraction > 0.05:
        text += f"; {disk.cached_fraction:.0%} of the weight files came from the page cache"
    return text


def _traffic_rows(told: Statistics) -> Iterator[tuple[str, str]]:
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


def _arithmetic(told: Statistics) -> str:
    work = told.arithmetic
    text = f"{work.flops / TERA:,.2f} TFLOP, {_flops(work.flops_per_second)} (estimated)"
    if work.measured_ceiling_flops_per_second and work.fraction is not None:
        reached = _flops(work.measured_ceiling_flops_per_second)
        text += f"; {work.fraction:.1%} of the {reached} that a product reaches here"
    if work.paper_ceiling_flops_per_second:
        text += f", {_flops(work.paper_ceiling_flops_per_second)} on paper"
    return text


def _memory(told: Statistics) -> str:
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
