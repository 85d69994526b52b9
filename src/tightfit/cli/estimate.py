"""`tightfit estimate`: memory, disk and time of one configuration, part by part."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from tightfit.api import estimate as api
from tightfit.cli.charts.memory import check_chart_path
from tightfit.cli.flags.training import EstimateFlags
from tightfit.cli.terminal.output import progress_bar, show_json
from tightfit.core.errors import DoesNotFitError, UsageError
from tightfit.core.text import count_of
from tightfit.core.units import render_count
from tightfit.estimation.result import Verdict
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.models.spec import ModelSpec

if TYPE_CHECKING:
    from pathlib import Path

    from tightfit.api.training.tracing import TracedEstimate


def estimate(flags: EstimateFlags) -> None:
    """Print one estimate, or the ZeRO table."""
    _check_flags(flags)
    if flags.zero_table:
        _show_zero_table(flags)
        return
    with progress_bar() as progress:
        found = api.estimate(dataclasses.replace(flags, progress=progress))
    if flags.as_json:
        show_json(_describe(found))
    else:
        from tightfit.cli.render.estimate import show_estimate

        show_estimate(found.estimate, spec=found.spec, strategy=found.strategy, group=found.group)
    if found.traced is not None:
        if not flags.as_json:
            _show_trace(found, found.traced)
        if flags.chart is not None:
            _draw(found, found.traced, flags.chart)
        if not flags.as_json:
            from tightfit.cli.render.trace import show_advice

            show_advice(found.traced.advice)  # last: it takes longest to trace
    if flags.check and found.estimate.verdict in (Verdict.DOES_NOT_FIT, Verdict.ILLEGAL):
        raise typer.Exit(DoesNotFitError.exit_code)


def _check_flags(flags: EstimateFlags) -> None:
    if flags.chart is not None and not flags.trace:
        raise UsageError(
            "`--chart` draws a trace, and none was asked for.",
            remedy=f"--trace --chart {flags.chart}",
        )
    if flags.zero_table and flags.trace:
        raise UsageError(
            "`--zero-table` is arithmetic on sizes alone; --trace would be ignored.",
            remedy="tightfit estimate MODEL --trace    (without --zero-table)",
        )
    if flags.chart is not None:
        check_chart_path(flags.chart)


def _describe(found: api.EstimateResult) -> dict[str, Any]:
    traced = {} if found.traced is None else found.traced.describe(found.closed_form)
    return {
        "model": describe_model(found.spec),
        "strategy": found.strategy.model_dump(mode="json"),
        "hardware": describe_group(found.group, found.cluster),
        **found.estimate.model_dump(mode="json"),
        **traced,
    }


def describe_model(spec: ModelSpec) -> dict[str, Any]:
    """Enough to see which model was meant; `tightfit models NAME --json` has the rest."""
    return {
        "name": spec.name,
        "model_type": spec.model_type,
        "source": spec.source,
        "num_params": spec.num_params,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "warnings": list(spec.warnings),
    }


def describe_group(group: NodeGroup, cluster: Cluster) -> dict[str, Any]:
    """The group that was used, and where it was found."""
    node = group.node
    return {
        "group": group.name,
        "source": cluster.source,
        "gpu": node.gpu.name,
        "gpu_memory_bytes": node.gpu.memory_bytes,
        "compute_capability": node.gpu.compute_capability,
        "num_nodes": group.num_nodes,
        "gpus_per_node": node.num_gpus,
        "host_memory_bytes": node.host_memory_bytes,
        "network_bytes_per_second": cluster.network_bytes_per_second,
        "warnings": list(cluster.warnings),
    }


def _show_trace(found: api.EstimateResult, traced: TracedEstimate) -> None:
    from tightfit.cli.render.trace import show_trace, show_traced_time

    closed_form = found.closed_form
    show_trace(
        traced.traced,
        gpu=found.group.node.gpu,
        context_bytes=closed_form.gpu.context_bytes,
        closed_form=closed_form,
        loading_bytes=traced.list_loading_bytes(),
    )
    stages, step = traced.time_stages(), traced.time_step(closed_form.time)
    if stages is not None and step is not None:
        show_traced_time(stages, step=step, closed_form=closed_form.time)


def _draw(found: api.EstimateResult, traced: TracedEstimate, path: Path) -> None:
    from tightfit.cli.charts.trace import make_strategy_panel, write_trace_panels

    gpu = found.group.node.gpu
    panel = make_strategy_panel(found.strategy, gpu, found.closed_form, traced.traced)
    write_trace_panels(found.spec.name, (panel,), path)


def _show_zero_table(flags: EstimateFlags) -> None:
    table = api.zero_table(flags)
    if flags.as_json:
        show_json(
            {
                "model": table.model,
                "total_params": table.total_params,
                "largest_layer_params": table.largest_layer_params,
                "gpus_per_node": flags.gpus_per_node,
                "nodes": flags.nodes,
                "rows": [dataclasses.asdict(row) for row in table.rows],
            }
        )
        return
    from tightfit.cli.render.estimate import show_zero_table

    show_zero_table(
        table.rows,
        f"ZeRO-3 model states of {table.model or 'a model'}: "
        f"{render_count(table.total_params)} parameters, "
        f"largest layer {render_count(table.largest_layer_params)}, "
        f"{count_of(flags.nodes, 'node')} with {count_of(flags.gpus_per_node, 'GPU')} each.",
    )
