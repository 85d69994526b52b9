"""What the operations of a trace say of a plan's time."""

from __future__ import annotations

from tightfit.core.strategy import Strategy
from tightfit.core.workload import DataProfile
from tightfit.estimate.result import StepTime
from tightfit.estimate.time import estimate_step_time
from tightfit.estimate.trace.operations import OperationLog
from tightfit.estimate.trace.step_time import with_traced_time
from tightfit.planning.assume import assume_host
from tightfit.planning.plan import Plan


def find_document_len(profile: DataProfile | None, strategy: Strategy) -> int | None:
    """Tokens of each document in a packed row that is traced; None: a row is one document."""
    if profile is None or not profile.num_rows or not strategy.packing:
        return None
    return max(1, profile.num_tokens // profile.num_rows)


def time_plan(plan: Plan, operations: OperationLog) -> StepTime:
    """The plan's time by its traced operations; what travels between ranks stays by formula.

    Known data has shorter rows than the trace, which runs the longest: how much less a step of
    them takes is the closed form's to say.
    """
    gpu, strategy = plan.hardware.node.gpu, plan.strategy
    of_trace = None if plan.data is None else _estimate_traced_batch(plan, plan.data)
    return with_traced_time(plan.estimate.time, operations, gpu, strategy, of_traced_batch=of_trace)


def _estimate_traced_batch(plan: Plan, data: DataProfile) -> StepTime:
    length = find_document_len(data, plan.strategy)
    alike = None if length is None else data.model_copy(update={"histogram": ((length, 1),)})
    return estimate_step_time(
        spec=plan.model,
        strategy=plan.strategy,
        node=assume_host(plan.hardware.node),
        network_bytes_per_second=plan.hardware.network_bytes_per_second,
        profile=alike,
        num_trainable=plan.estimate.parameters.trainable,
    )
