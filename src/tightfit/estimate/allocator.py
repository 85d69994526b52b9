"""The allocator's share: slack above live tensors, the CUDA context, and the verdict."""

from __future__ import annotations

from tightfit.core.units import GIB, MIB
from tightfit.estimate.result import Verdict

CONTEXT_BYTES = 3 * GIB // 4
"""CUDA context, loaded kernels and cuBLAS outside torch's allocator.
Source: benchmarks/results/h200_steps.json, the process's use of the card less torch's reserve."""
CPU_CONTEXT_BYTES = 400 * MIB
"""Python with torch 2.13 (CPU), transformers 5.22, peft 0.21, torch's distributed checkpoints and
TensorBoard imported: 395 MiB resident, before any model."""
NCCL_BYTES = GIB // 4
"""Channels and buffers of one NCCL communicator. Source: NCCL_BUFFSIZE 4 MiB x channels x peers."""
TRANSIENT_SLACK_FRACTION = 0.02
"""Rounding, as a share of all tensors of the peak that come and go within a step.
Source of this and the next three: fit to reserved over allocated in
benchmarks/results/h200_steps.json, 150 training steps."""
BATCH_SLACK_FRACTION = 0.06
"""Holes between tensors whose size follows the batch, which come in many sizes."""
IDLE_SLACK_FRACTION = 0.7
"""Blocks of another moment's tensors, which stay cached and mostly fit nothing of the peak:
the reserve of a recomputing job holds both the loss and a recomputed layer."""
STREAM_SLACK_FRACTION = 0.75
"""Gathered weights live on a stream of their own, whose free blocks no other stream may use."""
OUTGROWN_SLACK_FRACTION = 1.0
"""Blocks of outgrown sizes where batch lengths vary and segments cannot expand.
Source: benchmarks/results/h200_fragmentation.json, 4096 tokens."""

CPU_SLACK_FRACTION = 0.6
"""On a CPU, as a share of all tensors of the peak that come and go within a step: glibc keeps freed
blocks below 32 MiB, and holes between kept tensors do not fit the next layer's.
Source of this and the next: peak resident memory of SmolLM2-135M, table in docs/formulas.md."""
CPU_HOLES_FRACTION = 0.4
"""Likewise, of what recomputed layers made and dropped in the forward pass."""
MODEL_ERROR_FRACTION = 0.05
"""How far the closed form itself may be off before a verdict would be a guess."""


def estimate_slack_bytes(
    *,
    transient_bytes: int,
    batch_bytes: int,
    idle_bytes: int,
    stream_bytes: int,
    varying_lengths: bool,
) -> int:
    """Reserved over allocated at the peak of a step that repeats.

    `batch_bytes` are those of the peak's tensors that follow the batch in size,
    `stream_bytes` those that belong to communication; `idle_bytes` are tensors
    of another moment that the peak has not.
    """
    batch_share = BATCH_SLACK_FRACTION + (OUTGROWN_SLACK_FRACTION if varying_lengths else 0.0)
    return int(
        TRANSIENT_SLACK_FRACTION * transient_bytes
        + batch_share * batch_bytes
        + IDLE_SLACK_FRACTION * idle_bytes
        + STREAM_SLACK_FRACTION * stream_bytes
    )


def estimate_context_bytes(
    world_size: int, *, is_cpu: bool = False, measured_bytes: int | None = None
) -> int:
    """What the process holds outside torch's allocator; `measured_bytes` without NCCL's share."""
    if is_cpu:
        return measured_bytes or CPU_CONTEXT_BYTES
    return (measured_bytes or CONTEXT_BYTES) + (NCCL_BYTES if world_size > 1 else 0)


def estimate_cpu_slack_bytes(*, transient_bytes: int, dropped_bytes: int) -> int:
    """Resident memory over live tensors at the peak of a step on a CPU, under glibc's malloc."""
    return int(CPU_SLACK_FRACTION * transient_bytes + CPU_HOLES_FRACTION * dropped_bytes)


def judge_fit(*, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int) -> Verdict:
    """`fits` if the whole reserve does, with room for our own error; `does_not_fit` if live
    tensors alone do not; `tight` between: the allocator may manage by retrying, or fail."""
    if reserved_bytes * (1 + MODEL_ERROR_FRACTION) <= capacity_bytes:
        return Verdict.FITS
    if allocated_bytes * (1 - MODEL_ERROR_FRACTION) > capacity_bytes:
        return Verdict.DOES_NOT_FIT
    return Verdict.TIGHT
