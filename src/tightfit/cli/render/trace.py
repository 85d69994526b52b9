"""A trace as text: the peak of each phase, the tensors alive at the peak, advice, and traced
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from tightfit.cli.render.estimate import VERDICT_STYLES, VERDICT_WORDS
from tightfit.cli.terminal.screen import (
    Column,
    heading,
    make_table,
    plain,
    render_bar,
    render_gauge,
    render_notes,
    show,
)
from tightfit.core.memory_peak import Peak, PeakTensor
from tightfit.core.text import count_of
from tightfit.core.units import render_bytes, render_seconds
from tightfit.estimation.host_and_disk import PROCESS_BYTES
from tightfit.estimation.result import Estimate, StepTime
from tightfit.hardware.types import Gpu
from tightfit.planning.advice import Advice
from tightfit.planning.describe import shorten_gpu
from tightfit.planning.traced import CLOSED_FORM_COMPONENTS, judge_traced
from tightfit.trace.result import TracedMemory, TracedTime

NUM_TENSORS = 8
"""Groups of tensors in the table; the rest is one row."""

NAMED_LIBRARIES = ("torch", "transformers", "peft")
"""Libraries whose versions are shown; a trace records more."""


def show_trace(
    traced: TracedMemory,
    *,
    gpu: Gpu,
    context_bytes: int,
    closed_form: Estimate,
    loading_bytes: Sequence[int] = (),
) -> None:
    """Print what a trace adds to an estimate; `loading_bytes` of host RAM are each rank's."""
    capacity = closed_form.gpu.capacity_bytes
    show(
        [
            "",
            _render_verdict(traced, gpu, context_bytes=context_bytes, capacity_bytes=capacity),
            plain(describe_effort(traced)),
            "",
            _render_totals(traced, closed_form, context_bytes=context_bytes),
            "",
            heading("Peak of each stage, traced"),
            _render_stages(traced, context_bytes=context_bytes, capacity_bytes=capacity),
            "",
            *_render_loading(loading_bytes),
            heading(f"At the traced peak ({describe_place(traced.peak)})"),
            _render_tensors(traced),
        ]
    )


def show_advice(advice: Sequence[Advice]) -> None:
    """Print what would lower the peak, where there is anything."""
    show(render_notes("Less memory, each traced", [describe_advice(one) for one in advice]))


def describe_loading(loading_bytes: Sequence[int]) -> list[str]:
    """`rank 0: 15.6 GiB, 13.1 GiB of it weights`; neighbours with as much are one line."""
    lines, start = [], 0
    for size, group in groupby(loading_bytes):
        num_ranks = len(list(group))
        last = start + num_ranks - 1
        ranks = f"rank {start}" if num_ranks == 1 else f"ranks {start} to {last}, each"
        weights = f"{render_bytes(size)} of it weights" if size else "no weights"
        lines.append(f"{ranks}: {render_bytes(PROCESS_BYTES + size)}, {weights}")
        start += num_ranks
    return lines


def describe_place(peak: Peak) -> str:
    """`steady step, backward: aten.mm in model.layers.3.mlp.down_proj`."""
    op = peak.op or "what stands there before"
    where = f" in {peak.module}" if peak.module else ""
    return f"{peak.stage}: {op}{where}"


def describe_tensor(tensor: PeakTensor) -> str:
    """`32 x bfloat16 [4096, 11008]`."""
    shape = ", ".join(map(str, tensor.shape))
    return f"{tensor.count:,} x {tensor.dtype} [{shape}]"


def describe_maker(tensor: PeakTensor) -> str:
    """`aten.mm in model.layers.*.mlp.up_proj`."""
    made_by = tensor.op or "there before the step"
    return f"{made_by} in {tensor.module}" if tensor.module else made_by


def describe_effort(traced: TracedMemory) -> str:
    """How many layers were run, and why all of them where all were."""
    layers = count_of(traced.num_layers, "layer")
    took = f"in {render_seconds(traced.seconds)}"
    known = [name for name in NAMED_LIBRARIES if name in traced.versions]
    used = ", ".join(f"{name} {traced.versions[name]}" for name in known)
    using = f", with {used}" if used else ""
    if traced.refusal:
        return f"All {layers} traced {took}: {traced.refusal}{using}."
    if traced.num_traced_layers >= traced.num_layers:
        return f"All {layers} traced {took}{using}."
    return f"{layers} from {traced.num_traced_layers:,} traced {took}{using}."


def describe_advice(advice: Advice) -> str:
    """`chunked loss saves 3.9 GiB, then it fits: --set loss=chunked`."""
    words = " ".join(f"--set {name}={value}" for name, value in advice.setting.items())
    fits = ", then it fits" if advice.makes_it_fit else ""
    peak = f" (peak {render_bytes(advice.new_peak_bytes)})"
    return f"{advice.words} saves {render_bytes(advice.saving_bytes)}{peak}{fits}: {words}"


def _render_verdict(
    traced: TracedMemory, gpu: Gpu, *, context_bytes: int, capacity_bytes: int
) -> RenderableType:
    verdict = judge_traced(traced, context_bytes=context_bytes, capacity_bytes=capacity_bytes)
    needed = traced.smallest_capacity_bytes + context_bytes
    short = f", {render_bytes(needed - capacity_bytes)} short" if needed > capacity_bytes else ""
    share = needed / max(capacity_bytes, 1)
    return Text.assemble(
        "Traced, ",
        (VERDICT_WORDS[verdict], VERDICT_STYLES[verdict]),
        f": survives in {render_bytes(needed)}; {shorten_gpu(gpu.name)} has "
        f"{render_bytes(capacity_bytes)} ({share:.0%}{short})",
    )


def _render_totals(
    traced: TracedMemory, closed_form: Estimate, *, context_bytes: int
) -> RenderableType:
    formula = closed_form.gpu
    rows = [
        _total_row("peak allocated", traced.peak_allocated_bytes, context_bytes,
                   closed=formula.peak_allocated_bytes + formula.context_bytes),
        _total_row("peak reserved, without a limit", traced.peak_reserved_bytes, context_bytes,
                   closed=formula.peak_reserved_bytes),
        _total_row("smallest that survives", traced.smallest_capacity_bytes, context_bytes),
    ]  # fmt: skip
    columns = (
        Column(title="on each GPU"),
        Column(title="torch", right=True),
        Column(title=f"with {render_bytes(context_bytes)} context", right=True),
        Column(title="closed form", right=True),
        Column(title=""),
    )
    return make_table(columns, rows)


def _total_row(name: str, size: int, context: int, *, closed: int | None = None) -> tuple[str, ...]:
    whole = size + context
    predicted, off = "", ""
    if closed is not None:
        predicted = render_bytes(closed)
        off = f"{closed / max(whole, 1) - 1:+.1%}"
    return (name, render_bytes(size), render_bytes(whole), predicted, off)


def _render_stages(
    traced: TracedMemory, *, context_bytes: int, capacity_bytes: int
) -> RenderableType:
    rows = []
    for stage in traced.stages:
        # Cached blocks are released before a job fails for want of them.
        least = stage.peak_allocated_bytes + context_bytes
        fraction = least / max(capacity_bytes, 1)
        rows.append(
            (
                stage.name,
                render_bytes(stage.peak_allocated_bytes),
                render_bytes(stage.peak_reserved_bytes),
                render_gauge(fraction, width=24) + (" too much" if fraction > 1 else ""),
            )
        )
    columns = (
        Column(title="stage"),
        Column(title="allocated", right=True),
        Column(title="reserved", right=True),
        Column(title="allocated and context on the card"),
    )
    return make_table(columns, rows)


def _render_loading(loading_bytes: Sequence[int]) -> Iterator[RenderableType]:
    if loading_bytes:
        yield heading("Host RAM while loading, by formula")
        yield from (plain(f" - {line}") for line in describe_loading(loading_bytes))
        yield ""


def _render_tensors(traced: TracedMemory) -> RenderableType:
    shown = traced.peak.tensors[:NUM_TENSORS]
    rows = [
        (
            render_bytes(tensor.num_bytes),
            tensor.category,
            describe_tensor(tensor),
            describe_maker(tensor),
        )
        for tensor in shown
    ]
    rest = traced.peak_allocated_bytes - sum(tensor.num_bytes for tensor in shown)
    if rest > 0:
        rows.append((render_bytes(rest), "other", "", ""))
    columns = (
        Column(title="size", right=True),
        Column(title="part"),
        Column(title="tensors", keep=False),
        Column(title="made by", keep=False),
    )
    return make_table(columns, rows)


# Traced time of a step beside the closed forms

SHORTEST_SHOWN = 0.005
"""Seconds that are still rounded to 0.01."""


def show_traced_time(traced: TracedTime, *, step: StepTime, closed_form: StepTime) -> None:
    """Print the parts of the traced step, transfers between ranks by formula."""
    off = closed_form.seconds_per_step / max(step.seconds_per_step, 1e-12) - 1
    parts = {name: seconds for name, seconds in traced.stages.items() if seconds > 0}
    by_formula = {name: step.components.get(name, 0.0) for name in CLOSED_FORM_COMPONENTS}
    parts |= {f"{name}, by formula": seconds for name, seconds in by_formula.items() if seconds > 0}
    whole = max(step.seconds_per_step, 1e-12)
    rows = [
        (name, _say(seconds), render_bar(seconds / whole, width=36))
        for name, seconds in parts.items()
    ]
    columns = (Column(title="part"), Column(title="time", right=True), Column(title="of the step"))
    show(
        [
            "",
            heading(f"Time of a step, traced: {render_seconds(step.seconds_per_step)}"),
            make_table(columns, rows),
            plain(
                f"By itself the device needs {render_seconds(traced.device_seconds)} and the "
                f"host {render_seconds(traced.host_seconds)}. The closed form says "
                f"{render_seconds(closed_form.seconds_per_step)} ({off:+.1%})."
            ),
        ]
    )


def _say(seconds: float) -> str:
    """A duration too short to show is still not zero."""
    return render_seconds(seconds) if seconds >= SHORTEST_SHOWN else "under 0.01 s"
