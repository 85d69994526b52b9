"""`tightfit estimate`: Memory, disk and time of one configuration, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from tightfit.api import estimate as api
from tightfit.api.options.training import EstimateOptions, EstimateOutput
from tightfit.cli.terminal.charts import check_chart_path
from tightfit.cli.terminal.output import progress_bar, show_json
from tightfit.cli.terminal.screen import (
    VERDICT_STYLES,
    Column,
    heading,
    make_table,
    plain,
    render_bar,
    render_gauge,
    render_notes,
    show,
)
from tightfit.cli.terminal.trace_text import render_advice, render_trace, render_traced_time
from tightfit.core.errors import DoesNotFitError, UsageError
from tightfit.core.strategy import Strategy
from tightfit.core.text import count_of
from tightfit.core.units import GIB, render_bytes, render_count, render_seconds
from tightfit.estimation.result import TRACED, Estimate, Verdict
from tightfit.estimation.state import ZeroRow
from tightfit.hardware.types import NodeGroup
from tightfit.models.spec import ModelSpec
from tightfit.planning.describe import (
    describe_gpus,
    describe_settings,
    describe_sharding,
    describe_trainer,
)
from tightfit.planning.traced import UNTRACED_PHASES

if TYPE_CHECKING:
    from rich.console import RenderableType


def estimate(options: EstimateOptions, output: EstimateOutput) -> None:
    """Print one estimate, or the ZeRO table."""
    if output.chart is not None and not options.trace:
        raise UsageError(
            "`--chart` draws a trace, and none was asked for.",
            remedy=f"--trace --chart {output.chart}",
        )
    if output.zero_table and options.trace:
        raise UsageError(
            "`--zero-table` is arithmetic on sizes alone; --trace would be ignored.",
            remedy="tightfit estimate MODEL --trace    (without --zero-table)",
        )
    if output.chart is not None:
        check_chart_path(output.chart)
    if output.zero_table:
        _show_zero_table(options, as_json=output.as_json)
        return
    with progress_bar() as progress:
        found = api.estimate(dataclasses.replace(options, progress=progress))
    if output.as_json:
        show_json(_describe(found))
    else:
        show(render_estimate(found.estimate, found.spec, found.strategy, found.group))
    if found.traced is not None:
        _show_trace(found, output)
    if output.check and found.estimate.verdict in (Verdict.DOES_NOT_FIT, Verdict.ILLEGAL):
        raise typer.Exit(DoesNotFitError.exit_code)


def _show_trace(found: api.EstimateResult, output: EstimateOutput) -> None:
    assert found.traced is not None
    gpu, closed_form, traced = found.group.node.gpu, found.closed_form, found.traced
    if not output.as_json:
        loading_bytes = traced.list_loading_bytes()
        show(render_trace(traced.traced, closed_form, gpu=gpu, loading_bytes=loading_bytes))
        stages, step = traced.time_stages(), traced.time_step(closed_form.time)
        if stages is not None and step is not None:
            show(render_traced_time(stages, step=step, closed_form=closed_form.time))
    if output.chart is not None:
        from tightfit.cli.terminal.trace_chart import make_trace_panel, write_trace_chart

        panel = make_trace_panel(found.strategy, gpu, closed_form, traced.traced)
        write_trace_chart(found.spec.name, [panel], output.chart)
    if not output.as_json:
        show(render_advice(traced.advice))  # last: it takes longest to trace


def _describe(found: api.EstimateResult) -> dict[str, Any]:
    spec, node, cluster = found.spec, found.group.node, found.cluster
    return {
        # Enough to see which model was meant; `tightfit models NAME --json` has the rest.
        "model": {
            "name": spec.name,
            "model_type": spec.model_type,
            "source": spec.source,
            "num_params": spec.num_params,
            "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "warnings": list(spec.warnings),
        },
        "strategy": found.strategy.model_dump(mode="json"),
        "hardware": {
            "group": found.group.name,
            "source": cluster.source,
            "gpu": node.gpu.name,
            "gpu_memory_bytes": node.gpu.memory_bytes,
            "compute_capability": node.gpu.compute_capability,
            "num_nodes": found.group.num_nodes,
            "gpus_per_node": node.num_gpus,
            "host_memory_bytes": node.host_memory_bytes,
            "network_bytes_per_second": cluster.network_bytes_per_second,
            "warnings": list(cluster.warnings),
        },
        **found.estimate.model_dump(mode="json"),
        **({} if found.traced is None else found.traced.describe(found.closed_form)),
    }


def _show_zero_table(options: EstimateOptions, *, as_json: bool) -> None:
    table = api.zero_table(options)
    if as_json:
        show_json(
            {
                "model": table.model,
                "total_params": table.total_params,
                "largest_layer_params": table.largest_layer_params,
                "gpus_per_node": options.gpus_per_node,
                "nodes": options.nodes,
                "rows": [row._asdict() for row in table.rows],
            }
        )
        return
    subject = (
        f"ZeRO-3 model states of {table.model or 'a model'}: "
        f"{render_count(table.total_params)} parameters, "
        f"largest layer {render_count(table.largest_layer_params)}, "
        f"{count_of(options.nodes, 'node')} with {count_of(options.gpus_per_node, 'GPU')} each."
    )
    show(render_zero_table(table.rows, subject))


def render_estimate(
    estimate: Estimate, spec: ModelSpec, strategy: Strategy, group: NodeGroup
) -> Iterator[RenderableType]:
    """The verdict, then every part of the peak."""
    from rich.text import Text

    word = (_words(estimate.verdict.value), VERDICT_STYLES[estimate.verdict.value])
    yield Text.assemble(word, f": {estimate.reason}")
    if estimate.verdict is Verdict.ILLEGAL:  # its parts answer a question that nobody can act on
        yield _render_subject(estimate, spec=spec, strategy=strategy, group=group)
        needs, has = estimate.gpu.peak_reserved_bytes, estimate.gpu.capacity_bytes
        per = "process" if group.node.gpu.is_cpu else "GPU"
        yield plain(
            f"By size alone it would need {render_bytes(needs)} of {render_bytes(has)} per {per} "
            "(--json has every part)."
        )
        return
    is_cpu = group.node.gpu.is_cpu
    can_trace = not is_cpu and not strategy.trainer
    if estimate.verdict is Verdict.TIGHT and estimate.tier != TRACED and can_trace:
        yield plain("By formula, whose error is of the same size; --trace runs the very step.")
    yield _render_subject(estimate, spec=spec, strategy=strategy, group=group)
    yield ""
    phase = _words(estimate.gpu.peak_phase)
    gpu_words = f"GPU memory at its peak ({phase}), on each GPU"
    yield heading(f"Memory at its peak ({phase}), of each process" if is_cpu else gpu_words)
    yield _render_components(estimate, place="free" if is_cpu else "on the card")
    yield ""
    yield from _render_phases(estimate, is_cpu=is_cpu)
    yield _render_surroundings(estimate)
    assumed = [note for note in estimate.assumptions if note not in spec.warnings]
    yield from render_notes("Assumed", assumed)
    yield from render_notes("Beware", spec.warnings)


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
        f"{describe_settings(strategy)}{spread}, on {gpus}{describe_trainer(strategy)}"
    )


def _render_components(estimate: Estimate, *, place: str) -> RenderableType:
    gpu = estimate.gpu
    scale = max(gpu.capacity_bytes, gpu.peak_reserved_bytes, 1)
    rows: list[tuple[str, ...]] = [
        (_words(name), render_bytes(size), render_bar(size / scale, width=36))
        for name, size in sorted(gpu.components.items(), key=lambda item: -item[1])
        if size > 0
    ]
    is_unlimited = estimate.tier == TRACED and estimate.verdict is Verdict.DOES_NOT_FIT
    rows.append(
        (
            # A traced job that cannot run here has no peak on this card.
            "total, without a limit" if is_unlimited else "total",
            render_bytes(gpu.peak_reserved_bytes),
            f"of {render_bytes(gpu.capacity_bytes)} {place} "
            f"({gpu.peak_reserved_bytes / max(gpu.capacity_bytes, 1):.0%})",
        )
    )
    title = "of the card" if place == "on the card" else "of what is free"
    columns = ("part", ">size", title)
    return make_table(columns, rows)


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
        "phase",
        ">tensors",
        ">process",
        Column("process in memory" if is_cpu else "process on the card"),
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
        low, high = map(render_seconds, (time.seconds_per_step_low, time.seconds_per_step_high))
        each = f"{render_seconds(time.seconds_per_step)} ({low} to {high})"
        rows.append((f"step{how}", each, speed))
    if time.seconds_per_epoch is not None:
        steps = count_of(time.steps_per_epoch, "step") if time.steps_per_epoch else ""
        rows.append(("epoch", render_seconds(time.seconds_per_epoch), steps))
    if time.compile_seconds:
        rows.append(("compiling", render_seconds(time.compile_seconds), "once; the code is kept"))
    columns = ("", "needs", "~made of")
    return make_table(columns, rows)


def _listed(components: dict[str, int]) -> str:
    largest = sorted(components.items(), key=lambda item: -item[1])
    return ", ".join(f"{_words(name)} {render_bytes(size)}" for name, size in largest if size > 0)


def render_zero_table(rows: Iterable[ZeroRow], subject: str) -> Iterator[RenderableType]:
    """In the words of DeepSpeed's own table."""
    yield plain(subject)
    yield plain(
        "Weights, gradients and Adam only: `tightfit estimate MODEL --sharding zero3` adds the "
        "rest. GB are 2^30 bytes, as in DeepSpeed's table."
    )
    yield ""
    columns = (">per CPU", ">per GPU", "~Options")
    yield make_table(columns, [_zero_row(row) for row in rows])


def _zero_row(row: ZeroRow) -> tuple[str, str, str]:
    return (
        f"{row.host_bytes / GIB:,.2f}GB",
        f"{row.gpu_bytes / GIB:,.2f}GB",
        f"offload_param={row.offload_param}, offload_optimizer={row.offload_optimizer}, "
        f"zero_init={row.zero_init}",
    )
