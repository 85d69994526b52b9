"""An estimate as text: the verdict, then every part of the peak; and the ZeRO table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

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
from tightfit.core.strategy import Strategy
from tightfit.core.text import count_of
from tightfit.core.units import GIB, render_bytes, render_count, render_seconds
from tightfit.estimation.result import Estimate, StepTime, Verdict
from tightfit.estimation.zero_table import ZeroRow
from tightfit.hardware.types import NodeGroup
from tightfit.models.spec import ModelSpec
from tightfit.planning.describe import describe_gpus, describe_sharding, describe_strategy
from tightfit.planning.traced import TRACED, UNTRACED_PHASES

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


def show_estimate(
    estimate: Estimate, *, spec: ModelSpec, strategy: Strategy, group: NodeGroup
) -> None:
    """Print everything `tightfit estimate` shows a person."""
    show(_render(estimate, spec=spec, strategy=strategy, group=group))


def _render(
    estimate: Estimate, *, spec: ModelSpec, strategy: Strategy, group: NodeGroup
) -> Iterator[RenderableType]:
    yield render_verdict(estimate)
    yield _render_subject(estimate, spec=spec, strategy=strategy, group=group)
    yield ""
    phase, is_cpu = _words(estimate.gpu.peak_phase), group.node.gpu.is_cpu
    gpu_words = f"GPU memory at its peak ({phase}), on each GPU"
    yield heading(f"Memory at its peak ({phase}), of each process" if is_cpu else gpu_words)
    yield _render_components(estimate, place="free" if is_cpu else "on the card")
    yield ""
    yield from _render_phases(estimate, is_cpu=is_cpu)
    yield _render_surroundings(estimate)
    assumed = [note for note in estimate.assumptions if note not in spec.warnings]
    yield from render_notes("Assumed", assumed)
    yield from render_notes("Beware", spec.warnings)


def render_verdict(estimate: Estimate) -> RenderableType:
    """`fits: 14.2 of 31.7 GiB`, in the colour of the verdict."""
    word = (VERDICT_WORDS[estimate.verdict], VERDICT_STYLES[estimate.verdict])
    return Text.assemble(word, f": {estimate.reason}")


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
    gpus = describe_gpus(
        group.node.gpu.name, num_nodes=strategy.num_nodes, gpus_per_node=strategy.gpus_per_node
    )
    is_plain = describe_sharding(strategy) == "single"
    spread = "" if is_plain else f", {describe_sharding(strategy)}"
    return plain(
        f"{spec.name} ({render_count(counts.total)} parameters{trained}): "
        f"{describe_strategy(strategy)}{spread}, on {gpus}"
    )


def _render_components(estimate: Estimate, *, place: str) -> RenderableType:
    gpu = estimate.gpu
    scale = max(gpu.capacity_bytes, gpu.peak_reserved_bytes, 1)
    rows: list[tuple[str, ...]] = [
        (_words(name), render_bytes(size), render_bar(size / scale, width=36))
        for name, size in sorted(gpu.components.items(), key=lambda item: -item[1])
        if size > 0
    ]
    rows.append(
        (
            _name_total(estimate),
            render_bytes(gpu.peak_reserved_bytes),
            f"of {render_bytes(gpu.capacity_bytes)} {place} "
            f"({gpu.peak_reserved_bytes / max(gpu.capacity_bytes, 1):.0%})",
        )
    )
    title = "of the card" if place == "on the card" else "of what is free"
    columns = (Column(title="part"), Column(title="size", right=True), Column(title=title))
    return make_table(columns, rows)


def _name_total(estimate: Estimate) -> str:
    """A traced job that cannot run here has no peak on this card."""
    is_unlimited = estimate.tier == TRACED and estimate.verdict is Verdict.DOES_NOT_FIT
    return "total, without a limit" if is_unlimited else "total"


def _render_phases(estimate: Estimate, *, is_cpu: bool) -> Iterator[RenderableType]:
    """With a trace, only the phases that it does not run are listed."""
    is_traced = estimate.tier == TRACED
    phases = [p for p in estimate.phases if not is_traced or p.name in UNTRACED_PHASES]
    if not phases:
        return
    capacity = max(estimate.gpu.capacity_bytes, 1)
    rows = [
        (
            _words(phase.name),
            render_bytes(phase.peak_allocated_bytes),
            render_bytes(phase.peak_reserved_bytes),
            render_gauge(phase.peak_reserved_bytes / capacity, width=24)
            + (" too much" if phase.peak_reserved_bytes > capacity else ""),
        )
        for phase in phases
    ]
    columns = (
        Column(title="phase"),
        Column(title="tensors", right=True),
        Column(title="process", right=True),
        Column(title="process in memory" if is_cpu else "process on the card"),
    )
    yield heading("Peak of each phase that is not traced" if is_traced else "Peak of each phase")
    yield make_table(columns, rows)
    yield ""


def _words(name: str) -> str:
    return name.replace("_", " ")


def _render_surroundings(estimate: Estimate) -> RenderableType:
    host, disk, time = estimate.host, estimate.disk, estimate.time
    of = f" of {render_bytes(host.capacity_bytes)}" if host.capacity_bytes else ""
    rows = [
        ("host RAM", f"{render_bytes(host.peak_bytes)}{of} per node", _listed(host.components)),
        ("disk", render_bytes(disk.bytes), _listed(disk.components)),
    ]
    if time.seconds_per_step > 0:
        speed = f"{time.tokens_per_second:,.0f} tokens/s, {time.mfu_fraction:.0%} of peak FLOP/s"
        how = "" if time.tier == "closed-form" else f", {time.tier}"
        rows.append((f"step{how}", render_time(time), speed))
    if time.seconds_per_epoch is not None:
        steps = count_of(time.steps_per_epoch, "step") if time.steps_per_epoch else ""
        rows.append(("epoch", render_seconds(time.seconds_per_epoch), steps))
    columns = (Column(title=""), Column(title="needs"), Column(title="made of", keep=False))
    return make_table(columns, rows)


def _listed(components: dict[str, int]) -> str:
    largest = sorted(components.items(), key=lambda item: -item[1])
    return ", ".join(f"{_words(name)} {render_bytes(size)}" for name, size in largest if size > 0)


# The ZeRO table as text, in the words of DeepSpeed's own.


def show_zero_table(rows: Sequence[ZeroRow], subject: str) -> None:
    show(_render_zero_table(rows, subject))


def _render_zero_table(rows: Sequence[ZeroRow], subject: str) -> Iterator[RenderableType]:
    yield plain(subject)
    yield plain(
        "Weights, gradients and Adam only: `tightfit estimate MODEL --sharding zero3` adds the "
        "rest. GB are 2^30 bytes, as in DeepSpeed's table."
    )
    yield ""
    columns = (
        Column(title="per CPU", right=True),
        Column(title="per GPU", right=True),
        Column(title="Options", keep=False),
    )
    yield make_table(columns, [_zero_row(row) for row in rows])


def _zero_row(row: ZeroRow) -> tuple[str, str, str]:
    return (
        f"{row.host_bytes / GIB:,.2f}GB",
        f"{row.gpu_bytes / GIB:,.2f}GB",
        f"offload_param={row.offload_param}, offload_optimizer={row.offload_optimizer}, "
        f"zero_init={row.zero_init}",
    )
