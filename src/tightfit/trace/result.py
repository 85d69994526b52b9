"""TracedMemory and TracedTime: the results of a trace. The shape on disk and under `--json`."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt

from tightfit.core.frozen import FiniteFrozen
from tightfit.estimate.result import Peak


class TracedTime(FiniteFrozen):
    """One steady step of one rank, without what travels between ranks."""

    seconds_per_step: NonNegativeFloat
    stages: dict[str, float]
    """`forward`, `recompute`, `backward`, `update`: until the device has done what was asked for,
    summing to `seconds_per_step`."""
    components: dict[str, float]
    """By cause, as in `StepTime.components`, likewise."""
    host_seconds: NonNegativeFloat
    """What the host needs by itself."""
    device_seconds: NonNegativeFloat
    """What the device needs by itself, gaps between kernels included."""
    flops: NonNegativeFloat
    """Of products and attention; masked pairs and recomputed layers are in it."""


# TracedMemory: what a trace says of a job. The shape on disk and under `--json`.


class TracedStage(FiniteFrozen):
    """One stage of the job and its peak on the traced GPU."""

    name: str
    """`load`, `first step`, `steady step`, `eval`, `save`, `generate` or `resume`."""
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt


class Timeline(FiniteFrozen):
    """Allocated bytes by category over the job, thinned out so that peaks stay."""

    categories: tuple[str, ...]
    bytes: tuple[tuple[int, ...], ...]
    """One row per category."""
    stages: tuple[tuple[int, str], ...]
    """The column at which each stage begins."""


class TracedMemory(FiniteFrozen):
    """Memory of one GPU, from a fake run of the very step. The CUDA context is in none of it."""

    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    """On a card without a limit."""
    smallest_capacity_bytes: NonNegativeInt
    """What torch's allocator must be able to reserve for the job to survive."""
    stages: tuple[TracedStage, ...]
    peak: Peak
    timeline: Timeline
    num_layers: NonNegativeInt
    num_traced_layers: NonNegativeInt
    refusal: str = ""
    """Why every layer was traced instead of a few; empty where a few were enough."""
    seconds: NonNegativeFloat
    """That the trace took."""
    versions: dict[str, str]
    """Of the libraries that ran."""
