"""StepTime from a trace: a rank's own seconds as traced, transfers from the closed form."""

from __future__ import annotations

from tightfit.core.strategy import Strategy
from tightfit.estimate.result import StepTime
from tightfit.estimate.trace.op_seconds import estimate_traced_time
from tightfit.estimate.trace.operations import OperationLog
from tightfit.hardware.types import Gpu

TRANSFERS = ("communication", "offload")


def with_traced_time(closed: StepTime, log: OperationLog, gpu: Gpu, strategy: Strategy) -> StepTime:
    """The same job, its computation timed by its operations.

    The batch of the trace must be the one that `closed` speaks of. The range keeps its width.
    """
    traced = estimate_traced_time(log, gpu, strategy)
    moved = {name: closed.components.get(name, 0.0) for name in TRANSFERS}
    seconds = traced.seconds_per_step + sum(moved.values())
    slower = seconds / closed.seconds_per_step
    epoch = closed.seconds_per_epoch
    return closed.model_copy(
        update={
            "seconds_per_step": seconds,
            "seconds_per_step_low": closed.seconds_per_step_low * slower,
            "seconds_per_step_high": closed.seconds_per_step_high * slower,
            "tokens_per_second": closed.tokens_per_second / slower,
            "mfu_fraction": closed.mfu_fraction / slower,
            "components": {**traced.components, **moved},
            "seconds_per_epoch": None if epoch is None else epoch * slower,
        }
    )
