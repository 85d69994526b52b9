"""Device seconds of the passes over one micro-batch: FLOPs and bytes over sustained rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Method, Strategy
from tightfit.estimate import efficiency as eff
from tightfit.estimate import traffic
from tightfit.estimate.activations import find_score_kernel, is_given_mask
from tightfit.estimate.flops import Adapters, Workload, count_pairs, skips_masked_pairs
from tightfit.estimate.products import Batch, Products, estimate_products
from tightfit.estimate.row_lengths import RowLengths
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Device seconds of one pass over one micro-batch, by cause."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    dequantize: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory_bound + self.dequantize


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
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
        """Layers that are computed again, of all; none where nothing is trained."""
        if not self.strategy.is_trained:
            return 0.0
        return self.strategy.count_recomputed(self.spec.num_layers) / self.spec.num_layers


class Passes(NamedTuple):
    """One micro-batch: its decoder blocks and its head forward, and all of it backward."""

    blocks: Pass
    head: Pass
    backward: Pass


def time_passes(job: MicroBatch) -> Passes:
    """Blocks that are recomputed take theirs once more, which is not counted here."""
    products = estimate_products(_batch(job))
    blocks, head = _blocks_forward(job, products), _head_forward(job, products)
    backward = _backward(job, products) if job.strategy.is_trained else Pass()
    times = 1.0 + job.recomputed_fraction
    return Passes(*_slow_down(job, ((blocks, times), (head, 1.0), (backward, 1.0))))


def _slow_down(job: MicroBatch, passes: Sequence[tuple[Pass, float]]) -> list[Pass]:
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


def _batch(job: MicroBatch) -> Batch:
    return Batch(
        spec=job.spec,
        strategy=job.strategy,
        work=job.work,
        adapters=job.adapters,
        rates=job.rates,
        tokens=job.tokens,
    )


def _blocks_forward(job: MicroBatch, products: Products) -> Pass:
    attention, scores = _attention(job, backward=False)
    return Pass(
        matmul=products.blocks + products.adapters,
        attention=attention,
        memory_bound=(scores + _moved_bytes(job, backward=False))
        / job.rates.elementwise_bytes_per_second,
        dequantize=traffic.dequantize_seconds(
            job.work, job.rates, job.strategy.weights, tokens=job.tokens, backward=False
        ),
    )


def _moved_bytes(job: MicroBatch, *, backward: bool) -> float:
    """Bytes of kernels that only move data: norms, rotations, activations, adapters, casts."""
    strategy = job.strategy
    between = traffic.elementwise_bytes_per_token(job.work, strategy, spec=job.spec)
    adapters = traffic.adapter_bytes_per_token(job.adapters, strategy, backward=backward)
    times = traffic.ELEMENTWISE_BACKWARD if backward else 1.0
    moved = times * (job.tokens * between + _weight_cast_bytes(job)) + job.tokens * adapters
    moved += traffic.fp8_bytes(
        job.work, strategy, spec=job.spec, tokens=job.tokens, backward=backward
    )
    if not backward:
        moved += traffic.dora_bytes(job.spec, strategy)
    if strategy.weights is not Dtype.GPTQ4:  # only GPTQ packs experts, and runs them one by one
        moved += traffic.EXPERT_LAYOUT_BYTES * job.work.expert_weights_held
    return moved


def _weight_cast_bytes(job: MicroBatch) -> float:
    """Autocast makes a 16-bit copy of fp32 weights in each pass; sharding casts only the shard."""
    strategy = job.strategy
    if strategy.weights is not Dtype.FP32 or strategy.compute is Dtype.FP32:
        return 0.0
    return (
        6.0
        * job.work.weights_held
        / (strategy.num_shards if strategy.sharding.shards_weights else 1)
    )


def _attention(job: MicroBatch, *, backward: bool) -> tuple[float, float]:
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


def _count_pairs(job: MicroBatch) -> tuple[float, float]:
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


def _measured_scores(job: MicroBatch, *, backward: bool) -> float | None:
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


def _head_forward(job: MicroBatch, products: Products) -> Pass:
    """The head and the loss; the loss's backward traffic is counted here too."""
    return Pass(
        matmul=products.head,
        memory_bound=job.tokens
        * traffic.loss_bytes_per_token(job.work, job.strategy)
        / job.rates.loss_bytes_per_second,
    )


def _backward(job: MicroBatch, products: Products) -> Pass:
    """Gradients of inputs always; of weights where they are trained."""
    strategy = job.strategy
    is_full = strategy.method is Method.FULL
    matmul = products.blocks_inputs + products.head_inputs + products.adapters_backward
    if is_full:
        matmul += products.blocks_weights
    if is_full or strategy.train_embeddings:
        matmul += products.head_weights
    attention, scores = _attention(job, backward=True)
    return Pass(
        matmul=matmul,
        attention=attention,
        memory_bound=(scores + _moved_bytes(job, backward=True))
        / job.rates.elementwise_bytes_per_second,
        dequantize=traffic.dequantize_seconds(
            job.work, job.rates, strategy.weights, tokens=job.tokens, backward=True
        ),
    )
