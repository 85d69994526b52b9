"""Results of an estimate: verdict, memory by phase, host, disk, time. The shape `--json` prints."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from pydantic import NonNegativeFloat, NonNegativeInt

from tightfit.core.frozen import Frozen
from tightfit.core.profiles import Peak

TRACED = "traced"
"""The tier of figures that a trace gave."""


class Verdict(str, Enum):
    """Whether the job runs."""

    FITS = "fits"
    TIGHT = "tight"
    """Inside the allocator's uncertainty: may need retries, may fail."""
    DOES_NOT_FIT = "does_not_fit"
    ILLEGAL = "illegal"
    """The combination cannot work on any amount of memory."""


class ParameterCounts(Frozen):
    """Parameter counts."""

    total: NonNegativeInt
    """The base model's, a tied head counted once; adapters not included."""
    trainable: NonNegativeInt
    active: NonNegativeInt
    """Base parameters that one token passes through."""


class Phase(Frozen):
    """One stage of the job and its peak on the fullest GPU."""

    name: str
    """`load`, a moment of the step, `eval`, `save`, `merge`, `quantize` or `inference`."""
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    """Allocated tensors, the allocator's slack and the CUDA context."""
    components: dict[str, int]
    """Name to bytes, summing to `peak_reserved_bytes`."""
    host_peak_bytes: NonNegativeInt = 0
    """Host memory of all ranks of one node in this phase."""


class GpuMemory(Frozen):
    """The fullest GPU at the peak of the training step; at the peak of loading for method `load`
    and where fp8 makes loading the peak."""

    peak_phase: str
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    """Memory of the process on the GPU, CUDA context included: what nvidia-smi shows."""
    context_bytes: NonNegativeInt
    """The part of `peak_reserved_bytes` that is outside torch's allocator."""
    capacity_bytes: NonNegativeInt
    components: dict[str, int]
    """Name to bytes, summing to `peak_reserved_bytes`."""


class HostMemory(Frozen):
    """Host RAM of one node, all ranks together."""

    peak_bytes: NonNegativeInt
    capacity_bytes: NonNegativeInt | None
    components: dict[str, int]


class DiskSpace(Frozen):
    """Space for the base model, checkpoints and the final artefact."""

    bytes: NonNegativeInt
    components: dict[str, int]


class StepTime(Frozen):
    """One optimizer step of all ranks together."""

    seconds_per_step: NonNegativeFloat
    seconds_per_step_low: NonNegativeFloat
    seconds_per_step_high: NonNegativeFloat
    tokens_per_second: NonNegativeFloat
    """Real tokens (padding left out) over all GPUs."""
    exchanged_bytes: NonNegativeFloat = 0.0
    """What each GPU sends to those that share its rows, in a step."""
    flops_per_step: NonNegativeFloat
    """Model FLOPs, recomputation left out."""
    mfu_fraction: NonNegativeFloat
    components: dict[str, float]
    """Name to seconds, summing to `seconds_per_step`."""
    seconds_per_epoch: NonNegativeFloat | None = None
    steps_per_epoch: NonNegativeInt | None = None
    compile_seconds: NonNegativeFloat = 0.0
    """What the first step takes longer where layers or attention are compiled and no earlier run
    has left the code in the cache; in none of the figures above."""
    tier: str = "closed-form"
    """`traced` once the seconds of traced operations replaced the formulas'."""
    reference_seconds_per_step: NonNegativeFloat = 0.0
    """To compute the reference's log-probabilities of one step's rows, where that is done before
    training: once for each row, and so not in `seconds_per_step`."""

    @property
    def reference_seconds(self) -> float:
        """Of all rows, before the first step; 0 where their number is not known."""
        return self.reference_seconds_per_step * (self.steps_per_epoch or 0)

    def run_seconds(self, num_epochs: float) -> float | None:
        """The whole run, with compiling and the reference before its first step; None where its
        length is not known (no dataset)."""
        if self.seconds_per_epoch is None:
            return None
        return self.reference_seconds + self.compile_seconds + self.seconds_per_epoch * num_epochs


class EstimateSummary(NamedTuple):
    """The parts of an estimate that a search compares; it makes hundreds of them."""

    verdict: Verdict
    reason: str
    gpu: GpuMemory
    host: HostMemory
    time: StepTime


class Estimate(Frozen):
    """Everything predicted for one strategy on one kind of node."""

    verdict: Verdict
    reason: str
    parameters: ParameterCounts
    gpu: GpuMemory
    host: HostMemory
    disk: DiskSpace
    time: StepTime
    phases: tuple[Phase, ...]
    assumptions: tuple[str, ...] = ()
    """Assumptions about facts that were not stated."""
    tier: str = "closed-form"
    """`closed-form`, or `traced` once a trace replaced the formulas."""
    peak: Peak | None = None
    """The tensors alive at the peak, where it was traced."""
