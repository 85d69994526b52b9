"""TracedMemory and TracedTime: the results of a trace. The shape on disk and under `--json`."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt

from tightfit.core.frozen import FiniteFrozen
from tightfit.core.memory_peak import Peak


class TracedTime(FiniteFrozen):
    """One steady step of one rank, without communication between ranks."""

    seconds_per_step: NonNegativeFloat
    stages: dict[str, float]
    """`forward`, `recompute`, `backward`, `update`: until the device is done, summing to
    `seconds_per_step`."""
    components: dict[str, float]
    """By cause, as in `StepTime.components`, summing to `seconds_per_step`."""
    host_seconds: NonNegativeFloat
    """Time of the host alone."""
    device_seconds: NonNegativeFloat
    """Time of the device alone, gaps between kernels included."""
    flops: NonNegativeFloat
    """Of products and attention, masked pairs and recomputed layers included."""


class TracedStage(FiniteFrozen):
    """One stage of the job and its peak on the traced GPU."""

    name: str
    """`load`, `first step`, `steady step`, `eval`, `save`, `generate` or `resume`."""
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt


class Timeline(FiniteFrozen):
    """Allocated bytes by category over the job, downsampled without losing peaks."""

    categories: tuple[str, ...]
    bytes: tuple[tuple[int, ...], ...]
    """One row per category."""
    stages: tuple[tuple[int, str], ...]
    """The column at which each stage begins."""


class TracedMemory(FiniteFrozen):
    """Memory of one GPU, from the training step on fake tensors. Excludes the CUDA context."""

    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    """On a GPU without a limit."""
    smallest_capacity_bytes: NonNegativeInt
    """Least reserve of torch's allocator with which the job does not run out of memory."""
    stages: tuple[TracedStage, ...]
    peak: Peak
    timeline: Timeline
    num_layers: NonNegativeInt
    num_traced_layers: NonNegativeInt
    refusal: str = ""
    """Why all layers were traced; empty where a few were enough."""
    seconds: NonNegativeFloat
    """Duration of the trace."""
    versions: dict[str, str]
    """Versions of the libraries that ran."""
