"""Short descriptions of strategies and hardware, for one line or one table cell."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Loss, Method, Offload, Optimizer, Strategy
from tightfit.core.text import count_of, sanitize
from tightfit.planning.request import describe_recomputing, name_kernel_levers


def describe_method(strategy: Strategy) -> str:
    """`full`, `LoRA r16`, `QLoRA r16`, `load`."""
    if strategy.method is not Method.LORA:
        return str(strategy.method.value)
    name = "DoRA" if strategy.dora else "LoRA"
    name = f"Q{name}" if strategy.weights is Dtype.NF4 else name
    return f"{name} r{strategy.lora_rank}"


def describe_precision(strategy: Strategy) -> str:
    """`bf16`, or `nf4 in bf16` where storage and arithmetic differ."""
    if strategy.weights is strategy.compute:
        return strategy.weights.value
    return f"{strategy.weights.value} in {strategy.compute.value}"


def describe_batch(strategy: Strategy) -> str:
    """`4 x 8`: micro-batch times accumulation."""
    return f"{strategy.micro_batch:,} x {strategy.grad_accum:,}"


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
    words.append(f"{strategy.micro_batch:,} x {strategy.seq_len:,} tokens")
    if strategy.grad_accum > 1:
        words.append(f"{strategy.grad_accum:,} micro-batches per step")
    if strategy.is_trained:
        words.append(describe_recomputing(strategy))
    if strategy.attention is not Attention.SDPA:
        words.append(f"{strategy.attention.value} attention")
    if strategy.is_trained and strategy.loss is not Loss.PLAIN:
        words.append(f"{strategy.loss.value} loss")
    words += name_kernel_levers(strategy)
    if strategy.packing:
        words.append("packed")
    return ", ".join(words)


def describe_how(strategy: Strategy, gpu: str | None = None, *, is_cpu: bool = False) -> str:
    """The head of a plan's row: `LoRA r16, fp16, ddp on 4 GPUs`, or `on 4 x V100-SXM2-32GB`."""
    words = (describe_method(strategy), describe_precision(strategy), describe_sharding(strategy))
    if is_cpu and gpu is None:
        nodes = f" on {strategy.num_nodes} nodes" if strategy.num_nodes > 1 else ""
        return f"{', '.join(words)}, {count_of(strategy.world_size, 'process')}{nodes}"
    gpus = describe_gpus(gpu, num_nodes=strategy.num_nodes, gpus_per_node=strategy.gpus_per_node)
    return f"{', '.join(words)} on {gpus}"


def describe_levers(strategy: Strategy) -> str:
    """The remaining switches of a plan's row, for a table cell."""
    words = [f"micro-batch {describe_batch(strategy)}"]
    words.append(describe_recomputing(strategy))
    words += name_kernel_levers(strategy)
    if strategy.loss is not Loss.PLAIN:
        words.append(f"{strategy.loss.value} loss")
    if strategy.attention is not Attention.SDPA:
        words.append(f"{strategy.attention.value} attention")
    if strategy.packing:
        words.append("packing")
    if strategy.optimizer is not Optimizer.ADAMW:
        words.append(strategy.optimizer.value)
    if strategy.compile:
        words.append("compiled")
    return ", ".join(words)


def describe_gpus(gpu: str | None, *, num_nodes: int, gpus_per_node: int) -> str:
    """`4 x V100-SXM2-32GB`, `2 nodes of 4 x A100`; `4 GPUs` where the card is said elsewhere."""
    if gpu is None:
        cards = count_of(gpus_per_node, "GPU")
    else:
        cards = f"{gpus_per_node} x {shorten_gpu(gpu)}"
    return cards if num_nodes == 1 else f"{count_of(num_nodes, 'node')} of {cards}"


def shorten_gpu(name: str) -> str:
    """The card without its series: `V100-SXM2-32GB`, `RTX 4090`."""
    return sanitize(name).removeprefix("NVIDIA ").removeprefix("Tesla ").removeprefix("GeForce ")
