"""After an out-of-memory: the same training in less memory, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tightfit.core.packages import __version__
from tightfit.core.settings import Loss, Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.estimation.host_and_disk import DEFAULT_CHECKPOINTS
from tightfit.estimation.job import estimate_job, exceeds_host_memory
from tightfit.estimation.result import Estimate
from tightfit.planning.describe import describe_recomputing
from tightfit.planning.filter import assume_host, name_memory_share
from tightfit.planning.plan import Plan, estimate_cost
from tightfit.planning.rules import (
    Case,
    find_first_violation,
    find_warnings,
    without_dequantized_base,
)
from tightfit.planning.space import LEAST_SLICE_TOKENS, list_long_row_levers

_CHEAPER_LOSSES = {
    Loss.PLAIN: (Loss.CHUNKED, Loss.FUSED),
    Loss.KERNEL: (Loss.CHUNKED, Loss.FUSED),
    Loss.CHUNKED: (Loss.FUSED,),
}
_TORCH_LADDER: tuple[tuple[Sharding, Offload], ...] = (
    (Sharding.FSDP, Offload.NONE),
    (Sharding.FSDP, Offload.ALL),
)
_ZERO_LADDER = (Offload.OPTIMIZER, Offload.ALL)
"""At the same stage: another one cannot read this one's checkpoints."""


def list_fallbacks(plan: Plan) -> list[Plan]:
    """Plans for the same training that need less and less memory; what costs least time first.

    Small chunks of the fused loss, then a reference computed before training, then a base that
    stays quantized, then smaller micro-batches with more accumulation, then recomputing, first of
    half the layers, then a loss that holds less of the logits, then the levers for long rows, then
    rows shared by more GPUs of a node, then sharding and offload by the same engine, whose
    checkpoints the run goes on from. Each keeps the step before it, is legal, and is predicted to
    need less; the sequences of a step, the method and the number formats stay.
    """
    found: list[Plan] = []
    hardware = plan.hardware
    share = name_memory_share(hardware.node)
    strategy, estimate = plan.strategy, _estimate(plan, plan.strategy)
    for kind in _KINDS:
        for fields in kind(plan, strategy):
            smaller = strategy.model_copy(update=fields)
            case = Case(
                spec=plan.model, strategy=smaller, node=hardware.node, num_nodes=hardware.num_nodes
            )
            if find_first_violation(case) is not None:
                continue
            less = _estimate(plan, smaller)
            saved = estimate.gpu.peak_reserved_bytes - less.gpu.peak_reserved_bytes
            if saved <= 0 or exceeds_host_memory(less.host):
                continue
            change = f"{_describe(smaller, fields)}: -{render_bytes(saved)} {share}"
            update = {
                "tightfit_version": __version__,
                "strategy": smaller,
                "estimate": less,
                "cost": estimate_cost(
                    gpu=hardware.node.gpu,
                    num_gpus=smaller.world_size,
                    estimate=less,
                    num_epochs=plan.num_epochs,
                ),
                "why": (f"after out of memory, {change}",),
                "warnings": tuple(warning.reason for warning in find_warnings(case)),
            }
            found.append(plan.model_copy(update=update))
            strategy, estimate = smaller, less
    return found


def _list_slices(_plan: Plan, strategy: Strategy) -> Iterator[dict[str, Any]]:
    if strategy.loss_chunk_factor > 1:
        yield {"loss_chunk_factor": 1}


def _list_references(_plan: Plan, strategy: Strategy) -> Iterator[dict[str, Any]]:
    if strategy.runs_reference:
        yield {"precompute_reference": True}


def _list_packed(_plan: Plan, strategy: Strategy) -> Iterator[dict[str, Any]]:
    if strategy.dequantized_base:
        yield without_dequantized_base(strategy)


def _list_smaller_batches(_plan: Plan, strategy: Strategy) -> Iterator[dict[str, Any]]:
    """Halved, or as near to it as divides the batch evenly."""
    size, sequences = strategy.micro_batch, strategy.micro_batch * strategy.grad_accum
    while size > 1:
        size = next(part for part in range(size // 2, 0, -1) if sequences % part == 0)
        yield {"micro_batch": size, "grad_accum": sequences // size}


def _list_recomputing(plan: Plan, strategy: Strategy) -> Iterator[dict[str, Any]]:
    num_layers = plan.model.num_layers
    half = -(-num_layers // 2)
    if strategy.count_recomputed(num_layers) < half < num_layers:
        yield {"checkpointing": True, "recomputed_layers": half}
    yield {"checkpointing": True, "recomputed_layers": None}


def _list_long_rows(plan: Plan, strategy: Strategy) -> Iterator[dict[str, Any]]:
    yield from list_long_row_levers(plan.model, strategy, assume_host(plan.hardware.node))


def _list_losses(_plan: Plan, strategy: Strategy) -> Iterator[dict[str, Any]]:
    for loss in _CHEAPER_LOSSES.get(strategy.loss, ()):
        yield {"loss": loss}


def _list_contexts(_plan: Plan, strategy: Strategy) -> Iterator[dict[str, Any]]:
    """Twice as many GPUs to a row, inside a node, and as many sequences a step."""
    size, accumulated = strategy.context_parallel, strategy.grad_accum
    while (
        strategy.gpus_per_node % (2 * size) == 0
        and strategy.seq_len >= 2 * size * LEAST_SLICE_TOKENS
    ):
        size, accumulated = 2 * size, 2 * accumulated
        yield {"context_parallel": size, "grad_accum": accumulated}


def _list_shardings(plan: Plan, strategy: Strategy) -> Iterator[dict[str, Any]]:
    ladder = _TORCH_LADDER
    if strategy.sharding.is_zero:
        ladder = tuple((strategy.sharding, offload) for offload in _ZERO_LADDER)
    for sharding, offload in ladder:
        is_moved = offload is not Offload.NONE
        if is_moved and plan.hardware.node.gpu.is_cpu:
            continue
        if is_moved or strategy.world_size > 1:
            yield {"sharding": sharding, "offload": offload}


_KINDS = (
    _list_slices,
    _list_references,
    _list_packed,
    _list_smaller_batches,
    _list_recomputing,
    _list_losses,
    _list_long_rows,
    _list_contexts,
    _list_shardings,
)


_WORDS = {
    "loss_chunk_factor": "small loss chunks",
    "precompute_reference": "reference before training",
    "dequantized_base": "quantized base",
    "mlp_tiles": "MLPs in tiles",
    "offloaded_inputs": "layers' inputs in host memory",
}
"""Of changes that are always the same."""


def _describe(strategy: Strategy, fields: dict[str, Any]) -> str:
    for name, words in _WORDS.items():
        if name in fields:
            return words
    if "micro_batch" in fields:
        return f"micro-batch {strategy.micro_batch} x {strategy.grad_accum}"
    if "context_parallel" in fields:
        return f"{strategy.context_parallel} GPUs to a row"
    if "checkpointing" in fields:
        return describe_recomputing(strategy)
    if "loss" in fields:
        return f"{strategy.loss.value} loss"
    moved = f", offload {strategy.offload.value}" if strategy.offload is not Offload.NONE else ""
    return f"{strategy.sharding.value}{moved}"


def _estimate(plan: Plan, strategy: Strategy) -> Estimate:
    training = plan.training
    return estimate_job(
        spec=plan.model,
        strategy=strategy,
        node=assume_host(plan.hardware.node),
        network_bytes_per_second=plan.hardware.network_bytes_per_second,
        profile=plan.data,
        num_checkpoints=DEFAULT_CHECKPOINTS if training is None else training.keep_checkpoints,
    )
