"""What the host takes per traced operation, by what was measured over whole layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tightfit.estimate import efficiency as eff
from tightfit.estimate.trace.operations import (
    ADAPTER,
    AGAIN,
    BACKWARD,
    FORWARD,
    HOST,
    SHARD,
    TRITON,
    Operation,
    OperationLog,
)

VIEW_WEIGHT = 0.25
"""A view beside an operation that starts a kernel: most are made inside of another call."""
TRITON_WEIGHT = 3.0
"""A launch by triton likewise: its arguments are looked at in Python."""
TENSOR_WEIGHT = 0.1
"""Each tensor of a list beside an operation of one."""
LIBRARY_WEIGHT = 3.0
"""Added to an operation whose kernel is registered in Python: checks, a device guard, ctypes."""
SHARD_WEIGHT = 70.0
"""FSDP2's Python around one collective: flattening, setting parameters, events. From five FSDP
jobs on one H200 whose collectives did nothing."""
LAYER_FORWARD_WEIGHT = 47.5
LAYER_BACKWARD_WEIGHT = 88.5
"""Operations of the decoder layer that calibration times, in these weights."""
ADAPTER_FORWARD_WEIGHT = 5.5
"""Operations of a LoRA module in the model's own dtype, likewise."""
ADAPTER_BACKWARD_WEIGHT = 6.5
"""The same backward, less the gradient that a frozen weight has not."""
LAYER_KERNELS = 35.0
"""What `launches.count_forward_kernels` counts in that layer."""

_IN_PYTHON = ("bitsandbytes::", TRITON)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPace:
    """Seconds of the host."""

    forward: float
    """Per operation that Python calls."""
    backward: float
    """Per operation that autograd's engine calls."""
    gap: float
    """From kernel to kernel on the device, with a full queue."""
    around: Mapping[str, float] = field(default_factory=dict)
    """Python that comes with some operations."""
    adapter_backward: float = 0.0
    """Of autograd's engine for one LoRA module, beyond its operations."""

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

    def with_adapters(self, log: OperationLog) -> HostPace:
        """The engine's time for LoRA modules is spread over all that it calls.

        Folded ones go back in one call of their own, which bears it already.
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


def find_host_pace(rates: eff.Rates) -> HostPace:
    """From seconds per kernel as the closed form counts them, measured or assumed."""
    forward = rates.host_forward_seconds * LAYER_KERNELS / LAYER_FORWARD_WEIGHT
    backward = 2 * rates.host_backward_seconds * LAYER_KERNELS / LAYER_BACKWARD_WEIGHT
    adapter, adapter_backward = eff.HOST_ADAPTER_KERNELS * rates.host_forward_seconds, 0.0
    told = rates.measured
    if told is not None and told.host_adapter_forward_seconds is not None:
        beyond = told.host_adapter_forward_seconds - ADAPTER_FORWARD_WEIGHT * forward
        adapter = max(0.0, beyond)
    if told is not None and told.host_adapter_backward_seconds is not None:
        beyond = told.host_adapter_backward_seconds - ADAPTER_BACKWARD_WEIGHT * backward
        adapter_backward = max(0.0, beyond)
    return HostPace(
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
