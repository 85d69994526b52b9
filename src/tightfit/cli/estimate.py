"""`tightfit estimate`: what one configuration needs, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tightfit.cli.estimate_flags import EstimateFlags
from tightfit.cli.flags import takes
from tightfit.cli.screen import show, show_json
from tightfit.core.errors import DoesNotFitError, UsageError

if TYPE_CHECKING:
    from tightfit.hardware.types import Cluster

EXAMPLES = """\b
Examples:
  tightfit estimate Llama-2-7b --on V100-32GB
  tightfit estimate Llama-2-7b --method full --sharding fsdp --on 8xA100-80GB --seq-len 4096
  tightfit estimate Qwen2.5-7B --method qlora --micro-batch 4 --loss fused --on RTX-4090 --json
  tightfit estimate t5-3b --zero-table --gpus-per-node 8 --nodes 1
  tightfit estimate --zero-table --total-params 2851e6 --largest-layer-params 32e6 --gpus-per-node 8
"""
DEFAULT_CARD = "RTX-4090"
"""What an estimate is made against where no GPU is here and none was named."""


@takes(EstimateFlags)
def estimate(flags: EstimateFlags) -> None:
    """Estimate GPU memory, host RAM, disk and time of one configuration.

    Lists every part of the peak: weights, gradients, optimizer, activations, logits, gathered
    shards, quantization state, CUDA context and allocator slack, for each phase of the job.
    """
    if flags.zero_table:
        from tightfit.cli.zero_table import print_zero_table

        print_zero_table(flags)
        return
    if flags.model is None:
        raise UsageError(
            "Which model? MODEL is missing.", remedy="tightfit models    (lists the catalogue)"
        )
    _estimate_model(flags, flags.model)


def _estimate_model(flags: EstimateFlags, name: str) -> None:
    from tightfit.cli.echo import describe_group, describe_model
    from tightfit.cli.fill_in import choose_strategy
    from tightfit.core.strategy import Method
    from tightfit.models.resolve import resolve_model
    from tightfit.planning.judge import judge
    from tightfit.planning.rules import check_lora_targets

    spec = resolve_model(name)
    cluster, assumed = choose_cluster(flags.on)
    group = cluster.groups[0]
    if len(cluster.groups) > 1:
        others = ", ".join(other.name for other in cluster.groups[1:])
        assumed = (*assumed, f"Estimated on {group.name}; not on {others}.")
    strategy = choose_strategy(flags, group)
    if strategy.method is Method.LORA:
        check_lora_targets(spec, strategy.lora_targets)
    judged = judge(
        spec=spec,
        strategy=strategy,
        node=group.node,
        num_nodes=group.num_nodes,
        network_bytes_per_second=cluster.network_bytes_per_second,
    )
    notes = (*assumed, *cluster.warnings, *judged.assumptions)
    judged = judged.model_copy(update={"assumptions": tuple(dict.fromkeys(notes))})
    if flags.as_json:
        show_json(
            {
                "model": describe_model(spec),
                "strategy": strategy.model_dump(mode="json"),
                "hardware": describe_group(group, cluster),
                **judged.model_dump(mode="json"),
            }
        )
    else:
        from tightfit.cli.render_estimate import render_estimate

        show(*render_estimate(judged, spec=spec, strategy=strategy, group=group))
    if flags.check and judged.verdict.value in ("does_not_fit", "illegal"):
        raise typer.Exit(DoesNotFitError.exit_code)


def choose_cluster(on: str | None) -> tuple[Cluster, tuple[str, ...]]:
    """What was named; else this machine; else a common card, said so in the second value."""
    from tightfit.core.errors import UserError
    from tightfit.hardware.resolve import resolve_hardware

    if on is not None:
        return resolve_hardware(on), ()
    try:
        return resolve_hardware("here"), ("Estimated on this machine (--on was not given).",)
    except UserError:
        cluster = resolve_hardware(DEFAULT_CARD)
    card = cluster.groups[0].node.gpu.name
    return cluster, (f"No GPU is here and --on was not given: estimated on one {card}.",)
