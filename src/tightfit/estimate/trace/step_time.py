"""StepTime from a trace: a rank's own seconds as traced, the rest from the closed form."""

from __future__ import annotations

from tightfit.core.strategy import Strategy
from tightfit.estimate.result import StepTime
from tightfit.estimate.trace.op_seconds import estimate_traced_time
from tightfit.estimate.trace.operations import OperationLog
from tightfit.hardware.types import Gpu

TRACED = "traced"
KEPT = ("communication", "offload", "hooks")
"""Not among a rank's operations: what travels, and the Python of a DeepSpeed that does not run."""
UPDATE = "optimizer"
"""Takes as long whatever the batch."""


def with_traced_time(
    closed: StepTime,
    log: OperationLog,
    gpu: Gpu,
    strategy: Strategy,
    *,
    of_traced_batch: StepTime | None = None,
) -> StepTime:
    """The same job, its computation timed by its operations.

    A log holds all micro-batches of one rank's step, and the longest rows that the job may
    have. Where `closed` speaks of shorter ones, `of_traced_batch` is what the closed form says
    of the traced ones: the seconds are then shorter by as much as it finds them shorter.
    The range keeps its width.
    """
    traced = estimate_traced_time(log, gpu, strategy).components
    share = 1.0
    if of_traced_batch is not None:
        share = _sum_passes(closed) / _sum_passes(of_traced_batch)
    components = {
        name: seconds if name == UPDATE else share * seconds for name, seconds in traced.items()
    }
    components |= {name: closed.components.get(name, 0.0) for name in KEPT}
    seconds = sum(components.values())
    slower = seconds / closed.seconds_per_step
    epoch = closed.seconds_per_epoch
    return closed.model_copy(
        update={
            "seconds_per_step": seconds,
            "seconds_per_step_low": closed.seconds_per_step_low * slower,
            "seconds_per_step_high": closed.seconds_per_step_high * slower,
            "tokens_per_second": closed.tokens_per_second / slower,
            "mfu_fraction": closed.mfu_fraction / slower,
            "components": components,
            "seconds_per_epoch": None if epoch is None else epoch * slower,
            "tier": TRACED,
        }
    )


def _sum_passes(time: StepTime) -> float:
    apart = (*KEPT, UPDATE)
    return sum(seconds for name, seconds in time.components.items() if name not in apart)
