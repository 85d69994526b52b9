"""Seconds of one optimizer step: FLOPs, bytes, launches and transfers over sustained rates."""

from __future__ import annotations

from math import ceil

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Sharding, Strategy
from tightfit.core.workload import DataProfile
from tightfit.estimate import communication as comms
from tightfit.estimate import efficiency as eff
from tightfit.estimate import traffic
from tightfit.estimate.flops import estimate_step_flops, sum_adapters, sum_workload
from tightfit.estimate.launches import count_forward_kernels, host_launch_seconds
from tightfit.estimate.passes import MicroBatch, time_passes
from tightfit.estimate.result import StepTime
from tightfit.estimate.row_lengths import find_row_lengths
from tightfit.estimate.weights import as_loaded
from tightfit.hardware.types import Node
from tightfit.models.spec import ModelSpec

LOW_FACTOR = 0.85
HIGH_FACTOR = 1.45
"""Range of the prediction. 89% of published runs took between these times the prediction;
slow hosts, old kernels and memory pressure stretch the upper side (docs/formulas.md)."""


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


def _describe_micro_batch(
    spec: ModelSpec, strategy: Strategy, node: Node, profile: DataProfile | None
) -> MicroBatch:
    lengths = find_row_lengths(
        strategy, profile, keeps_documents_apart=eff.keeps_documents_apart(node.gpu, strategy)
    )
    stream = (
        strategy.micro_batch * lengths.row * spec.hidden_size * traffic.stream_value_bytes(strategy)
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
    )


def _compute_parts(job: MicroBatch) -> dict[str, float]:
    """Seconds of all micro-batches by cause, and of one forward and backward pass for overlap."""
    strategy = job.strategy
    passes = time_passes(job)
    blocks, head, backward = passes
    repeated = job.recomputed_fraction * blocks.total
    forward_seconds, backward_seconds = blocks.total + head.total, backward.total + repeated
    launch = _launch_seconds(job, forward=forward_seconds, backward=backward_seconds)
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


def _launch_seconds(job: MicroBatch, *, forward: float, backward: float) -> float:
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


def _hook_seconds(job: MicroBatch) -> float:
    """DeepSpeed's Python around each module that ZeRO-3 gathers."""
    strategy, work = job.strategy, job.work
    if strategy.sharding is not Sharding.ZERO3 or job.is_cpu:
        return 0.0
    modules = work.num_linears_held + work.num_norms + 4 * work.num_layers
    passes = 1 + (1 + job.recomputed_fraction) * strategy.is_trained
    return modules * passes * eff.ZERO3_HOOK_SECONDS


def _optimizer_seconds(job: MicroBatch, num_trainable: int) -> float:
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


def _payload(job: MicroBatch, num_trainable: int) -> comms.Payload:
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
