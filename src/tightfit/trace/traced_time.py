"""Seconds of a traced step: the host issues operations, the device works through its queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.optimizers import EIGHT_BIT_SECONDS_PER_PARAM, Optimizer
from tightfit.core.strategy import Strategy
from tightfit.hardware import rates as eff
from tightfit.hardware.rates import bandwidth_at, find_fp8_matmul_table, find_matmul_table
from tightfit.hardware.types import FP8_EXACT, FP8_KINDS, Gpu
from tightfit.trace.result import (
    ADAPTER,
    ADDED_PRODUCT,
    AGAIN,
    ATTENTION,
    BACKWARD,
    COMMUNICATION,
    DEQUANTIZE,
    FORWARD,
    HOST,
    LOSS,
    MATMUL,
    MEMORY_BOUND,
    OPTIMIZER,
    RECOMPUTE,
    SHARD,
    STAGES,
    TRITON,
    Operation,
    OperationLog,
    RepeatedOperations,
    TracedTime,
)

VIEW_WEIGHT = 0.25
"""A view, relative to an operation that launches a kernel: most are made inside another call."""
TRITON_WEIGHT = 3.0
"""A triton launch, likewise: its arguments are inspected in Python."""
TENSOR_WEIGHT = 0.1
"""Each further tensor of a `_foreach` list, likewise."""
LIBRARY_WEIGHT = 3.0
"""Added to an operation whose kernel is registered in Python: checks, a device guard, ctypes."""
SHARD_WEIGHT = 70.0
"""FSDP2's Python around one collective: flattening, setting parameters, events. From five FSDP
jobs on one H200 whose collectives did nothing."""
LAYER_FORWARD_WEIGHT = 47.5
LAYER_BACKWARD_WEIGHT = 88.5
"""Sum of these weights over the decoder layer that `tightfit calibrate` times."""
ADAPTER_FORWARD_WEIGHT = 5.5
"""The same for a LoRA layer in the model's own dtype."""
ADAPTER_BACKWARD_WEIGHT = 6.5
"""The same backward, without the gradient of a frozen weight."""
LAYER_KERNELS = 35.0
"""Kernels that `estimate.step_time.count_forward_kernels` counts in that layer."""

_SDPA = "aten::_scaled_dot_product_"
_IN_PYTHON = ("bitsandbytes::", TRITON)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Host seconds per operation."""

    forward: float
    """Per operation called from Python."""
    backward: float
    """Per operation called by autograd's engine."""
    gap: float
    """Between two kernels on the device, with a full queue."""
    around: Mapping[str, float] = field(default_factory=dict)
    """Python that runs around some operations."""
    adapter_backward: float = 0.0
    """Time of autograd's engine for one LoRA layer beyond its operations."""

    def seconds(self, one: Operation) -> float:
        """Of one call."""
        weight = VIEW_WEIGHT if one.kind == HOST else one.num_calls
        if one.name == TRITON:
            weight = TRITON_WEIGHT
        weight += TENSOR_WEIGHT * (one.num_tensors - 1)
        is_engine = one.stage == BACKWARD
        if one.name.startswith(_IN_PYTHON):
            is_engine = False  # the engine calls Python, which calls these
            weight += LIBRARY_WEIGHT * (one.name != TRITON)
        each = self.backward if is_engine else self.forward
        return weight * each + self.around.get(one.around, 0.0)

    def with_adapters(self, log: OperationLog) -> HostCosts:
        """Spread the engine's extra time for LoRA layers over all its operations.

        The backward pass of fused LoRA is one call of its own, which includes that time.
        """
        times = log.count_calls()
        calls = [(one, one.count * count) for one, count in zip(log.operations, times, strict=True)]
        adapters = [(one.stage, count) for one, count in calls if one.around == ADAPTER]
        if any(stage == BACKWARD for stage, _ in adapters):
            return self
        num_adapters = sum(count for stage, count in adapters if stage == FORWARD)
        engine = sum(count * self.seconds(one) for one, count in calls if one.stage == BACKWARD)
        if not num_adapters or not engine:
            return self
        slower = 1.0 + num_adapters * self.adapter_backward / engine
        return replace(self, backward=slower * self.backward)


def find_host_costs(rates: eff.DeviceRates) -> HostCosts:
    """From seconds per kernel as the closed form counts them, measured or assumed."""
    forward = rates.host_forward_seconds * LAYER_KERNELS / LAYER_FORWARD_WEIGHT
    backward = 2 * rates.host_backward_seconds * LAYER_KERNELS / LAYER_BACKWARD_WEIGHT
    adapter, adapter_backward = eff.HOST_ADAPTER_KERNELS * rates.host_forward_seconds, 0.0
    measured = rates.measured
    if measured is not None and measured.host_adapter_forward_seconds is not None:
        beyond = measured.host_adapter_forward_seconds - ADAPTER_FORWARD_WEIGHT * forward
        adapter = max(0.0, beyond)
    if measured is not None and measured.host_adapter_backward_seconds is not None:
        beyond = measured.host_adapter_backward_seconds - ADAPTER_BACKWARD_WEIGHT * backward
        adapter_backward = max(0.0, beyond)
    return HostCosts(
        forward=forward,
        backward=backward,
        adapter_backward=adapter_backward,
        gap=rates.kernel_gap_seconds,
        around={
            ADAPTER: adapter,
            AGAIN: rates.host_checkpoint_seconds,
            SHARD: SHARD_WEIGHT * forward,
        },
    )


# The step: the host fills a queue, the device works through it

LAUNCH = "launch"
"""Gaps between kernels, and time in which the device waits for its host."""
UNALIGNED_SLOWDOWN = 6.0
"""Of 16-bit products with unaligned rows: 97 to 137e12 instead of 730e12 FLOP/s for the vocabulary
of 50,257 of gpt2-xl on an H200."""


class Reduction(NamedTuple):
    """A kernel that reduces values of many threads."""

    passes: float
    """Time relative to a kernel that only moves the same bytes."""
    seconds: float
    """Least time, however small the tensor."""


REDUCTIONS = {
    "aten::sum.dim_IntList": Reduction(1.0, 11e-6),
    "aten::mean.dim": Reduction(1.0, 5e-6),
    "aten::native_layer_norm": Reduction(1.4, 5e-6),
    "aten::native_layer_norm_backward": Reduction(1.4, 20e-6),
    "aten::_softmax": Reduction(1.35, 0.0),
    "aten::_log_softmax": Reduction(1.35, 0.0),
}
"""On an H200: h200_kernels.json for the first three, profiles of gpt2-xl, bloom and falcon for the
others."""
SAME_SECONDS = 1e-10
"""Far below anything measured, and above the rounding of sums."""
CAUSAL_FRACTION = 0.5
"""Pairs that a causal mask leaves, of all."""


def estimate_traced_time(
    log: OperationLog, gpu: Gpu, strategy: Strategy, *, host: HostCosts | None = None
) -> TracedTime:
    """Simulate the step: the host issues each operation, the device runs them in order.

    The host runs ahead of the device unless it must read a value; a GPU idles while its queue is
    empty. A CPU does both itself. `host` is the device's own host unless given.
    Leaves out: collectives, which run beside all this; copies that other streams hide.
    """
    seconds = DeviceSeconds(gpu, strategy)
    host = (host or find_host_costs(seconds.rates)).with_adapters(log)
    costs = [
        _Cost(
            work=one.count * seconds.of(one),
            gaps=0.0 if gpu.is_cpu else one.count * host.gap * one.num_kernels,
            host=one.count * host.seconds(one),
        )
        for one in log.operations
    ]
    times = log.count_calls()
    costs = _slow_down(log, costs, times, gpu)
    simulation = _QueueSimulation(operations=log.operations, costs=costs, is_cpu=gpu.is_cpu)
    for run in log.stretches:
        simulation.repeat(run)
    causes: dict[str, float] = {}
    for one, cost, count in zip(log.operations, costs, times, strict=True):
        causes[_cause(one)] = causes.get(_cause(one), 0.0) + count * cost.work
    return TracedTime(
        seconds_per_step=simulation.end,
        stages=simulation.stages,
        components={**causes, LAUNCH: max(0.0, simulation.end - sum(causes.values()))},
        host_seconds=sum(n * cost.host for n, cost in zip(times, costs, strict=True)),
        device_seconds=sum(
            n * (cost.work + cost.gaps) for n, cost in zip(times, costs, strict=True)
        ),
        flops=log.sum_flops(),
    )


def _slow_down(
    log: OperationLog, costs: list[_Cost], times: Sequence[int], gpu: Gpu
) -> list[_Cost]:
    """Slow products down to the clock that the GPU's power limit allows."""
    is_product = [one.kind in (MATMUL, ATTENTION) for one in log.operations]
    works = [count * cost.work for count, cost in zip(times, costs, strict=True)]
    share = sum(compress(works, is_product)) / max(sum(works), 1e-12)
    slower = eff.product_slowdown(gpu.measured, share=share)
    return [
        cost._replace(work=cost.work * slower) if hot else cost
        for cost, hot in zip(costs, is_product, strict=True)
    ]


class _Cost(NamedTuple):
    """Seconds of an operation, summed over its calls."""

    work: float
    gaps: float
    host: float


@dataclass(slots=True, kw_only=True)
class _QueueSimulation:
    """When the host is free, when the device will have done all, and the stages' shares of it."""

    operations: Sequence[Operation]
    costs: Sequence[_Cost]
    is_cpu: bool
    host: float = 0.0
    device: float = 0.0
    end: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def repeat(self, run: RepeatedOperations) -> None:
        """Simulate identical layers until two in a row take the same time, then add the rest.

        The further the host is ahead, the less the device waits for it, so the time per layer
        stays the same unless the host falls behind.
        """
        before: list[float] = []
        for done in range(1, run.count + 1):
            start, lead = self._read(), self.device - self.host
            for place in run.operations:
                self._run(self.operations[place], self.costs[place])
            taken = [after - at for after, at in zip(self._read(), start, strict=True)]
            is_same = bool(before) and all(
                abs(a - b) < SAME_SECONDS for a, b in zip(taken, before, strict=True)
            )
            if is_same and self.device - self.host >= lead - SAME_SECONDS:
                host, device, end, *stages = ((run.count - done) * each for each in taken)
                self.host, self.device = self.host + host, self.device + device
                self.end += end
                for name, each in zip(self.stages, stages, strict=True):
                    self.stages[name] += each
                return
            before = taken

    def _read(self) -> list[float]:
        return [self.host, self.device, self.end, *self.stages.values()]

    def _run(self, one: Operation, cost: _Cost) -> None:
        start = self.host
        self.host += cost.host + (cost.work if self.is_cpu else 0.0)
        if one.num_kernels and not self.is_cpu:
            # Of several calls, the device starts with the first and ends after the last.
            first = start + cost.host / one.count
            alone = cost.host - cost.host / one.count if one.waits else 0.0
            self.device = max(max(self.device, first) + cost.work + cost.gaps + alone, self.host)
        end = max(self.host, self.device)
        if one.waits:
            self.host = self.device = end
        self.stages[one.stage] += end - self.end
        self.end = end


def _cause(one: Operation) -> str:
    if one.stage == RECOMPUTE:
        return "recompute"
    return MEMORY_BOUND if one.kind in (LOSS, HOST, COMMUNICATION) else one.kind


class DeviceSeconds:
    """Seconds of operations on one device, without the gaps between kernels."""

    def __init__(self, gpu: Gpu, strategy: Strategy) -> None:
        self._gpu = gpu
        self._strategy = strategy
        self.rates = eff.find_rates(gpu, strategy, head_dim=128)
        self._by_kind: dict[str, Callable[[Operation], float]] = {
            MATMUL: self._multiply,
            ATTENTION: self._attend,
            MEMORY_BOUND: self._move,
            LOSS: lambda one: one.num_bytes / self.rates.loss_bytes_per_second,
            DEQUANTIZE: lambda one: self._dequantize(one.shape[0]),
            OPTIMIZER: self._update,
        }

    def of(self, one: Operation) -> float:
        """One call."""
        seconds = self._by_kind.get(one.kind)
        return 0.0 if seconds is None else seconds(one)

    def _multiply(self, one: Operation) -> float:
        m, n, k, times, *packed = one.shape
        dequantizing = self._dequantize(n * k) if packed else 0.0
        is_fp8, is_exact = one.dtype in FP8_KINDS, one.dtype == FP8_EXACT
        dtype = Dtype(one.dtype) if one.dtype in _PLAIN else self._strategy.compute
        table = (
            find_fp8_matmul_table(self._gpu.measured, is_exact=is_exact)
            if is_fp8
            else find_matmul_table(self._gpu.measured, dtype)
        )
        stream = one.num_bytes / self.rates.stream_bytes_per_second
        if table is not None:
            # Many small products fill the device like one product with all their rows; an
            # in-place product also reads its destination.
            is_moving = times > 1 or one.name == ADDED_PRODUCT
            slower = UNALIGNED_SLOWDOWN if one.num_indexed else 1.0
            product = slower * table.seconds(m * times, n, k)
            return dequantizing + max(product, stream if is_moving else 0.0)
        gpu = self._gpu
        rate = eff.sustained_fp8_flops(gpu) if is_fp8 else eff.sustained_flops(gpu, dtype)
        return dequantizing + one.flops / rate + stream

    def _attend(self, one: Operation) -> float:
        width, length, is_causal, is_backward = one.shape
        strategy = self._strategy
        if one.name.startswith(_SDPA) and not strategy.packing:
            # Flash attention calls it too, for layers without a window.
            strategy = strategy.model_copy(update={"attention": Attention.SDPA})
        rates = eff.find_rates(
            self._gpu,
            strategy,
            head_dim=width,
            seq_len=float(length),
        )
        flops = one.flops / (eff.FLASH_BACKWARD_FLOPS if is_backward else 1.0)
        return eff.attention_seconds(
            rates,
            flops=flops * (CAUSAL_FRACTION if is_causal else 1.0),
            seq_len=float(length),
            backward=bool(is_backward),
            is_masked=not is_causal,
        )

    def _move(self, one: Operation) -> float:
        """Bandwidth is looked up by the size of one tensor of two or three."""
        measured = self._gpu.measured
        bandwidth = self.rates.stream_bytes_per_second
        if measured is not None and measured.elementwise and one.num_bytes:
            bandwidth = bandwidth_at(measured.elementwise, one.num_bytes / 2)
        found = one.num_indexed / eff.indexed_values_per_second(self._gpu)
        passes, least = REDUCTIONS.get(one.name, Reduction(1.0, 0.0))
        if self._gpu.is_cpu:
            passes, least = 1.0, 0.0
        return max(passes * one.num_bytes / bandwidth + least, found)

    def _dequantize(self, num_weights: int) -> float:
        measured = self._gpu.measured
        if measured is not None and measured.nf4_weights_per_second is not None:
            return num_weights / measured.nf4_weights_per_second
        return eff.DEQUANTIZE_BYTES[Dtype.NF4] * num_weights / self.rates.stream_bytes_per_second

    def _update(self, one: Operation) -> float:
        if one.dtype == "int8":
            return one.shape[0] * EIGHT_BIT_SECONDS_PER_PARAM
        used = self._strategy.optimizer
        used = used if used is Optimizer.ADAMW_KERNEL else Optimizer.ADAMW
        value = Dtype(one.dtype).value_bytes
        each = eff.measured_update_seconds(self._gpu.measured, used, value_bytes=value)
        if each is None:
            each = eff.update_bytes(used, value) / self.rates.stream_bytes_per_second
        return one.shape[0] * each


_PLAIN = ("fp32", "fp16", "bf16")
