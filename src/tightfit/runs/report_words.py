"""A run's report as labelled lines, the same on the terminal and in the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timezone

from tightfit.core.units import render_bytes, render_count, render_seconds
from tightfit.runs.report import EvalPoint, RunReport, Unit, parse_time

UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine:
    """One line of a report."""

    label: str
    value: str
    meaning: str
    """For whoever sees the word for the first time."""


def list_results(report: RunReport) -> list[ResultLine]:
    """Every result, in the same order for every run, so that runs can stand side by side."""
    return [*_learning(report), *_pace(report), *_memory(report)]


def align_results(reports: Sequence[RunReport]) -> list[tuple[str, ...]]:
    """Label and one value per run; a run on a CPU has other lines than one on a GPU."""
    held = [{result.label: result.value for result in list_results(r)} for r in reports]
    labels = dict.fromkeys(label for values in held for label in values)
    return [(label, *(values.get(label, UNKNOWN) for values in held)) for label in labels]


def render_quantity(value: float | None, unit: Unit) -> str:
    if value is None:
        return UNKNOWN
    if unit is Unit.BYTES:
        return render_bytes(value)
    if unit is Unit.SECONDS:
        return render_short_seconds(value)
    if unit is Unit.FRACTION:
        return _percent(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def render_short_seconds(seconds: float) -> str:
    """Like `render_seconds`, but a fast step does not read 0.00 s."""
    return f"{seconds * 1000:,.3g} ms" if seconds < 0.1 else render_seconds(seconds)


def render_error(percent: float | None) -> str:
    """`+3.1%`: predicted 3.1% too much."""
    return UNKNOWN if percent is None else f"{percent:+.1f}%"


def render_progress(report: RunReport) -> str:
    """`40 of 120`."""
    return f"{report.step:,} of {report.num_steps:,}" if report.num_steps else f"{report.step:,}"


def render_time(text: str) -> str:
    """`2026-07-01 10:00 UTC`; what is no time, as it is."""
    found = parse_time(text)
    return text if found is None else f"{found.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


def _learning(report: RunReport) -> list[ResultLine]:
    bad = report.num_nonfinite_losses
    broken = f" ({bad:,} not finite)" if bad else ""
    return [
        ResultLine(label="steps", value=render_progress(report),
               meaning="times the weights were changed"),
        ResultLine(label="epochs", value=_number(report.num_epochs, "{:,.2f}"),
               meaning="passes over the training rows"),
        ResultLine(label="tokens", value=render_count(report.num_tokens),
               meaning="pieces of words that were read, padding left out"),
        ResultLine(label="trained tokens", value=render_count(report.num_trained_tokens),
               meaning="those among them that the model learnt to write"),
        ResultLine(label="train loss, first", value=_loss(report.first_loss),
               meaning="mean of the first few steps"),
        ResultLine(label="train loss, last", value=_loss(report.last_loss) + broken,
               meaning="mean of the last few steps; lower is better"),
        ResultLine(label="eval loss, before", value=_eval_loss(report.eval_before),
               meaning="on rows held back from training, before the first step"),
        ResultLine(label="eval loss, after", value=_eval_loss(report.eval_after),
               meaning="on the same rows at the end: what counts"),
        ResultLine(label="perplexity, before", value=_perplexity(report.eval_before),
               meaning="e to the eval loss: how many words it hesitates between"),
        ResultLine(label="perplexity, after", value=_perplexity(report.eval_after),
               meaning="the same at the end"),
    ]  # fmt: skip


def _pace(report: RunReport) -> list[ResultLine]:
    each, epoch = report.seconds_per_step, report.seconds_per_epoch
    return [
        ResultLine(label="time", value=_seconds(report.total_seconds or None),
               meaning="all steps, with what lay between them"),
        ResultLine(label="time per epoch", value=_seconds(epoch),
               meaning="one pass over the training rows"),
        ResultLine(label="time per step", value=_seconds(each),
               meaning="median, without warm-up"),
        ResultLine(label="tokens per second",
               value=render_quantity(report.tokens_per_second, Unit.TOKENS_PER_SECOND),
               meaning="over all devices, padding left out"),
        ResultLine(label="MFU", value=_percent(report.mfu_fraction),
               meaning="share of the card's peak arithmetic that went into the model"),
        ResultLine(label="data wait", value=_percent(report.data_wait_fraction),
               meaning="share of the time spent waiting for rows; near 0 is well"),
    ]  # fmt: skip


def _memory(report: RunReport) -> list[ResultLine]:
    what = "process memory" if report.is_cpu else "GPU memory"
    peak = ResultLine(label=f"{what}, peak", value=_bytes(report.peak_gpu_allocated_bytes),
                  meaning="most that was held at once on rank 0")  # fmt: skip
    beside = [
        ResultLine(label=f"{what}, reserved", value=_bytes(report.peak_gpu_reserved_bytes),
               meaning="with what the allocator kept for reuse"),
        ResultLine(label="host memory, peak", value=_bytes(report.peak_host_bytes),
               meaning="RAM of rank 0's process"),
        ResultLine(label="allocator retries", value=f"{report.num_alloc_retries:,}",
               meaning="times the card was nearly full and memory had to be shaken out"),
    ]  # fmt: skip
    return [
        peak,
        *([] if report.is_cpu else beside),
        ResultLine(label="plan changes", value=f"{len(report.plan_changes):,}",
               meaning="times it ran out of memory and went on with a smaller plan"),
        ResultLine(label="disk", value=render_bytes(report.disk_bytes),
               meaning="all files of the run folder"),
    ]  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)


def _loss(value: float | None) -> str:
    return _number(value, "{:,.4f}")


def _eval_loss(point: EvalPoint | None) -> str:
    if point is None:
        return UNKNOWN
    return "not finite" if point.loss is None else _loss(point.loss)


def _perplexity(point: EvalPoint | None) -> str:
    if point is None:
        return UNKNOWN
    if point.perplexity is None:
        return "not finite"
    return f"{point.perplexity:,.4g}" if point.perplexity < 1000 else render_count(point.perplexity)


def _percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.1f}%"


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else render_short_seconds(value)


def _bytes(value: float | None) -> str:
    return UNKNOWN if value is None else render_bytes(value)
