"""The last choice of a full tuning: AdamW in our kernel, where `calibrate` found it faster here."""

from __future__ import annotations

from dataclasses import replace

from tightfit.core.strategy import Method, Optimizer
from tightfit.estimate.traffic import measured_update_seconds
from tightfit.planning.ranking import Candidate, measure_seconds
from tightfit.planning.sift import Sieve


def update_in_kernel(sieve: Sieve, candidate: Candidate) -> Candidate:
    """The candidate with that kernel where it is legal and gains time, else as it was.

    Only on a device where it was measured in this dtype: `calibrate` also holds its update
    against torch's there.
    Adapters are too few for a kernel to matter.
    """
    strategy, layout = candidate.strategy, candidate.layout
    measured = layout.group.node.gpu.measured
    is_open = "optimizer" not in sieve.request.fixed and strategy.optimizer is Optimizer.ADAMW
    if strategy.method is not Method.FULL or not is_open:
        return candidate
    value_bytes = strategy.weights.value_bytes
    if measured_update_seconds(measured, Optimizer.ADAMW_KERNEL, value_bytes=value_bytes) is None:
        return candidate
    ours = strategy.model_copy(update={"optimizer": Optimizer.ADAMW_KERNEL})
    if sieve.find_violation(layout, ours) is not None:
        return candidate
    outline = sieve.outline(layout, ours)
    is_faster = measure_seconds(outline) < measure_seconds(candidate.outline)
    return replace(candidate, strategy=ours, outline=outline) if is_faster else candidate
