"""`tightfit estimate`: what one configuration needs, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tightfit.cli.charts.memory import check_chart_path
from tightfit.cli.echo import describe_group, describe_model
from tightfit.cli.fill_in import choose_strategy
from tightfit.cli.flags.estimate import EstimateFlags
from tightfit.cli.hardware_choice import choose_cluster_or_card
from tightfit.cli.network import note_network, state_network
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.zero_table import print_zero_table
from tightfit.core.errors import DoesNotFitError, UsageError
from tightfit.core.strategy import Method, Strategy
from tightfit.estimate.result import Estimate, Verdict
from tightfit.hardware.types import NodeGroup
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.planning.case import Case
from tightfit.planning.judge import judge
from tightfit.planning.rules import check_lora_targets

if TYPE_CHECKING:
    from tightfit.cli.traced_estimate import TracedEstimate


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
        others = ", ".join(harmless(other.name) for other in cluster.groups[1:])
        notes = (*notes, f"Estimated on {harmless(group.name)}; not on {others}.")
    strategy = choose_strategy(flags, spec=spec, group=group)
    if strategy.method is Method.LORA:
        check_lora_targets(spec, strategy.lora_targets)
    judged = judge(
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
        _tell_trace(flags, traced, judged)
    if flags.check and final.verdict in (Verdict.DOES_NOT_FIT, Verdict.ILLEGAL):
        raise typer.Exit(DoesNotFitError.exit_code)


def _tell_trace(flags: EstimateFlags, traced: TracedEstimate, judged: Estimate) -> None:
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
    from tightfit.cli.traced_estimate import trace_estimate

    if judged.verdict is Verdict.ILLEGAL:
        return None
    case = Case(spec=spec, strategy=strategy, node=group.node, num_nodes=group.num_nodes)
    return trace_estimate(case, judged)
