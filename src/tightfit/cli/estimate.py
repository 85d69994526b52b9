"""`tightfit estimate`: memory, disk and time of one configuration, part by part."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from tightfit.api.options.choices import read_count
from tightfit.cli.charts.memory import check_chart_path
from tightfit.cli.flags.training import EstimateFlags
from tightfit.cli.network import note_network, state_network
from tightfit.cli.terminal.output import show_json
from tightfit.cli.training.hardware import choose_cluster_or_card
from tightfit.cli.training.strategy_defaults import choose_strategy
from tightfit.core.errors import DoesNotFitError, UsageError
from tightfit.core.strategy import Method, Strategy
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_count
from tightfit.estimate.result import Estimate, Verdict
from tightfit.estimate.zero_table import estimate_zero_table, largest_layer_params
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.planning.judge import judge_strategy
from tightfit.planning.rules import Case, check_lora_targets

if TYPE_CHECKING:
    from tightfit.cli.training.tracing import TracedEstimate


# What a JSON answer repeats of the question: model and hardware as they were understood.


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


# `tightfit estimate --zero-table`: the field's six-row table, from a model or from two numbers.


def print_zero_table(flags: EstimateFlags) -> None:
    """Print the table for `--gpus-per-node` times `--nodes`."""
    total, largest, name = _read_sizes(flags)
    rows = estimate_zero_table(
        total_params=total,
        largest_layer_params=largest,
        gpus_per_node=flags.gpus_per_node,
        num_nodes=flags.nodes,
    )
    if flags.as_json:
        show_json(
            {
                "model": name,
                "total_params": total,
                "largest_layer_params": largest,
                "gpus_per_node": flags.gpus_per_node,
                "nodes": flags.nodes,
                "rows": [dataclasses.asdict(row) for row in rows],
            }
        )
        return
    from tightfit.cli.render.estimate import show_zero_table

    show_zero_table(
        rows,
        f"ZeRO-3 model states of {name or 'a model'}: {render_count(total)} parameters, "
        f"largest layer {render_count(largest)}, {count_of(flags.nodes, 'node')} with "
        f"{count_of(flags.gpus_per_node, 'GPU')} each.",
    )


def _read_sizes(flags: EstimateFlags) -> tuple[int, int, str | None]:
    """Parameters in all, in the largest layer, and the model's name where there is a model."""
    stated = (flags.total_params, flags.largest_layer_params)
    if flags.model is not None:
        if stated != (None, None):
            raise UsageError(
                "The table is made from MODEL or from --total-params, not from both.",
                remedy=f"tightfit estimate {flags.model} --zero-table",
            )
        spec = resolve_model(flags.model)
        return spec.num_params, largest_layer_params(spec), spec.name
    if stated[0] is None or stated[1] is None:
        raise UsageError(
            "`--zero-table` needs MODEL, or both --total-params and --largest-layer-params.",
            remedy="tightfit estimate --zero-table --total-params 2.8B --largest-layer-params 32M",
        )
    total = read_count(stated[0], option="--total-params")
    largest = read_count(stated[1], option="--largest-layer-params")
    if largest > total:
        raise UsageError(
            f"The largest layer ({render_count(largest)}) is larger than the model "
            f"({render_count(total)}).",
            remedy="swap --total-params and --largest-layer-params",
        )
    return total, largest, None


def estimate(flags: EstimateFlags) -> None:
    """Print one estimate, or the ZeRO table."""
    if flags.chart is not None and not flags.trace:
        raise UsageError(
            "`--chart` draws what a trace has seen, and none was asked for.",
            remedy=f"--trace --chart {flags.chart}",
        )
    if flags.zero_table and flags.trace:
        raise UsageError(
            "`--zero-table` is arithmetic on sizes alone; --trace would be ignored.",
            remedy="tightfit estimate MODEL --trace    (without --zero-table)",
        )
    if flags.chart is not None:
        check_chart_path(flags.chart)
    if flags.zero_table:
        print_zero_table(flags)
    elif flags.model is None and flags.total_params is not None:
        _estimate_model(flags, f"{flags.total_params}-params")
    elif flags.model is None:
        raise UsageError(
            "Which model? MODEL is missing.", remedy="tightfit models    (lists the catalogue)"
        )
    else:
        _estimate_model(flags, flags.model)


def _estimate_model(flags: EstimateFlags, name: str) -> None:
    spec = resolve_model(name)
    cluster, notes = choose_cluster_or_card(flags.on)
    cluster = state_network(cluster, flags.network)
    group = cluster.groups[0]
    if len(cluster.groups) > 1:
        others = ", ".join(sanitize(other.name) for other in cluster.groups[1:])
        notes = (*notes, f"Estimated on {sanitize(group.name)}; not on {others}.")
    strategy = choose_strategy(flags, spec=spec, group=group)
    if strategy.method is Method.LORA:
        check_lora_targets(spec, strategy.lora_targets)
    judged = judge_strategy(
        spec=spec,
        strategy=strategy,
        node=group.node,
        num_nodes=group.num_nodes,
        network_bytes_per_second=cluster.network_bytes_per_second,
    )
    notes = (*notes, *cluster.warnings, *judged.assumptions)
    notes = note_network(cluster, dict.fromkeys(notes))
    judged = judged.model_copy(update={"assumptions": notes})
    traced = _trace(spec, strategy, group, judged) if flags.trace else None
    final = judged if traced is None else traced.apply(judged)
    if flags.as_json:
        show_json(
            {
                "model": describe_model(spec),
                "strategy": strategy.model_dump(mode="json"),
                "hardware": describe_group(group, cluster),
                **final.model_dump(mode="json"),
                **({} if traced is None else traced.describe(judged)),
            }
        )
    else:
        from tightfit.cli.render.estimate import show_estimate

        show_estimate(final, spec=spec, strategy=strategy, group=group)
    if traced is not None:
        _show_trace(flags, traced, judged)
    if flags.check and final.verdict in (Verdict.DOES_NOT_FIT, Verdict.ILLEGAL):
        raise typer.Exit(DoesNotFitError.exit_code)


def _show_trace(flags: EstimateFlags, traced: TracedEstimate, judged: Estimate) -> None:
    """What is known first; the advice takes longest."""
    if not flags.as_json:
        traced.show(judged)
    if flags.chart is not None:
        traced.draw(flags.chart, judged)
    if not flags.as_json:
        traced.show_advice()


def _trace(
    spec: ModelSpec, strategy: Strategy, group: NodeGroup, judged: Estimate
) -> TracedEstimate | None:
    from tightfit.cli.training.tracing import trace_estimate

    if judged.verdict is Verdict.ILLEGAL:
        return None
    case = Case(spec=spec, strategy=strategy, node=group.node, num_nodes=group.num_nodes)
    return trace_estimate(case, judged)
