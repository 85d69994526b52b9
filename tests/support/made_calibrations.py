"""A made-up calibration, with rates that are easy to reckon with."""

from __future__ import annotations

import socket
from typing import Any

from tightfit.hardware.calibration import (
    AttentionTime,
    Calibration,
    CollectiveTime,
    HostLink,
    HostTimes,
    MatmulTime,
    OptimizerTime,
    TrafficTime,
)

SHAPES = ((512, 4096, 4096), (2048, 4096, 4096), (2048, 11008, 4096), (8192, 16, 4096))
FLOPS_PER_SECOND = 400e12
BYTES_PER_SECOND = 2e12


def make_calibration(gpu_name: str = "H200-SXM", **changes: Any) -> Calibration:
    """Every product at 400e12 FLOP/s, all traffic at 2e12 B/s."""
    found: dict[str, Any] = {
        "gpu_name": gpu_name,
        "host": socket.gethostname(),
        "date": "2026-11-15T12:00:00+00:00",
        "num_gpus": 1,
        "is_cpu": False,
        "device": "NVIDIA H200",
        "versions": {"tightfit": "0.1.0"},
        "seconds": 80.0,
        "context_bytes": 600_000_000,
        "matmuls": make_matmuls(FLOPS_PER_SECOND),
        "attention": make_attention(200e12),
        "traffic": make_traffic(BYTES_PER_SECOND),
        "optimizers": (OptimizerTime(dtype="bf16", num_params=10**9, seconds=0.010),),
        "nf4_weights_per_second": 100e9,
        "host_times": make_host_times(1.0),
        "host_link": HostLink(to_device_bytes_per_second=20e9, from_device_bytes_per_second=10e9),
    }
    return Calibration(**(found | changes))


def make_matmuls(flops_per_second: float, dtype: str = "bf16") -> tuple[MatmulTime, ...]:
    return tuple(
        MatmulTime(dtype=dtype, m=m, n=n, k=k, seconds=2.0 * m * n * k / flops_per_second)
        for m, n, k in SHAPES
    )


def make_attention(flops_per_second: float) -> tuple[AttentionTime, ...]:
    """The same rate forward and backward, whatever the length and the head."""
    return tuple(
        AttentionTime(
            dtype="bfloat16",
            batch=1,
            heads=32,
            length=length,
            head_dim=head_dim,
            is_causal=True,
            forward_seconds=2.0 * 32 * length**2 * head_dim / flops_per_second,
            backward_seconds=5.0 * 32 * length**2 * head_dim / flops_per_second,
        )
        for length in (512, 8192)
        for head_dim in (64, 128)
    )


def make_traffic(bytes_per_second: float) -> tuple[TrafficTime, ...]:
    return tuple(
        TrafficTime(
            kind=kind,
            tensor_bytes=size,
            moved_bytes=2.0 * size,
            seconds=2.0 * size / bytes_per_second,
        )
        for size in (2**20, 2**30)
        for kind in ("copy", "elementwise", "loss")
    )


def make_host_times(times: float) -> HostTimes:
    """The catalogue's host, `times` slower; a gap of next to nothing."""
    return HostTimes(
        op_seconds=5e-6 * times,
        backward_op_seconds=5e-6 * times,
        kernel_seconds=1e-12,
        layer_forward_seconds=35 * 35e-6 * times,
        layer_backward_seconds=70 * 14e-6 * times,
        layer_checkpoint_seconds=(35 * 35e-6 + 0.6e-3) * times,
        kernels_per_layer=35.0,
    )


def make_collectives(ring_bytes_per_second: float) -> tuple[CollectiveTime, ...]:
    """Over four GPUs; a gather of next to nothing takes 30 us."""
    return tuple(
        CollectiveTime(
            kind=kind,
            num_ranks=4,
            num_bytes=size,
            seconds=passes * 0.75 * size / ring_bytes_per_second + latency,
        )
        for size, latency in ((2**10, 30e-6), (2**34, 0.0))
        for kind, passes in (("all_reduce", 2), ("all_gather", 1))
    )
