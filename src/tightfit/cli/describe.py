"""A strategy and its hardware in a few words, for one line or one cell."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Loss, Method, Offload, Optimizer, Strategy
from tightfit.hardware.types import NodeGroup


def describe_method(strategy: Strategy) -> str:
    """`full`, `LoRA r16`, `QLoRA r16`, `load`."""
    if strategy.method is not Method.LORA:
        return strategy.method.value
    name = "QLoRA" if strategy.weights is Dtype.NF4 else "LoRA"
    return f"{name} r{strategy.lora_rank}"


def describe_precision(strategy: Strategy) -> str:
    """`bf16`, or `nf4 in bf16` where storage and arithmetic differ."""
    if strategy.weights is strategy.compute:
        return strategy.weights.value
    return f"{strategy.weights.value} in {strategy.compute.value}"


def describe_batch(strategy: Strategy) -> str:
    """`4 x 8`: micro-batch times accumulation."""
    return f"{strategy.micro_batch} x {strategy.grad_accum}"


def describe_sharding(strategy: Strategy) -> str:
    """`fsdp`, `zero3 + offload all`."""
    if strategy.offload is Offload.NONE:
        return strategy.sharding.value
    return f"{strategy.sharding.value} + offload {strategy.offload.value}"


def describe_strategy(strategy: Strategy) -> str:
    """One line: what differs from the plainest way to do it is said, the rest is not."""
    words = [f"{describe_method(strategy)}, {describe_precision(strategy)}"]
    if strategy.is_trained:
        words.append(strategy.optimizer.value)
    words.append(f"{strategy.micro_batch} x {strategy.seq_len} tokens")
    if strategy.grad_accum > 1:
        words.append(f"{strategy.grad_accum} micro-batches per step")
    if strategy.is_trained:
        words.append("checkpointing" if strategy.checkpointing else "no checkpointing")
    if strategy.attention is not Attention.SDPA:
        words.append(f"{strategy.attention.value} attention")
    if strategy.is_trained and strategy.loss is not Loss.PLAIN:
        words.append(f"{strategy.loss.value} loss")
    if strategy.fused_kernels:
        words.append("fused kernels")
    if strategy.packing:
        words.append("packed")
    return ", ".join(words)


def describe_levers(strategy: Strategy) -> str:
    """The remaining switches of a plan's row, for a table cell."""
    words = []
    if strategy.checkpointing:
        words.append("checkpointing")
    if strategy.fused_kernels:
        words.append("fused kernels")
    if strategy.loss is not Loss.PLAIN:
        words.append(f"{strategy.loss.value} loss")
    if strategy.attention is not Attention.SDPA:
        words.append(strategy.attention.value)
    if strategy.packing:
        words.append("packing")
    if strategy.optimizer is not Optimizer.ADAMW:
        words.append(strategy.optimizer.value)
    return ", ".join(words) or "-"


def describe_gpus(group: NodeGroup, *, num_nodes: int, gpus_per_node: int) -> str:
    """`4 x V100-SXM2-32GB`, or `2 nodes of 4 x A100`."""
    cards = f"{gpus_per_node} x {group.node.gpu.name}"
    return cards if num_nodes == 1 else f"{num_nodes} nodes of {cards}"


def describe_layout(strategy: Strategy, group: NodeGroup) -> str:
    """The GPUs the strategy uses and how it spreads over them."""
    gpus = describe_gpus(group, num_nodes=strategy.num_nodes, gpus_per_node=strategy.gpus_per_node)
    spread = describe_sharding(strategy)
    return gpus if spread == "single" else f"{gpus} ({spread})"
