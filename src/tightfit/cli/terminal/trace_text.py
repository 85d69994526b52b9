"""A trace as text: the peak of each phase, the tensors alive at the peak, advice, and traced
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tightfit.cli.terminal.screen import (
    VERDICT_STYLES,
    heading,
    make_table,
    plain,
    render_bar,
    render_gauge,
    render_notes,
)
from tightfit.core.profiles import Peak, PeakTensor
from tightfit.core.text import count_of
from tightfit.core.units import render_bytes, render_seconds
from tightfit.estimation.host_and_disk import PROCESS_BYTES
from tightfit.estimation.result import Estimate, StepTime
from tightfit.hardware.types import Gpu
from tightfit.planning.advice import Advice
from tightfit.planning.describe import shorten_gpu
from tightfit.planning.traced import CLOSED_FORM_COMPONENTS, judge_traced
from tightfit.trace.result import TracedMemory, TracedTime

if TYPE_CHECKING:
    from rich.console import RenderableType

SHORTEST_SHOWN = 0.005
"""Seconds that are still rounded to 0.01."""
NUM_TENSORS = 8
"""Groups of tensors in the table; the rest is one row."""

NAMED_LIBRARIES = ("torch", "transformers", "peft")
"""Libraries whose versions are shown; a trace records more."""


def render_trace(
    traced: TracedMemory, closed_form: Estimate, *, gpu: Gpu, loading_bytes: Sequence[int] = ()
) -> Iterator[RenderableType]:
    """What a trace adds to an estimate; `loading_bytes` of host RAM are each rank's."""
    from rich.text import Text

    capacity, context = closed_form.gpu.capacity_bytes, closed_form.gpu.context_bytes
    verdict = judge_traced(traced, context_bytes=context, capacity_bytes=capacity)
    needed = traced.smallest_capacity_bytes + context
    short = f", {render_bytes(needed - capacity)} short" if needed > capacity else ""
    yield ""
    yield Text.assemble(
        "Traced, ",
        (verdict.value.replace("_", " "), VERDICT_STYLES[verdict.value]),
        f": survives in {render_bytes(needed)}; {shorten_gpu(gpu.name)} has "
        f"{render_bytes(capacity)} ({needed / max(capacity, 1):.0%}{short})",
    )
    yield plain(describe_effort(traced))
    yield ""
    yield _render_totals(traced, closed_form)
    yield ""
    yield heading("Peak of each stage, traced")
    yield _render_stages(traced, context_bytes=context, capacity_bytes=capacity)
    yield ""
    if loading_bytes:
        yield heading("Host RAM while loading, by formula")
        yield from (plain(f" - {line}") for line in describe_loading(loading_bytes))
        yield ""
    yield heading(f"At the traced peak ({describe_place(traced.peak)})")
    yield _render_tensors(traced)


def render_advice(advice: Sequence[Advice]) -> Iterator[RenderableType]:
    """What would lower the peak, where there is anything."""
    return render_notes("Less memory, each traced", [describe_advice(one) for one in advice])


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


def _render_totals(traced: TracedMemory, closed_form: Estimate) -> RenderableType:
    formula = closed_form.gpu
    context = formula.context_bytes
    rows = []
    for name, size, closed in (
        (
            "peak allocated",
            traced.peak_allocated_bytes,
            formula.peak_allocated_bytes + context,
        ),
        (
            "peak reserved, without a limit",
            traced.peak_reserved_bytes,
            formula.peak_reserved_bytes,
        ),
        ("smallest that survives", traced.smallest_capacity_bytes, None),
    ):
        whole = size + context
        predicted = "" if closed is None else render_bytes(closed)
        off = "" if closed is None else f"{closed / max(whole, 1) - 1:+.1%}"
        rows.append((name, render_bytes(size), render_bytes(whole), predicted, off))
    titles = ("on each GPU", ">torch", f">with {render_bytes(context)} context", ">closed form", "")
    return make_table(titles, rows)


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
    columns = ("stage", ">allocated", ">reserved", "allocated and context on the card")
    return make_table(columns, rows)


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
    columns = (">size", "part", "~tensors", "~made by")
    return make_table(columns, rows)


def render_traced_time(
    traced: TracedTime, *, step: StepTime, closed_form: StepTime
) -> Iterator[RenderableType]:
    """The parts of the traced step, transfers between ranks by formula."""
    whole = max(step.seconds_per_step, 1e-12)
    off = closed_form.seconds_per_step / whole - 1
    parts = {name: seconds for name, seconds in traced.stages.items() if seconds > 0}
    by_formula = {name: step.components.get(name, 0.0) for name in CLOSED_FORM_COMPONENTS}
    parts |= {f"{name}, by formula": seconds for name, seconds in by_formula.items() if seconds > 0}
    rows = [
        (
            name,
            # A duration too short to show is still not zero.
            render_seconds(seconds) if seconds >= SHORTEST_SHOWN else "under 0.01 s",
            render_bar(seconds / whole, width=36),
        )
        for name, seconds in parts.items()
    ]
    yield ""
    yield heading(f"Time of a step, traced: {render_seconds(step.seconds_per_step)}")
    yield make_table(("part", ">time", "of the step"), rows)
    yield plain(
        f"By itself the device needs {render_seconds(traced.device_seconds)} and the "
        f"host {render_seconds(traced.host_seconds)}. The closed form gives "
        f"{render_seconds(closed_form.seconds_per_step)} ({off:+.1%})."
    )
