"""Short descriptions of strategies and hardware, for one line or one table cell."""

from __future__ import annotations

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.objectives import ExampleKind, Objective
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Loss, Method, Offload
from tightfit.core.strategy import Strategy
from tightfit.core.text import count_of, sanitize
from tightfit.core.trainers import find_trainer


def name_method(strategy: Strategy) -> str:
    """The word people use: `full`, `lora`, `lora-int8`, `qlora`, `lora-gptq4` or `load`."""
    if strategy.method is not Method.LORA or not strategy.weights.is_quantized:
        return strategy.method.value
    return "qlora" if strategy.weights is Dtype.NF4 else f"lora-{strategy.weights.value}"


def name_example(strategy: Strategy) -> str:
    """What `micro_batch` counts: `sequence` or `pair`."""
    is_pair = strategy.objective.record.example is ExampleKind.PAIR
    return "pair" if is_pair else "sequence"


def count_examples(strategy: Strategy, count: int) -> str:
    """`16 sequences`, `1 pair`."""
    return count_of(count, name_example(strategy))


def describe_reference(strategy: Strategy) -> list[str]:
    """Where the objective's reference comes from, in words; nothing where it needs none."""
    if strategy.copies_reference:
        return ["reference copy"]
    if strategy.runs_reference:
        return ["reference in each step"]
    return ["reference before training"] if strategy.precompute_reference else []


def describe_recomputing(strategy: Strategy) -> str:
    """`checkpointing`, `checkpointing of 8 layers`, `checkpointing, 31 inputs in host memory` or
    `no checkpointing`."""
    if not strategy.checkpointing:
        return "no checkpointing"
    some = strategy.recomputed_layers
    what = "checkpointing" if some is None else f"checkpointing of {some} layers"
    moved = strategy.offloaded_inputs
    return f"{what}, {moved} inputs in host memory" if moved else what


def describe_strategy(strategy: Strategy, *, is_cpu: bool = False) -> str:
    """One line: `lora fp16, ddp on 1 x 4 GPUs, micro-batch 2 x 4, checkpointing, fused loss`."""
    s = strategy
    one, many = ("1 process", "processes") if is_cpu else ("1 GPU", "GPUs")
    dtypes = s.weights.value if s.weights is s.compute else f"{s.weights.value}/{s.compute.value}"
    where = one if s.world_size == 1 else f"{s.num_nodes} x {s.gpus_per_node} {many}"
    objective = "" if s.objective is Objective.SFT else f"{s.objective.value} "
    parts = [
        f"{objective}{name_method(s)} {dtypes}",
        f"{s.sharding.value} on {where}",
        f"micro-batch {s.micro_batch} x {s.grad_accum}",
    ]
    if s.offload.value != "none":
        parts.append(f"offload {s.offload.value}")
    parts += describe_context(s)
    parts.append(describe_recomputing(s))
    if s.optimizer is not Strategy.model_fields["optimizer"].default:
        parts.append(s.optimizer.value)
    parts.append(f"{s.attention.value} attention")
    parts.append(f"{s.loss.value} loss")
    parts += describe_reference(s)
    if s.dora:
        parts.append("DoRA")
    if s.router_loss_weight:
        parts.append(f"router loss x {s.router_loss_weight:g}")
    parts += name_kernel_levers(s)
    parts += [name for name, on in (("compiled", s.compile), ("packed", s.packing)) if on]
    return ", ".join(parts)


def name_kernel_levers(strategy: Strategy) -> list[str]:
    """What a plan pulls of the levers that change how products and passes run, in words."""
    s = strategy
    levers = (
        ("fused kernels", s.fused_kernels),
        ("large loss chunks", s.loss_chunk_factor > 1),
        ("fused LoRA", s.fused_lora),
        ("MLPs in tiles", s.mlp_tiles > 1),
        ("fp8 products", s.fp8),
        ("fp8 gradients", s.fp8_gradients),
        ("dequantized base", s.dequantized_base),
    )
    return [name for name, is_pulled in levers if is_pulled]


def describe_method(strategy: Strategy) -> str:
    """`full`, `LoRA r16`, `QLoRA r16`, `load`; `DPO LoRA r16` for another objective than SFT."""
    objective = ""
    if strategy.objective is not Objective.SFT:
        objective = f"{strategy.objective.value.upper()} "
    if strategy.method is not Method.LORA:
        return f"{objective}{strategy.method.value}"
    name = "DoRA" if strategy.dora else "LoRA"
    name = f"Q{name}" if strategy.weights is Dtype.NF4 else name
    return f"{objective}{name} r{strategy.lora_rank}"


def describe_precision(strategy: Strategy) -> str:
    """`bf16`, or `nf4 in bf16` where storage and arithmetic differ."""
    if strategy.weights is strategy.compute:
        return strategy.weights.value
    return f"{strategy.weights.value} in {strategy.compute.value}"


def describe_batch(strategy: Strategy) -> str:
    """`4 x 8`: micro-batch times accumulation."""
    return f"{strategy.micro_batch:,} x {strategy.grad_accum:,}"


def describe_sharding(strategy: Strategy) -> str:
    """`fsdp`, `zero3 + offload all`, `fsdp + context parallel 4`."""
    words = [strategy.sharding.value]
    if strategy.offload is not Offload.NONE:
        words.append(f"offload {strategy.offload.value}")
    return " + ".join([*words, *describe_context(strategy)])


def describe_context(strategy: Strategy) -> list[str]:
    """`context parallel 4`, where GPUs share rows."""
    size = strategy.context_parallel
    return [f"context parallel {size}"] if size > 1 else []


def describe_settings(strategy: Strategy) -> str:
    """One line with the settings that differ from the plainest strategy."""
    words = [f"{describe_method(strategy)}, {describe_precision(strategy)}"]
    if strategy.is_trained:
        words.append(strategy.optimizer.value)
    examples = f"{strategy.micro_batch:,}"
    if name_example(strategy) == "pair":
        examples = count_examples(strategy, strategy.micro_batch)
    words.append(f"{examples} x {strategy.seq_len:,} tokens")
    if strategy.grad_accum > 1:
        words.append(f"{strategy.grad_accum:,} micro-batches per step")
    if strategy.is_trained:
        words.append(describe_recomputing(strategy))
    if strategy.attention is not Attention.SDPA:
        words.append(f"{strategy.attention.value} attention")
    if strategy.is_trained and strategy.loss is not Loss.PLAIN:
        words.append(f"{strategy.loss.value} loss")
    words += [*describe_reference(strategy), *name_kernel_levers(strategy)]
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
    words += [*describe_reference(strategy), *name_kernel_levers(strategy)]
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


def describe_epochs(num_epochs: float) -> str:
    """`1 epoch`, `0.125 epochs`, `10,000 epochs`."""
    if num_epochs == 1:
        return "1 epoch"
    return f"{num_epochs:,.0f} epochs" if num_epochs >= 1000 else f"{num_epochs:.4g} epochs"


def describe_trainer(strategy: Strategy) -> str:
    """`, as TRL 1.16 does it`; empty for tightfit's own jobs."""
    return f", as {find_trainer(strategy.trainer).title} does it" if strategy.trainer else ""


def describe_gpus(gpu: str | None, *, num_nodes: int, gpus_per_node: int) -> str:
    """`4 x V100-SXM2-32GB`, `2 nodes of 4 x A100`; `4 GPUs` where the card is named elsewhere."""
    if gpu is None:
        cards = count_of(gpus_per_node, "GPU")
    else:
        cards = f"{gpus_per_node} x {shorten_gpu(gpu)}"
    return cards if num_nodes == 1 else f"{count_of(num_nodes, 'node')} of {cards}"


def shorten_gpu(name: str) -> str:
    """The card without its series: `V100-SXM2-32GB`, `RTX 4090`."""
    return sanitize(name).removeprefix("NVIDIA ").removeprefix("Tesla ").removeprefix("GeForce ")
