"""Seconds of one optimizer step: matrix products, attention, memory-bound kernels, launches and
transfers over sustained rates.
"""

from __future__ import annotations

from math import ceil, log
from typing import NamedTuple

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.objectives import Objective
from tightfit.core.profiles import DataProfile
from tightfit.core.settings import Loss, Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.estimation import communication as comms
from tightfit.estimation import traffic
from tightfit.estimation.activations import find_unfused_attention, has_padding_mask
from tightfit.estimation.flops import (
    NO_ADAPTERS,
    AdapterSums,
    Workload,
    count_forward_only_passes,
    count_pairs,
    count_reference_passes,
    estimate_adapter_flops,
    estimate_step_flops,
    recomputes_logits,
    skips_masked_pairs,
    sum_adapters,
    sum_workload,
)
from tightfit.estimation.host_and_disk import offloaded_bytes
from tightfit.estimation.result import StepTime
from tightfit.estimation.weights import (
    as_loaded,
    find_fused_projections,
    has_augmented_weight,
    is_lora_target,
)
from tightfit.hardware import rates as eff
from tightfit.hardware.rates import MatmulTable, find_fp8_matmul_table, find_matmul_table
from tightfit.hardware.types import Gpu, Node
from tightfit.models.spec import Block, Linear, ModelSpec


class RowLengths(NamedTuple):
    """Mean lengths, in tokens."""

    row: float
    """A row of the batch, padding included."""
    context: float
    """The sequence that a token attends to: less than a packed row."""
    sequence: float
    """A sequence of the attention kernel: a row, or a packed document."""


def find_row_lengths(
    strategy: Strategy, profile: DataProfile | None, *, skips_cross_document_pairs: bool
) -> RowLengths:
    """From the data's profile; `seq_len` without one."""
    full = float(strategy.seq_len)
    if profile is None or (strategy.packing and not skips_cross_document_pairs):
        return RowLengths(row=full, context=full, sequence=full)
    mean = max(profile.mean_tokens, 1.0)
    if strategy.packing:
        # The document of a packed token is longer than the mean document.
        tokens = sum(length * rows for length, rows in profile.histogram)
        squares = sum(length * length * rows for length, rows in profile.histogram)
        context = min(full, max(1.0, squares / tokens if tokens else profile.mean_tokens))
        return RowLengths(row=full, context=context, sequence=min(full, mean))
    waste = padding_waste(profile, strategy.micro_batch)
    row = min(full, mean / (1.0 - waste))
    return RowLengths(row=row, context=row, sequence=row)


def padding_waste(profile: DataProfile, micro_batch: int) -> float:
    """Share of padding in batches of this size, interpolated between the sampled sizes.

    Linear in the logarithm of the batch size; constant beyond the sampled sizes.
    """
    known = sorted((int(size), waste) for size, waste in profile.padding_waste_fraction.items())
    if not known:
        return 0.0
    below = max((pair for pair in known if pair[0] <= micro_batch), default=known[0])
    above = min((pair for pair in known if pair[0] >= micro_batch), default=known[-1])
    if below[0] >= above[0]:
        return min(below[1], 0.99)
    share = log(micro_batch / below[0]) / log(above[0] / below[0])
    return min(below[1] + share * (above[1] - below[1]), 0.99)


# Kernel launches

ADAPTER_KERNELS = 4
"""Of a LoRA layer in the model's own dtype: two products, a scaling, a sum."""
FUSED_LORA_KERNELS = 2
"""Of fused LoRA: the two products."""


def count_forward_kernels(
    work: Workload, adapters: AdapterSums, strategy: Strategy, *, is_rms_norm: bool
) -> float:
    """Kernels of one forward pass through the blocks."""
    fused = strategy.fused_kernels or strategy.compile
    norm = 1 if fused or not is_rms_norm else 6
    rotary = 1 if fused else 10
    attention = strategy.attention.record.num_kernels
    around = 2 if strategy.compile else 4
    is_plain = strategy.weights is strategy.compute and not strategy.stores_fp8
    linear = 1 if is_plain else 3  # dequantized, or its input cast by a triton kernel
    if strategy.has_fp8 and not strategy.stores_fp8:
        linear = 8  # its weight is cast too, and in backward the operands of its gradient
    return (
        norm * (work.num_norms + work.num_head_norms)
        + (rotary + attention) * work.num_attentions
        + around * work.num_layers
        + linear * work.num_linears_used
        + count_adapter_kernels(strategy) * adapters.num_used
        + 20 * work.num_expert_layers
    )


def count_adapter_kernels(strategy: Strategy) -> int:
    """Kernels of one LoRA layer in a forward pass; another dtype needs three casts."""
    if strategy.fused_lora:
        return FUSED_LORA_KERNELS
    if strategy.compile:
        return 3
    return ADAPTER_KERNELS if strategy.adapter_dtype is not Dtype.FP32 else 7


def host_launch_seconds(
    kernels: float, adapters: AdapterSums, strategy: Strategy, rates: eff.DeviceRates
) -> tuple[float, float]:
    """Host time to launch the kernels of a forward pass, and of its backward pass."""
    measured = rates.measured
    each = count_adapter_kernels(strategy)
    beyond = eff.HOST_FUSED_LORA_KERNELS if strategy.fused_lora else eff.HOST_ADAPTER_KERNELS
    if (
        measured is None
        or measured.host_adapter_forward_seconds is None
        or measured.host_adapter_backward_seconds is None
    ):
        calls = kernels + beyond * adapters.num_used
        return calls * rates.host_forward_seconds, 2 * calls * rates.host_backward_seconds
    plain = kernels - each * adapters.num_used
    # Measured on peft's own forward without casts; its Python is the same with them.
    wider = (each + beyond) / (ADAPTER_KERNELS + eff.HOST_ADAPTER_KERNELS)
    times = wider * adapters.num_used
    forward = plain * rates.host_forward_seconds + times * measured.host_adapter_forward_seconds
    backward = 2 * plain * rates.host_backward_seconds
    return forward, max(0.0, backward + times * measured.host_adapter_backward_seconds)


class MicroBatch(NamedTuple):
    """One micro-batch as the formulas see it."""

    spec: ModelSpec
    strategy: Strategy
    work: Workload
    adapters: AdapterSums
    rates: eff.DeviceRates
    lengths: RowLengths
    is_cpu: bool = False
    has_grouped_products: bool = False
    """One kernel multiplies the rows of all experts."""

    @property
    def tokens(self) -> float:
        """Of one GPU: its slice, where rows are shared."""
        strategy = self.strategy
        return strategy.sequences_per_micro_batch * self.lengths.row / strategy.context_parallel

    @property
    def recomputed_fraction(self) -> float:
        """Share of recomputed layers; none where nothing is trained."""
        if not self.strategy.is_trained:
            return 0.0
        return self.strategy.count_recomputed(self.spec.num_layers) / self.spec.num_layers

    @property
    def adapter_dtype(self) -> Dtype:
        """fp32 adapters beside a 16-bit model multiply in fp32, except under autocast."""
        strategy = self.strategy
        return strategy.compute if strategy.is_autocast else strategy.adapter_dtype

    @property
    def head_chunks(self) -> float:
        """The fused loss reads the head once per chunk of tokens."""
        if self.strategy.loss is not Loss.FUSED:
            return 1.0
        width = self.strategy.loss_chunk_factor * self.work.hidden_size
        return min(ceil(self.work.vocab_size / width), max(1.0, self.tokens))


# Matrix products, by measured shapes or by sums of FLOPs and bytes


class MatmulSeconds(NamedTuple):
    """Forward products; gradients of inputs (always) and of weights (where trained)."""

    blocks: float
    blocks_inputs: float
    blocks_weights: float
    adapters: float
    adapters_backward: float
    head: float
    head_inputs: float
    head_weights: float


def estimate_matmul_seconds(batch: MicroBatch) -> MatmulSeconds:
    """All products of one micro-batch.

    With measured rates each matrix is looked up by its shape; otherwise FLOPs and bytes are summed
    and divided by the sustained rates. fp8 covers the blocks' products and gradients.
    """
    table = find_matmul_table(batch.rates.measured, batch.strategy.compute)
    if table is not None:
        return _by_shape(batch, table)
    work, tokens = batch.work, batch.tokens

    def by_sums(num_weights: float, *, read: float, values: float) -> float:
        """`read` weights and `values` (inputs and outputs) each pass through memory once."""
        num_bytes = batch.strategy.compute.value_bytes * (read + values)
        return eff.matmul_seconds(
            batch.rates, flops=2.0 * tokens * num_weights, num_bytes=num_bytes
        )

    blocks = by_sums(
        work.weights_used,
        read=min(work.weights_held, work.weights_used * tokens),
        values=tokens * (work.inputs_used + work.outputs_used),
    )
    head = by_sums(
        work.head_weights,
        read=batch.head_chunks * work.head_weights,
        values=tokens * (work.hidden_size + work.vocab_size),
    )
    adapters = _adapters_by_sums(batch)
    return MatmulSeconds(
        blocks=_in_fp8(batch, blocks) if batch.strategy.fp8 else blocks,
        blocks_inputs=_in_fp8(batch, blocks),
        blocks_weights=_in_fp8(batch, blocks),
        adapters=adapters,
        adapters_backward=2.0 * adapters,
        head=head,
        head_inputs=head,
        head_weights=head,
    )


def _in_fp8(batch: MicroBatch, seconds: float) -> float:
    """The blocks' products, those of modules in fp8 if the strategy has it."""
    if not batch.strategy.has_fp8:
        return seconds
    work, tokens = batch.work, batch.tokens
    share = work.module_weights / max(1, work.weights_held)
    num_bytes = min(work.weights_held, work.weights_used * tokens)
    num_bytes += tokens * (work.inputs_used + 2 * work.outputs_used)
    fp8 = 2.0 * tokens * work.weights_used / batch.rates.fp8_flops_per_second
    fp8 += num_bytes / batch.rates.stream_bytes_per_second
    return share * fp8 + (1 - share) * seconds


def _adapters_by_sums(batch: MicroBatch) -> float:
    flops = estimate_adapter_flops(batch.spec, batch.strategy, tokens=batch.tokens)
    return flops / batch.rates.adapter_flops_per_second


def _by_shape(batch: MicroBatch, table: MatmulTable) -> MatmulSeconds:
    forward = inputs = weights = 0.0
    measured, strategy = batch.rates.measured, batch.strategy
    fp8 = find_fp8_matmul_table(measured) if strategy.fp8 else None
    back = find_fp8_matmul_table(measured, is_exact=True) if strategy.has_fp8 else None
    for block in batch.spec.blocks:
        for part in block.linears:
            m, count = _spread(part, batch.tokens)
            count *= block.num_layers
            n, k = part.out_features, part.in_features
            is_wide = not part.is_module
            there = table if is_wide or fp8 is None else fp8
            again = table if is_wide or back is None else back
            forward += count * there.seconds(m, n, k)
            inputs += count * again.seconds(m, k, n)
            weights += count * again.seconds(n, k, m)
    chunks = batch.head_chunks
    m, n, k = batch.tokens / chunks, batch.work.vocab_size, batch.work.hidden_size
    adapters, adapters_backward = _adapters_by_shape(batch)
    return MatmulSeconds(
        blocks=_in_fp8(batch, forward) if strategy.fp8 and fp8 is None else forward,
        blocks_inputs=inputs if back is not None else _in_fp8(batch, inputs),
        blocks_weights=weights if back is not None else _in_fp8(batch, weights),
        adapters=adapters,
        adapters_backward=adapters_backward,
        head=chunks * table.seconds(m, n, k),
        head_inputs=chunks * table.seconds(m, k, n),
        head_weights=chunks * table.seconds(n, k, m),
    )


def _spread(part: Linear, tokens: float) -> tuple[float, float]:
    """Tokens per used copy of a matrix (expert), and the number of used copies."""
    used = min(float(part.copies), tokens * part.copies_per_token)
    return max(1.0, tokens * part.copies_per_token / used), used


def _adapters_by_shape(batch: MicroBatch) -> tuple[float, float]:
    """LoRA's thin products forward and backward, less the traffic counted elsewhere."""
    table = find_matmul_table(batch.rates.measured, batch.adapter_dtype)
    by_sums = _adapters_by_sums(batch)
    if table is None or not batch.adapters.num_used:
        return by_sums, 2.0 * by_sums
    forward = backward = 0.0
    for block in batch.spec.blocks:
        there, back = _multiply_thin(batch, block, table)
        forward += block.num_layers * there
        backward += block.num_layers * back
    adapters = batch.adapters
    widths = adapters.inputs_used - adapters.inputs_saved + adapters.outputs_used
    per_value = batch.adapter_dtype.value_bytes / batch.rates.elementwise_bytes_per_second
    # `adapter_bytes_per_token` has each input and output once forward, and twice backward.
    counted = batch.tokens * widths * per_value
    forward -= counted - batch.tokens * adapters.outputs_saved * per_value
    return max(forward, by_sums), max(backward - 2.0 * counted, 2.0 * by_sums)


def _multiply_thin(batch: MicroBatch, block: Block, table: MatmulTable) -> tuple[float, float]:
    """One layer's thin products, forward and backward; fused projections share their input."""
    rank, forward, backward = batch.strategy.lora_rank, 0.0, 0.0
    inputs: list[tuple[float, float, int, int]] = [
        (1.0, batch.tokens, rank * len(group), group[0].in_features)
        for _, group in find_fused_projections(batch.spec, block, batch.strategy)
    ]
    for part in block.linears:
        if not is_lora_target(part, batch.strategy.lora_targets):
            continue
        m, count = _spread(part, batch.tokens)
        n = part.out_features
        backward += count * (table.seconds(m, rank, n) + table.seconds(n, rank, m))
        if not has_augmented_weight(batch.spec, part, batch.strategy):
            forward += count * table.seconds(m, n, rank)
            inputs.append((count, m, rank, part.in_features))
    for count, m, width, k in inputs:
        forward += count * table.seconds(m, width, k)
        backward += count * (table.seconds(m, k, width) + table.seconds(width, k, m))
    return forward, backward


# Forward and backward passes


class PassSeconds(NamedTuple):
    """Device seconds of one pass over one micro-batch, by cause."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    dequantize: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory_bound + self.dequantize

    def plus(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(*(one + two for one, two in zip(self, other, strict=True)))

    def times(self, count: int) -> PassSeconds:
        return PassSeconds(*(count * one for one in self))


class Passes(NamedTuple):
    """Passes over one micro-batch."""

    blocks: PassSeconds
    """Forward."""
    head: PassSeconds
    """Forward, with the loss's traffic of both passes, and the logits that its backward pass
    computes again."""
    backward: PassSeconds
    """Of both, without recomputation."""
    forward_only: PassSeconds
    """All forward passes without gradients."""
    reference: PassSeconds
    """One forward pass of the reference: the head's, and the blocks' without adapters."""


def time_passes(job: MicroBatch) -> Passes:
    """The passes of one micro-batch, and one of its objective's reference."""
    products, strategy = estimate_matmul_seconds(job), job.strategy
    blocks = _time_blocks(job, products.blocks + products.adapters, backward=False)
    # The loss's backward traffic is counted here too.
    loss_bytes = job.tokens * traffic.loss_bytes_per_token(job.work, strategy)
    again = products.head if recomputes_logits(strategy) else 0.0
    head = PassSeconds(
        matmul=products.head + again, memory_bound=loss_bytes / job.rates.loss_bytes_per_second
    )
    backward = PassSeconds()
    if strategy.is_trained:
        # Gradients of inputs always; of weights where they are trained.
        is_full = strategy.method is Method.FULL
        matmul = products.blocks_inputs + products.head_inputs + products.adapters_backward
        if is_full:
            matmul += products.blocks_weights
        if strategy.trains_head:
            matmul += products.head_weights
        backward = _time_blocks(job, matmul, backward=True)
    reference, forward_only = _time_forward_only(job, products, blocks)
    # Products slow down to the clock that the power limit allows; unfused attention is
    # memory-bound and keeps its time. Leaves out the update, which also lets the clock recover.
    passes = (
        (blocks, 1.0 + job.recomputed_fraction),
        (head, 1.0),
        (backward, 1.0),
        (forward_only, 1.0),
        (reference, 0.0),
    )
    is_fused = find_unfused_attention(job.spec, strategy, is_cpu=job.is_cpu) is None
    in_products = sum(n * (one.matmul + one.attention * is_fused) for one, n in passes)
    share = in_products / max(sum(n * one.total for one, n in passes), 1e-12)
    times = eff.product_slowdown(job.rates.measured, share=share)
    return Passes(
        *(
            one._replace(
                matmul=times * one.matmul, attention=(times if is_fused else 1.0) * one.attention
            )
            for one, _ in passes
        )
    )


def _time_forward_only(
    job: MicroBatch, products: MatmulSeconds, blocks: PassSeconds
) -> tuple[PassSeconds, PassSeconds]:
    """One pass of the reference, and all passes without gradients of a micro-batch."""
    if job.strategy.objective is Objective.SFT:
        return PassSeconds(), PassSeconds()
    num_bytes = job.tokens * job.work.vocab_size * traffic.LOG_PROB_BYTES
    head = PassSeconds(
        matmul=products.head, memory_bound=num_bytes / job.rates.loss_bytes_per_second
    )
    base = job._replace(adapters=NO_ADAPTERS)
    if job.strategy.dora:
        base = base._replace(strategy=job.strategy.model_copy(update={"dora": False}))
    reference = _time_blocks(base, products.blocks, backward=False).plus(head)
    with_adapters, without = count_forward_only_passes(job.strategy)
    forward_only = blocks.plus(head).times(with_adapters).plus(reference.times(without))
    return reference, forward_only


def _time_blocks(job: MicroBatch, matmul: float, *, backward: bool) -> PassSeconds:
    attention, scores = _attention(job, backward=backward)
    return PassSeconds(
        matmul=matmul,
        attention=attention,
        memory_bound=(scores + _moved_bytes(job, backward=backward))
        / job.rates.elementwise_bytes_per_second,
        dequantize=traffic.dequantize_seconds(
            job.work, job.rates, job.strategy, tokens=job.tokens, backward=backward
        ),
    )


def _moved_bytes(job: MicroBatch, *, backward: bool) -> float:
    """Bytes of memory-bound kernels: norms, rotations, activations, adapters, casts."""
    strategy = job.strategy
    between = traffic.elementwise_bytes_per_token(job.work, strategy, spec=job.spec)
    adapters = traffic.adapter_bytes_per_token(job.adapters, strategy, backward=backward)
    casts = 0.0
    if strategy.weights is Dtype.FP32 and strategy.compute is not Dtype.FP32:
        # Autocast makes a 16-bit copy of fp32 weights in each pass; sharding casts only the shard.
        shards = strategy.num_shards if strategy.sharding.shards_weights else 1
        casts = 6.0 * job.work.weights_held / shards
    times = traffic.ELEMENTWISE_BACKWARD if backward else 1.0
    moved = times * (job.tokens * between + casts) + job.tokens * adapters
    moved += traffic.fp8_bytes(
        job.work, strategy, spec=job.spec, tokens=job.tokens, backward=backward
    )
    if not backward:
        moved += traffic.dora_bytes(job.spec, strategy)
    if not job.has_grouped_products and strategy.weights is not Dtype.GPTQ4:
        moved += traffic.EXPERT_LAYOUT_BYTES * job.work.expert_weights_held * strategy.mlp_tiles
    return moved


def _attention(job: MicroBatch, *, backward: bool) -> tuple[float, float]:
    """Seconds inside attention kernels, and bytes of scores that eager attention moves."""
    measured = _measured_scores(job, backward=backward)
    if measured is not None:
        return measured, 0.0
    pairs, masked_pairs = _count_pairs(job)
    flops_per_pair = 4.0 * job.spec.num_heads * job.spec.head_dim
    if job.strategy.attention.record.stores_scores:
        times = 2.0 if backward else 1.0
        pairs = times * (pairs + masked_pairs)
        scores = traffic.EAGER_PAIR_BYTES * pairs * job.spec.num_heads
        return flops_per_pair * pairs / job.rates.matmul_flops_per_second, scores
    seconds = sum(
        eff.attention_seconds(
            job.rates,
            flops=flops_per_pair * count,
            seq_len=job.lengths.context,
            backward=backward,
            is_masked=is_masked,
        )
        for count, is_masked in ((pairs, False), (masked_pairs, True))
    )
    return seconds, 0.0


def _count_pairs(job: MicroBatch) -> tuple[float, float]:
    """(query, key) pairs of layers without and with an explicit mask.

    Padded rows have a mask only by a quirk, which counts where its kernel was measured.
    """
    length = job.lengths.context
    found = [0.0, 0.0]
    has_mask = has_padding_mask(job.strategy) and job.rates.masked_attention is not None
    for group in job.work.attention:
        skips = not has_mask and skips_masked_pairs(
            job.strategy.attention, window=group.window, seq_len=length
        )
        pairs = count_pairs(length, causal=group.causal and skips, window=group.window)
        found[not skips] += group.num_layers * pairs
    # Documents packed into one row attend among themselves.
    times = job.tokens / length
    return times * found[0], times * found[1]


def _measured_scores(job: MicroBatch, *, backward: bool) -> float | None:
    """Seconds of unfused attention, where it was measured."""
    measured = {} if job.rates.measured is None else job.rates.measured.score_seconds
    kernel = find_unfused_attention(job.spec, job.strategy, is_cpu=job.is_cpu)
    if kernel is None or kernel not in measured:
        return None
    # Measured in 16 bit on a GPU, in fp32 on a CPU.
    wider = job.strategy.compute.value_bytes / (4 if job.is_cpu else 2)
    num_layers = sum(group.num_layers for group in job.work.attention)
    scores = num_layers * job.spec.num_heads * job.tokens * job.lengths.context
    return measured[kernel][backward] * max(1.0, wider) * scores


# Compiling, before the first step

COMPILE_LAYER_SECONDS = 9.0
"""torch.compile of one kind of layer, forward and backward. First steps on one H200, torch 2.11:
8 s on Llama-2-7B, 10 on BLOOM-1b7, 14 on Falcon-7B and Qwen3-30B-A3B."""
COMPILE_FLEX_SECONDS = 14.0
"""Flex attention with one kind of mask, compiled by itself: of two kinds 23 s on gpt-oss-20b and 41
on Gemma 2 2B, likewise."""
COMPILE_FLEX_INSIDE_SECONDS = 6.0
"""The same as a part of a compiled layer: 15 s in all on Mistral-7B, of two kinds 26 and 31 on
gpt-oss-20b and Gemma 2 2B."""


def estimate_compile_seconds(
    strategy: Strategy, work: Workload, *, num_blocks: int, has_profile: bool
) -> float:
    """What compiling adds to the first steps, with nothing in the cache.

    Rows of different lengths compile twice: for the first length, then for any.
    """
    flex = strategy.attention is Attention.FLEX
    masks = max(1, len(work.attention))
    seconds = COMPILE_LAYER_SECONDS * max(num_blocks, masks) * strategy.compile
    each = COMPILE_FLEX_INSIDE_SECONDS if strategy.compile else COMPILE_FLEX_SECONDS
    seconds += each * masks * flex
    return seconds * (2 if has_profile and not strategy.packing else 1)


# The optimizer step

LOW_FACTOR = 0.85
HIGH_FACTOR = 1.45
"""Range of the prediction: 89% of published runs took between these factors times it;
slow hosts, old kernels and memory pressure stretch the upper side (docs/formulas.md)."""
FAST_HOST_SAVING = 0.35
"""Of the launch time, on a fast host: `HOST_FORWARD_SECONDS` lies between two machines, the faster
of which took a third less. Nothing where a calibration measured the host."""


def estimate_step_time(
    *,
    spec: ModelSpec,
    strategy: Strategy,
    node: Node,
    network_bytes_per_second: float | None = None,
    profile: DataProfile | None = None,
    num_trainable: int,
) -> StepTime:
    """One optimizer step: `grad_accum` micro-batches on every rank, then the update.

    Device time is the sum of matmuls, attention, memory-bound kernels and
    unpacking; launches are added where the host cannot keep the device busy;
    transfers where compute does not hide them. With a profile, batches have
    their real mean length instead of `seq_len`.
    Leaves out: data loading, evaluation, checkpoints, the first steps, stragglers.
    """
    strategy = as_loaded(spec, strategy)
    job = _describe_micro_batch(spec, strategy, node, profile)
    passes = time_passes(job)
    blocks, head, backward, forward_only, reference = passes
    learning = (blocks, head, backward)
    repeated = job.recomputed_fraction * blocks.total
    # Of one micro-batch: transfers overlap with them.
    forward_seconds, backward_seconds = blocks.total + head.total, backward.total + repeated
    launch = _launch_seconds(job, forward=forward_seconds, backward=backward_seconds)
    num_forward_only = sum(count_forward_only_passes(strategy))
    launch += num_forward_only * _launch_forward_only_seconds(job, reference)
    times = strategy.grad_accum
    parts = {
        "matmul": times * sum(p.matmul for p in learning),
        "attention": times * sum(p.attention for p in learning),
        "memory_bound": times * sum(p.memory_bound for p in learning),
        "recompute": times * repeated,
        "dequantize": times * sum(p.dequantize for p in learning),
        "reference": times * forward_only.total,
        "launch": times * launch,
        "hooks": times * _hook_seconds(job),
        "optimizer": _optimizer_seconds(job, num_trainable),
    }
    links = comms.find_links(node, network_bytes_per_second=network_bytes_per_second)
    payload = _payload(job, num_trainable)
    before = reference.total + _launch_forward_only_seconds(job, reference)
    for name, transfers in (
        ("communication", comms.estimate_transfers(strategy, links, payload)),
        ("offload", comms.estimate_offload(strategy, links, payload)),
    ):
        ahead = comms.exposed_seconds(transfers.forward, compute=forward_seconds)
        behind = comms.exposed_seconds(transfers.backward, compute=backward_seconds)
        last = comms.exposed_seconds(transfers.last_backward, compute=backward_seconds)
        for_reference = comms.exposed_seconds(transfers.forward, compute=reference.total)
        parts[name] = times * (ahead + behind + num_forward_only * for_reference)
        parts[name] += last + transfers.update
        before += for_reference
    exchanged = comms.count_exchanged_bytes(
        spec, strategy, tokens=job.tokens, num_passes=_count_passes(job)
    )
    parts["communication"] += times * comms.exchange_seconds(strategy, links, exchanged)
    seconds = sum(parts.values())
    measured = node.gpu.measured
    is_host_measured = measured is not None and measured.host_forward_seconds is not None
    fast_host = 0.0 if is_host_measured else FAST_HOST_SAVING * parts["launch"]
    flops = estimate_step_flops(spec, strategy, seq_len=job.lengths.row).model
    peak = node.gpu.flops(strategy.compute) * strategy.world_size
    real_tokens, steps = float(strategy.tokens_per_step), None
    if profile is not None:
        rows = profile.num_packed_rows if strategy.packing else profile.num_rows
        per_step = strategy.examples_per_step
        real_tokens = min(1.0, per_step / rows) * profile.num_tokens
        steps = max(1, ceil(rows / per_step))
    return StepTime(
        seconds_per_step=seconds,
        seconds_per_step_low=LOW_FACTOR * (seconds - fast_host),
        seconds_per_step_high=HIGH_FACTOR * seconds,
        tokens_per_second=real_tokens / seconds,
        flops_per_step=flops,
        mfu_fraction=flops / seconds / peak,
        components=parts,
        exchanged_bytes=times * exchanged.num_bytes,
        seconds_per_epoch=None if steps is None else steps * seconds,
        steps_per_epoch=steps,
        reference_seconds_per_step=times * count_reference_passes(strategy) * before
        if strategy.precompute_reference
        else 0.0,
        compile_seconds=estimate_compile_seconds(
            strategy, job.work, num_blocks=len(spec.blocks), has_profile=profile is not None
        ),
    )


def _describe_micro_batch(
    spec: ModelSpec, strategy: Strategy, node: Node, profile: DataProfile | None
) -> MicroBatch:
    lengths = find_row_lengths(
        strategy,
        profile,
        skips_cross_document_pairs=eff.skips_cross_document_pairs(node.gpu, strategy),
    )
    stream = (
        strategy.sequences_per_micro_batch
        * (lengths.row / strategy.context_parallel)
        * spec.hidden_size
        * traffic.stream_value_bytes(strategy)
    )
    rates = eff.find_rates(
        node.gpu, strategy, head_dim=spec.head_dim, seq_len=lengths.sequence, tensor_bytes=stream
    )
    return MicroBatch(
        spec=spec,
        strategy=strategy,
        work=sum_workload(spec),
        adapters=sum_adapters(spec, strategy),
        rates=rates,
        lengths=lengths,
        is_cpu=node.gpu.is_cpu,
        has_grouped_products=_has_grouped_products(node.gpu, strategy),
    )


def _has_grouped_products(gpu: Gpu, strategy: Strategy) -> bool:
    """As `runtime/kernels/experts.py` chooses."""
    capability = gpu.compute_capability or (8, 0)
    is_able = capability >= (8, 0) and not gpu.is_cpu
    return is_able and strategy.compute is Dtype.BF16 and not strategy.quirks.plain_modelling


def _launch_seconds(job: MicroBatch, *, forward: float, backward: float) -> float:
    """Gaps between kernels, and idle time where the host launches more slowly than kernels run."""
    strategy, work = job.strategy, job.work
    kernels = count_forward_kernels(work, job.adapters, strategy, is_rms_norm=job.spec.is_rms_norm)
    rates, again = job.rates, job.recomputed_fraction
    launched, host = host_launch_seconds(kernels, job.adapters, strategy, rates)
    host += again * (launched + work.num_layers * rates.host_checkpoint_seconds)
    if job.is_cpu:  # launches do not overlap with compute
        return launched + host * strategy.is_trained
    waited = max(kernels * rates.kernel_gap_seconds, launched - forward)
    if strategy.is_trained:
        gaps = (2 + again) * kernels
        waited += max(gaps * rates.kernel_gap_seconds, host - backward)
    return waited


def _launch_forward_only_seconds(job: MicroBatch, reference: PassSeconds) -> float:
    """The same of one forward pass without gradients or adapters."""
    if job.strategy.objective is Objective.SFT:
        return 0.0
    is_rms_norm, rates = job.spec.is_rms_norm, job.rates
    kernels = count_forward_kernels(job.work, NO_ADAPTERS, job.strategy, is_rms_norm=is_rms_norm)
    launched, _ = host_launch_seconds(kernels, NO_ADAPTERS, job.strategy, rates)
    if job.is_cpu:
        return launched
    return max(kernels * rates.kernel_gap_seconds, launched - reference.total)


def _count_passes(job: MicroBatch) -> float:
    """Through the layers, of a micro-batch: forward, again where recomputed, and backward."""
    return 1.0 + (1.0 + job.recomputed_fraction) * job.strategy.is_trained


def _hook_seconds(job: MicroBatch) -> float:
    """DeepSpeed's Python around each module that ZeRO-3 gathers."""
    strategy, work = job.strategy, job.work
    if strategy.sharding is not Sharding.ZERO3 or job.is_cpu:
        return 0.0
    modules = work.num_linears_held + work.num_norms + 4 * work.num_layers
    passes = 1 + (1 + job.recomputed_fraction) * strategy.is_trained
    passes += sum(count_forward_only_passes(strategy))
    return modules * passes * eff.ZERO3_HOOK_SECONDS


def _optimizer_seconds(job: MicroBatch, num_trainable: int) -> float:
    """The update on the device, and the accumulation of gradients."""
    strategy = job.strategy
    if not strategy.is_trained:
        return 0.0
    shards = strategy.num_shards
    added = 3.0 * _gradient_value_bytes(strategy) * (strategy.grad_accum - 1)
    seconds = added / job.rates.stream_bytes_per_second
    seconds /= shards if strategy.sharding.shards_gradients else 1
    if not strategy.offload.moves_optimizer:
        seconds += traffic.optimizer_seconds_per_param(strategy, job.rates) / shards
    return seconds * num_trainable


def _gradient_value_bytes(strategy: Strategy) -> int:
    trained = strategy.weights if strategy.method is Method.FULL else strategy.adapter_dtype
    return 2 if trained.is_quantized else trained.value_bytes


def _payload(job: MicroBatch, num_trainable: int) -> comms.Payload:
    strategy = job.strategy
    if strategy.weights.is_quantized:
        packed = job.work.packed_weights(strategy)
        # Half a byte per 4-bit value, and its scales.
        weight_bytes = {Dtype.INT8: 1.0}.get(strategy.weights, 0.53) * packed
        weight_bytes += 2.0 * (job.work.num_params - packed)
    else:
        # Mixed precision casts the shard before it is gathered.
        value = min(strategy.weights.value_bytes, strategy.compute.value_bytes)
        weight_bytes = float(value * job.work.num_params)
    gradient = _gradient_value_bytes(strategy)
    return comms.Payload(
        weight_bytes=weight_bytes,
        gradient_bytes=float(gradient * num_trainable),
        updated_bytes=float(min(gradient, strategy.compute.value_bytes) * num_trainable),
        num_trainable=num_trainable,
        num_units=job.work.num_layers + 1,
        checkpoint_bytes=offloaded_bytes(job.spec, strategy)
        * job.tokens
        / strategy.tokens_per_micro_batch,
    )
