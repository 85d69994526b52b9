"""Seconds of the matrix products of one micro-batch: by measured shapes, or by sums over them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Loss, Strategy
from tightfit.estimate import efficiency as eff
from tightfit.estimate.flops import Adapters, Workload, estimate_adapter_flops
from tightfit.estimate.measured import MatmulTable, find_fp8_table, find_table
from tightfit.estimate.spare_columns import find_readers, is_spared
from tightfit.estimate.weights import is_target
from tightfit.models.spec import Block, Linear, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Forward; then the gradients of inputs, which always follow, and of weights that are
    trained."""

    blocks: float
    blocks_inputs: float
    blocks_weights: float
    adapters: float
    adapters_backward: float
    head: float
    head_inputs: float
    head_weights: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the products of one micro-batch depend on."""

    spec: ModelSpec
    strategy: Strategy
    work: Workload
    adapters: Adapters
    rates: eff.Rates
    tokens: float

    @property
    def adapter_dtype(self) -> Dtype:
        """Adapters in fp32 beside a 16-bit model that no autocast covers multiply in fp32."""
        strategy = self.strategy
        return strategy.compute if strategy.is_autocast else strategy.adapter_dtype

    @property
    def head_slices(self) -> float:
        """The fused loss reads the head once per slice of tokens."""
        if self.strategy.loss is not Loss.FUSED:
            return 1.0
        width = self.strategy.loss_slice_factor * self.work.hidden_size
        return min(ceil(self.work.vocab_size / width), max(1.0, self.tokens))


def estimate_products(batch: Batch) -> Products:
    """All products of one micro-batch.

    Where the device's own times are known, each matrix is looked up by its shape; else sums of
    FLOPs and bytes go by the sustained rates, the same in every direction. In fp8 are the blocks'
    results and gradients.
    """
    table = find_table(batch.rates.measured, batch.strategy.compute)
    if table is not None:
        return _by_shape(batch, table)
    blocks, head = _blocks_by_sums(batch), _head_by_sums(batch)
    adapters = _adapters_by_sums(batch)
    return Products(
        blocks=_in_fp8(batch, blocks) if batch.strategy.fp8 else blocks,
        blocks_inputs=_in_fp8(batch, blocks),
        blocks_weights=_in_fp8(batch, blocks),
        adapters=adapters,
        adapters_backward=2.0 * adapters,
        head=head,
        head_inputs=head,
        head_weights=head,
    )


def _blocks_by_sums(batch: Batch) -> float:
    work, tokens = batch.work, batch.tokens
    return _by_sums(
        batch,
        flops=2.0 * tokens * work.weights_used,
        weights=min(work.weights_held, work.weights_used * tokens),
        values=tokens * (work.inputs_used + work.outputs_used),
    )


def _in_fp8(batch: Batch, seconds: float) -> float:
    """The blocks' products, of which those of modules are in fp8 where that is asked for."""
    if not batch.strategy.has_fp8:
        return seconds
    work, tokens = batch.work, batch.tokens
    share = work.packed_weights(Dtype.INT8) / max(1, work.weights_held)
    num_bytes = min(work.weights_held, work.weights_used * tokens)
    num_bytes += tokens * (work.inputs_used + 2 * work.outputs_used)
    fp8 = 2.0 * tokens * work.weights_used / batch.rates.fp8_flops_per_second
    fp8 += num_bytes / batch.rates.stream_bytes_per_second
    return share * fp8 + (1 - share) * seconds


def _head_by_sums(batch: Batch) -> float:
    work, tokens = batch.work, batch.tokens
    return _by_sums(
        batch,
        flops=2.0 * tokens * work.head_weights,
        weights=batch.head_slices * work.head_weights,
        values=tokens * (work.hidden_size + work.vocab_size),
    )


def _by_sums(batch: Batch, *, flops: float, weights: float, values: float) -> float:
    """`weights` and `values` (inputs and outputs) each go through memory once."""
    num_bytes = batch.strategy.compute.value_bytes * (weights + values)
    return eff.matmul_seconds(batch.rates, flops=flops, num_bytes=num_bytes)


def _adapters_by_sums(batch: Batch) -> float:
    flops = estimate_adapter_flops(batch.spec, batch.strategy, tokens=batch.tokens)
    return flops / batch.rates.adapter_flops_per_second


def _by_shape(batch: Batch, table: MatmulTable) -> Products:
    forward = inputs = weights = 0.0
    measured, strategy = batch.rates.measured, batch.strategy
    fp8 = find_fp8_table(measured) if strategy.fp8 else None
    back = find_fp8_table(measured, is_exact=True) if strategy.has_fp8 else None
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
    slices = batch.head_slices
    m, n, k = batch.tokens / slices, batch.work.vocab_size, batch.work.hidden_size
    adapters, adapters_backward = _adapters_by_shape(batch)
    return Products(
        blocks=_in_fp8(batch, forward) if strategy.fp8 and fp8 is None else forward,
        blocks_inputs=inputs if back is not None else _in_fp8(batch, inputs),
        blocks_weights=weights if back is not None else _in_fp8(batch, weights),
        adapters=adapters,
        adapters_backward=adapters_backward,
        head=slices * table.seconds(m, n, k),
        head_inputs=slices * table.seconds(m, k, n),
        head_weights=slices * table.seconds(n, k, m),
    )


def _spread(part: Linear, tokens: float) -> tuple[float, float]:
    """Tokens that each used copy of a matrix sees, and how many copies that is."""
    used = min(float(part.copies), tokens * part.copies_per_token)
    return max(1.0, tokens * part.copies_per_token / used), used


def _adapters_by_shape(batch: Batch) -> tuple[float, float]:
    """LoRA's thin products forward and backward, less the traffic that is counted elsewhere."""
    table = find_table(batch.rates.measured, batch.adapter_dtype)
    by_sums = _adapters_by_sums(batch)
    if table is None or not batch.adapters.num_used:
        return by_sums, 2.0 * by_sums
    forward = backward = 0.0
    for block in batch.spec.blocks:
        there, back = _multiply_thin(batch, block, table)
        forward += block.num_layers * there
        backward += block.num_layers * back
    adapters = batch.adapters
    widths = adapters.inputs_used - adapters.inputs_spared + adapters.outputs_used
    per_value = batch.adapter_dtype.value_bytes / batch.rates.elementwise_bytes_per_second
    # `adapter_bytes_per_token` has each input and output once forward, and twice backward.
    counted = batch.tokens * widths * per_value
    forward -= counted - batch.tokens * adapters.outputs_spared * per_value
    return max(forward, by_sums), max(backward - 2.0 * counted, 2.0 * by_sums)


def _multiply_thin(batch: Batch, block: Block, table: MatmulTable) -> tuple[float, float]:
    """One layer's, forward and backward; readers of one norm go through their input together."""
    rank, forward, backward = batch.strategy.lora_rank, 0.0, 0.0
    inputs: list[tuple[float, float, int, int]] = [
        (1.0, batch.tokens, rank * len(readers), readers[0].in_features)
        for _, readers in find_readers(batch.spec, block, batch.strategy)
    ]
    for part in block.linears:
        if not is_target(part, batch.strategy.lora_targets):
            continue
        m, count = _spread(part, batch.tokens)
        n = part.out_features
        backward += count * (table.seconds(m, rank, n) + table.seconds(n, rank, m))
        if not is_spared(batch.spec, part, batch.strategy):
            forward += count * table.seconds(m, n, rank)
            inputs.append((count, m, rank, part.in_features))
    for count, m, width, k in inputs:
        forward += count * table.seconds(m, width, k)
        backward += count * (table.seconds(m, k, width) + table.seconds(width, k, m))
    return forward, backward
