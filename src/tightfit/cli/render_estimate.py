"""An Estimate as text: the verdict first, then every part of the peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tightfit.cli.describe import describe_layout, describe_strategy
from tightfit.cli.notes import heading, plain, render_notes
from tightfit.cli.screen import Column, make_table, render_bar
from tightfit.core.units import render_bytes, render_count, render_seconds
from tightfit.estimate.result import Estimate, StepTime, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tightfit.core.strategy import Strategy
    from tightfit.hardware.types import NodeGroup
    from tightfit.models.spec import ModelSpec

VERDICT_STYLES = {
    Verdict.FITS: "bold green",
    Verdict.TIGHT: "bold yellow",
    Verdict.DOES_NOT_FIT: "bold red",
    Verdict.ILLEGAL: "bold red",
}
VERDICT_WORDS = {
    Verdict.FITS: "fits",
    Verdict.TIGHT: "tight",
    Verdict.DOES_NOT_FIT: "does not fit",
    Verdict.ILLEGAL: "illegal",
}


def render_estimate(
    estimate: Estimate, *, spec: ModelSpec, strategy: Strategy, group: NodeGroup
) -> Iterator[RenderableType]:
    """Everything `tightfit estimate` shows a person."""
    yield render_verdict(estimate)
    yield _render_subject(estimate, spec=spec, strategy=strategy, group=group)
    yield ""
    yield heading(f"GPU memory at its peak ({estimate.gpu.peak_phase}), on each GPU")
    yield _render_components(estimate)
    yield ""
    yield heading("Peak of each phase")
    yield _render_phases(estimate)
    yield ""
    yield _render_surroundings(estimate)
    yield from render_notes("Assumed", estimate.assumptions)
    yield from render_notes("Beware", spec.warnings)


def render_verdict(estimate: Estimate) -> RenderableType:
    """`fits: 14.2 of 31.7 GiB`, in the colour of the verdict."""
    from rich.text import Text

    word = Text(VERDICT_WORDS[estimate.verdict], style=VERDICT_STYLES[estimate.verdict])
    return word + Text(f": {estimate.reason}")


def render_time(time: StepTime) -> str:
    """`0.42 s (0.31 to 0.60 s)`."""
    low, high = (
        render_seconds(time.seconds_per_step_low),
        render_seconds(time.seconds_per_step_high),
    )
    return f"{render_seconds(time.seconds_per_step)} ({low} to {high})"


def _render_subject(
    estimate: Estimate, *, spec: ModelSpec, strategy: Strategy, group: NodeGroup
) -> RenderableType:
    counts = estimate.parameters
    trained = f", {render_count(counts.trainable)} trained" if strategy.is_trained else ""
    return plain(
        f"{spec.name} ({render_count(counts.total)} parameters{trained}): "
        f"{describe_strategy(strategy)}, on {describe_layout(strategy, group)}"
    )


def _render_components(estimate: Estimate) -> RenderableType:
    gpu = estimate.gpu
    scale = max(gpu.capacity_bytes, gpu.peak_reserved_bytes, 1)
    rows: list[tuple[RenderableType, ...]] = [
        (name, render_bytes(size), render_bar(size / scale, width=36))
        for name, size in sorted(gpu.components.items(), key=lambda item: -item[1])
        if size > 0
    ]
    rows.append(
        (
            "total",
            render_bytes(gpu.peak_reserved_bytes),
            f"of {render_bytes(gpu.capacity_bytes)} on the card "
            f"({gpu.peak_reserved_bytes / max(gpu.capacity_bytes, 1):.0%})",
        )
    )
    columns = (Column(title="part"), Column(title="size", right=True), Column(title="of the card"))
    return make_table(columns, rows)


def _render_phases(estimate: Estimate) -> RenderableType:
    capacity = max(estimate.gpu.capacity_bytes, 1)
    rows = [
        (
            phase.name,
            render_bytes(phase.peak_allocated_bytes),
            render_bytes(phase.peak_reserved_bytes),
            render_bytes(phase.host_peak_bytes),
            render_bar(phase.peak_reserved_bytes / capacity, width=20)
            + (" too much" if phase.peak_reserved_bytes > capacity else ""),
        )
        for phase in estimate.phases
    ]
    columns = (
        Column(title="phase"),
        Column(title="tensors", right=True),
        Column(title="process", right=True),
        Column(title="host RAM", right=True),
        Column(title="process of the card"),
    )
    return make_table(columns, rows)


def _render_surroundings(estimate: Estimate) -> RenderableType:
    host, disk, time = estimate.host, estimate.disk, estimate.time
    of = f" of {render_bytes(host.capacity_bytes)}" if host.capacity_bytes else ""
    rows = [
        ("host RAM", f"{render_bytes(host.peak_bytes)}{of} per node", _listed(host.components)),
        ("disk", render_bytes(disk.bytes), _listed(disk.components)),
    ]
    if time.seconds_per_step > 0:
        speed = f"{time.tokens_per_second:,.0f} tokens/s, {time.mfu_fraction:.0%} of peak FLOP/s"
        rows.append(("step", render_time(time), speed))
    if time.seconds_per_epoch is not None:
        steps = f"{time.steps_per_epoch:,} steps" if time.steps_per_epoch else ""
        rows.append(("epoch", render_seconds(time.seconds_per_epoch), steps))
    columns = (Column(title=""), Column(title="needs"), Column(title="made of", keep=False))
    return make_table(columns, rows)


def _listed(components: dict[str, int]) -> str:
    largest = sorted(components.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {render_bytes(size)}" for name, size in largest if size > 0)
