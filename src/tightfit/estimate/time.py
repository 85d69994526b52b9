"""Seconds of one optimizer step: FLOPs, bytes, launches and transfers over sustained rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Method, Sharding, Strategy
from tightfit.core.workload import DataProfile
from tightfit.estimate import communication as comms
from tightfit.estimate import efficiency as eff
from tightfit.estimate import traffic
from tightfit.estimate.activations import find_score_kernel, is_given_mask
from tightfit.estimate.flops import (
    Adapters,
    Workload,
    count_pairs,
    estimate_step_flops,
    skips_masked_pairs,
    sum_adapters,
    sum_workload,
)
from tightfit.estimate.launches import count_forward_kernels, host_launch_seconds
from tightfit.estimate.products import Batch, Products, estimate_products
from tightfit.estimate.result import StepTime
from tightfit.estimate.row_lengths import RowLengths, find_row_lengths
from tightfit.estimate.weights import as_loaded
from tightfit.hardware.types import Node
from tightfit.models.spec import ModelSpec

LOW_FACTOR = 0.85
HIGH_FACTOR = 1.45
"""Range of the prediction. 89% of published runs took between these times the prediction;
slow hosts, old kernels and memory pressure stretch the upper side (docs/formulas.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Device seconds of one pass over one micro-batch, by cause."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    dequantize: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory_bound + self.dequantize


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One micro-batch as the formulas see it."""

    spec: ModelSpec
    strategy: Strategy
    work: Workload
    adapters: Adapters
    rates: eff.Rates
    lengths: RowLengths
    is_cpu: bool = False

    @property
    def tokens(self) -> float:
        return self.strategy.micro_batch * self.lengths.row

    @property
    def recomputed_fraction(self) -> float:
        """Layers that are computed again, of all."""
        return self.strategy.count_recomputed(self.spec.num_layers) / self.spec.num_layers


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
    job = _describe_job(spec, strategy, node, profile)
    parts = _compute_parts(job)
    links = comms.find_links(node, network_bytes_per_second=network_bytes_per_second)
    payload = _payload(job, num_trainable)
    parts["optimizer"] = _optimizer_seconds(job, num_trainable)
    forward = parts.pop("forward")
    backward = parts.pop("backward")
    for name, transfers in (
        ("communication", comms.estimate_transfers(strategy, links, payload)),
        ("offload", comms.estimate_offload(strategy, links, payload)),
    ):
        parts[name] = _exposed(transfers, strategy, forward=forward, backward=backward)
    seconds = sum(parts.values())
    flops = estimate_step_flops(spec, strategy, seq_len=job.lengths.row).model
    peak = node.gpu.flops(strategy.compute) * strategy.world_size
    rows, steps = _rows_and_steps(strategy, profile)
    real_tokens = strategy.tokens_per_step if profile is None else rows * profile.num_tokens
    return StepTime(
        seconds_per_step=seconds,
        seconds_per_step_low=LOW_FACTOR * seconds,
        seconds_per_step_high=HIGH_FACTOR * seconds,
        tokens_per_second=real_tokens / seconds,
        flops_per_step=flops,
        mfu_fraction=flops / seconds / peak,
        components=parts,
        seconds_per_epoch=None if steps is None else steps * seconds,
        steps_per_epoch=steps,
    )


def _rows_and_steps(strategy: Strategy, profile: DataProfile | None) -> tuple[float, int | None]:
    """Share of the data set that one step reads, and steps to read it all."""
    if profile is None:
        return 0.0, None
    rows = profile.num_packed_rows if strategy.packing else profile.num_rows
    per_step = strategy.micro_batch * strategy.grad_accum * strategy.world_size
    return min(1.0, per_step / rows), max(1, ceil(rows / per_step))


def _describe_job(
    spec: ModelSpec, strategy: Strategy, node: Node, profile: DataProfile | None
) -> _Job:
    lengths = find_row_lengths(
        strategy, profile, keeps_documents_apart=eff.keeps_documents_apart(node.gpu, strategy)
    )
    stream = (
        strategy.micro_batch * lengths.row * spec.hidden_size * traffic.stream_value_bytes(strategy)
    )
    rates = eff.find_rates(
        node.gpu, strategy, head_dim=spec.head_dim, seq_len=lengths.sequence, tensor_bytes=stream
    )
    return _Job(
        spec=spec,
        strategy=strategy,
        work=sum_workload(spec),
        adapters=sum_adapters(spec, strategy),
        rates=rates,
        lengths=lengths,
        is_cpu=node.gpu.is_cpu,
    )


def _compute_parts(job: _Job) -> dict[str, float]:
    """Seconds of all micro-batches by cause, and of one forward and backward pass for overlap."""
    strategy = job.strategy
    products = estimate_products(_batch(job))
    blocks, head = _blocks_forward(job, products), _head_forward(job, products)
    backward, again = _Pass(), 0.0
    if strategy.is_trained:
        backward, again = _backward(job, products), job.recomputed_fraction
    blocks, head, backward = _slow_down(job, ((blocks, 1.0 + again), (head, 1.0), (backward, 1.0)))
    repeated = again * blocks.total
    forward_seconds, backward_seconds = blocks.total + head.total, backward.total + repeated
    launch = _launch_seconds(job, forward=forward_seconds, backward=backward_seconds)
    passes = (blocks, head, backward)
    times = strategy.grad_accum
    return {
        "matmul": times * sum(p.matmul for p in passes),
        "attention": times * sum(p.attention for p in passes),
        "memory_bound": times * sum(p.memory_bound for p in passes),
        "recompute": times * repeated,
        "dequantize": times * sum(p.dequantize for p in passes),
        "launch": times * launch,
        "hooks": times * _hook_seconds(job),
        "forward": forward_seconds,
        "backward": backward_seconds,
    }


def _slow_down(job: _Job, passes: Sequence[tuple[_Pass, float]]) -> list[_Pass]:
    """Products at the clock that the power limit leaves; each pass is made so many times.

    Attention that writes its scores out moves memory for most of its time: it stays as it is.
    Leaves out the update, which lets the clock recover too.
    """
    is_fused = find_score_kernel(job.spec, job.strategy, is_cpu=job.is_cpu) is None
    products = sum(n * (one.matmul + one.attention * is_fused) for one, n in passes)
    share = products / max(sum(n * one.total for one, n in passes), 1e-12)
    times = eff.product_slowdown(job.rates.measured, share=share)
    return [
        replace(
            one, matmul=times * one.matmul, attention=(times if is_fused else 1.0) * one.attention
        )
        for one, _ in passes
    ]


def _batch(job: _Job) -> Batch:
    return Batch(
        spec=job.spec,
        strategy=job.strategy,
        work=job.work,
        adapters=job.adapters,
        rates=job.rates,
        tokens=job.tokens,
    )


def _blocks_forward(job: _Job, products: Products) -> _Pass:
    attention, scores = _attention(job, backward=False)
    return _Pass(
        matmul=products.blocks + products.adapters,
        attention=attention,
        memory_bound=(scores + _moved_bytes(job, backward=False))
        / job.rates.elementwise_bytes_per_second,
        dequantize=traffic.dequantize_seconds(
            job.work, job.rates, job.strategy.weights, tokens=job.tokens, backward=False
        ),
    )


def _moved_bytes(job: _Job, *, backward: bool) -> float:
    """Bytes of kernels that only move data: norms, rotations, activations, adapters, casts."""
    strategy = job.strategy
    between = traffic.elementwise_bytes_per_token(job.work, strategy, spec=job.spec)
    adapters = traffic.adapter_bytes_per_token(job.adapters, strategy, backward=backward)
    times = traffic.ELEMENTWISE_BACKWARD if backward else 1.0
    moved = times * (job.tokens * between + _weight_cast_bytes(job)) + job.tokens * adapters
    moved += traffic.fp8_bytes(job.work, strategy, tokens=job.tokens, backward=backward)
    if not backward:
        moved += traffic.dora_bytes(job.spec, strategy)
    if strategy.weights is not Dtype.GPTQ4:  # only GPTQ packs experts, and runs them one by one
        moved += traffic.EXPERT_LAYOUT_BYTES * job.work.expert_weights_held
    return moved


def _weight_cast_bytes(job: _Job) -> float:
    """Autocast makes a 16-bit copy of fp32 weights in each pass; sharding casts only the shard."""
    strategy = job.strategy
    if strategy.weights is not Dtype.FP32 or strategy.compute is Dtype.FP32:
        return 0.0
    return (
        6.0
        * job.work.weights_held
        / (strategy.num_shards if strategy.sharding.shards_weights else 1)
    )


def _attention(job: _Job, *, backward: bool) -> tuple[float, float]:
    """Seconds inside attention kernels, and bytes of scores that eager attention moves."""
    measured = _measured_scores(job, backward=backward)
    if measured is not None:
        return measured, 0.0
    pairs, masked_pairs = _count_pairs(job)
    flops_per_pair = 4.0 * job.spec.num_heads * job.spec.head_dim
    if job.strategy.attention is Attention.EAGER:
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


def _count_pairs(job: _Job) -> tuple[float, float]:
    """Of queries and keys in all layers, and those of layers that are given a mask as a matrix.

    Padded rows have one by a quirk alone; that counts where its kernel was measured.
    """
    length = job.lengths.context
    found = [0.0, 0.0]
    has_mask = is_given_mask(job.strategy) and job.rates.masked_attention is not None
    for group in job.work.attention:
        skips = not has_mask and skips_masked_pairs(
            job.strategy.attention, window=group.window, seq_len=length
        )
        pairs = count_pairs(length, causal=group.causal and skips, window=group.window)
        found[not skips] += group.num_layers * pairs
    # Documents packed into one row attend among themselves.
    times = job.tokens / length
    return times * found[0], times * found[1]


def _measured_scores(job: _Job, *, backward: bool) -> float | None:
    """Seconds of attention that writes its scores out, where that was measured."""
    told = {} if job.rates.measured is None else job.rates.measured.score_seconds
    kernel = find_score_kernel(job.spec, job.strategy, is_cpu=job.is_cpu)
    if kernel is None or kernel not in told:
        return None
    # Measured in 16 bit on a GPU, in fp32 on a CPU.
    wider = job.strategy.compute.value_bytes / (4 if job.is_cpu else 2)
    num_layers = sum(group.num_layers for group in job.work.attention)
    scores = num_layers * job.spec.num_heads * job.tokens * job.lengths.context
    return told[kernel][backward] * max(1.0, wider) * scores


def _head_forward(job: _Job, products: Products) -> _Pass:
    """The head and the loss; the loss's backward traffic is counted here too."""
    return _Pass(
        matmul=products.head,
        memory_bound=job.tokens
        * traffic.loss_bytes_per_token(job.work, job.strategy)
        / job.rates.loss_bytes_per_second,
    )


def _backward(job: _Job, products: Products) -> _Pass:
    """Gradients of inputs always; of weights where they are trained."""
    strategy = job.strategy
    is_full = strategy.method is Method.FULL
    matmul = products.blocks_inputs + products.head_inputs + products.adapters_backward
    if is_full:
        matmul += products.blocks_weights
    if is_full or strategy.train_embeddings:
        matmul += products.head_weights
    attention, scores = _attention(job, backward=True)
    return _Pass(
        matmul=matmul,
        attention=attention,
        memory_bound=(scores + _moved_bytes(job, backward=True))
        / job.rates.elementwise_bytes_per_second,
        dequantize=traffic.dequantize_seconds(
            job.work, job.rates, strategy.weights, tokens=job.tokens, backward=True
        ),
    )


def _launch_seconds(job: _Job, *, forward: float, backward: float) -> float:
    """Gaps between kernels, and the host's lag where it cannot launch as fast as kernels end."""
    strategy, work = job.strategy, job.work
    kernels = count_forward_kernels(work, job.adapters, strategy, is_rms_norm=job.spec.is_rms_norm)
    rates, again = job.rates, job.recomputed_fraction
    launched, host = host_launch_seconds(kernels, job.adapters, strategy, rates)
    host += again * (launched + work.num_layers * rates.host_checkpoint_seconds)
    if job.is_cpu:  # nothing runs beside the program that calls it
        return launched + host * strategy.is_trained
    waited = max(kernels * rates.kernel_gap_seconds, launched - forward)
    if strategy.is_trained:
        gaps = (2 + again) * kernels
        waited += max(gaps * rates.kernel_gap_seconds, host - backward)
    return waited


def _hook_seconds(job: _Job) -> float:
    """DeepSpeed's Python around each module that ZeRO-3 gathers."""
    strategy, work = job.strategy, job.work
    if strategy.sharding is not Sharding.ZERO3 or job.is_cpu:
        return 0.0
    modules = work.num_linears_held + work.num_norms + 4 * work.num_layers
    passes = 1 + (1 + job.recomputed_fraction) * strategy.is_trained
    return modules * passes * eff.ZERO3_HOOK_SECONDS


def _optimizer_seconds(job: _Job, num_trainable: int) -> float:
    """The update on the device, and adding up gradients of micro-batches."""
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


def _payload(job: _Job, num_trainable: int) -> comms.Payload:
    strategy = job.strategy
    if strategy.weights.is_quantized:
        packed = job.work.packed_weights(strategy.weights)
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
    )


def _exposed(
    transfers: comms.Transfers, strategy: Strategy, *, forward: float, backward: float
) -> float:
    """Seconds of a whole step that wait for transfers."""
    ahead = comms.exposed_seconds(transfers.forward, compute=forward)
    behind = comms.exposed_seconds(transfers.backward, compute=backward)
    last = comms.exposed_seconds(transfers.last_backward, compute=backward)
    return strategy.grad_accum * (ahead + behind) + last + transfers.update
