"""Apply a trace to a plan: its memory, its time, and the order of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from tightfit.core.profiles import DataProfile
from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.estimation.job import estimate_job, exceeds_host_memory
from tightfit.estimation.result import TRACED, Estimate, GpuMemory, Phase, StepTime, Verdict
from tightfit.estimation.step_time import estimate_step_time
from tightfit.hardware.types import Gpu, Node
from tightfit.planning.filter import assume_host
from tightfit.planning.plan import Plan, estimate_cost
from tightfit.planning.ranking import find_overshoot, rank_estimate
from tightfit.planning.search import SearchResult
from tightfit.trace.result import OperationLog, TracedMemory
from tightfit.trace.traced_time import estimate_traced_time
from tightfit.trace.tracer import TraceResponse

CLOSED_FORM_COMPONENTS = ("communication", "offload", "hooks")
"""Not in a trace: transfers, and DeepSpeed's hooks, since DeepSpeed does not run in it."""
OPTIMIZER_COMPONENT = "optimizer"
"""Takes the same time for every batch."""


def with_traced_time(
    closed: StepTime,
    log: OperationLog,
    gpu: Gpu,
    strategy: Strategy,
    *,
    of_traced_batch: StepTime | None = None,
) -> StepTime:
    """`closed` with the computation timed by the traced operations.

    A log holds all micro-batches of one rank's step with the longest rows of the job. Where
    `closed` is for shorter rows, `of_traced_batch` is the closed form for the traced ones, and
    the traced seconds are scaled by the ratio of the two. The range keeps its relative width.
    """
    traced = estimate_traced_time(log, gpu, strategy).components
    share = 1.0
    if of_traced_batch is not None:
        share = _sum_passes(closed) / _sum_passes(of_traced_batch)
    components = {
        name: seconds if name == OPTIMIZER_COMPONENT else share * seconds
        for name, seconds in traced.items()
    }
    components |= {name: closed.components.get(name, 0.0) for name in CLOSED_FORM_COMPONENTS}
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
            "reference_seconds_per_step": closed.reference_seconds_per_step * slower,
        }
    )


def _sum_passes(time: StepTime) -> float:
    apart = (*CLOSED_FORM_COMPONENTS, OPTIMIZER_COMPONENT)
    return sum(seconds for name, seconds in time.components.items() if name not in apart)


def find_document_len(profile: DataProfile | None, strategy: Strategy) -> int | None:
    """Tokens of each document in a packed row that is traced; None: a row is one document."""
    if profile is None or not profile.num_rows or not strategy.packing:
        return None
    return max(1, int(profile.mean_tokens))


def time_plan(plan: Plan, operations: OperationLog) -> StepTime:
    """The plan's time by its traced operations; what travels between ranks stays by formula.

    Known data has shorter rows than the trace, which runs the longest: how much less a step of
    them takes is the closed form's to say.
    """
    gpu, strategy, data = plan.hardware.node.gpu, plan.strategy, plan.data
    of_trace = None
    if data is not None:
        length = find_document_len(data, strategy)
        alike = None if length is None else data.model_copy(update={"histogram": ((length, 1),)})
        of_trace = estimate_step_time(
            spec=plan.model,
            strategy=strategy,
            node=assume_host(plan.hardware.node),
            network_bytes_per_second=plan.hardware.network_bytes_per_second,
            profile=alike,
            num_trainable=plan.estimate.parameters.trainable,
        )
    return with_traced_time(plan.estimate.time, operations, gpu, strategy, of_traced_batch=of_trace)


NUM_HALVINGS = 2
"""Of the micro-batch, before a plan is given up."""
_STAGE_PHASES = {"load": "load", "eval": "eval", "save": "save", "generate": "inference"}
"""A trace's stages that the closed form knows as phases."""
RECOMPUTE_LEVERS = ("recomputing activations", "no recomputation")
"""As `why.py` names them."""
_CHUNKS_LEVER = "large loss chunks"
UNTRACED_PHASES = ("merge", "quantize")
"""What a trace does not run: other programs do it, later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One job to trace: a strategy of a model on a node."""

    strategy: Strategy
    node: Node
    room_bytes: int
    """What the card leaves to torch's allocator."""
    wants_fewest_recomputed: bool = False
    """Whether to look for the smallest number of recomputed layers that fits `room_bytes`."""


Trace = Callable[[Sequence[TraceRequest]], list[TraceResponse]]
"""The tracer, handed in by whoever may start processes. One answer per request."""


def make_trace_request(plan: Plan, fixed: Set[str] = frozenset()) -> TraceRequest:
    """`fixed`: fields of the strategy that were asked for."""
    gpu = plan.estimate.gpu
    is_open = fixed.isdisjoint({"checkpointing", "recomputed_layers"})
    return TraceRequest(
        strategy=plan.strategy,
        node=plan.hardware.node,
        room_bytes=max(0, gpu.capacity_bytes - gpu.context_bytes),
        wants_fewest_recomputed=plan.strategy.checkpointing and is_open,
    )


def judge_traced(traced: TracedMemory, *, context_bytes: int, capacity_bytes: int) -> Verdict:
    """`fits` if torch's whole reserve does; `tight` if the job runs only because the allocator
    releases cached blocks; `does_not_fit` below the smallest capacity."""
    room = capacity_bytes - context_bytes
    if traced.smallest_capacity_bytes > room:
        return Verdict.DOES_NOT_FIT
    return Verdict.FITS if traced.peak_reserved_bytes <= room else Verdict.TIGHT


def apply_trace(
    estimate: Estimate, traced: TracedMemory, node: Node, time: StepTime | None = None
) -> Estimate:
    """The estimate with traced memory in place of the formulas'; illegal stays illegal.

    `time` is the traced one. None where there is none: the formulas' stays.
    """
    gpu = estimate.gpu
    room = gpu.capacity_bytes - gpu.context_bytes
    reserved = traced.peak_reserved_bytes
    if traced.smallest_capacity_bytes <= room:  # torch gives cached blocks back where it has to
        reserved = min(reserved, room)
    components = dict(traced.peak.components)
    components["allocator_slack"] = reserved - sum(components.values())
    components["cuda_context"] = gpu.context_bytes
    memory = GpuMemory(
        peak_phase=traced.peak.stage,
        peak_allocated_bytes=traced.peak_allocated_bytes,
        peak_reserved_bytes=reserved + gpu.context_bytes,
        context_bytes=gpu.context_bytes,
        capacity_bytes=gpu.capacity_bytes,
        components={name: size for name, size in components.items() if size > 0},
    )
    verdict, reason = estimate.verdict, estimate.reason
    if verdict is not Verdict.ILLEGAL and not exceeds_host_memory(estimate.host):
        verdict = judge_traced(
            traced, context_bytes=gpu.context_bytes, capacity_bytes=gpu.capacity_bytes
        )
        reason = _reason(verdict, traced, memory, node)
    return estimate.model_copy(
        update={
            "gpu": memory,
            "verdict": verdict,
            "reason": reason,
            "phases": _phases(estimate, traced, gpu.context_bytes),
            "tier": TRACED,
            "peak": traced.peak,
            "time": time or estimate.time,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSearch:
    """A search whose first plans were traced."""

    result: SearchResult
    traces: tuple[TracedMemory | None, ...]
    """Of the first plans, in their order."""
    lost: tuple[Plan, ...]
    """Plans that fit by formula and do not by trace."""
    notes: tuple[str, ...]
    """Why some could not be traced."""


def trace_plans(result: SearchResult, trace: Trace, *, num_traced: int) -> TracedSearch:
    """Trace the first plans and order them anew.

    A plan that may recompute layers recomputes no more than it must. One that does not fit after
    all tries small loss chunks, then half its micro-batch, and is lost when that does not help.
    Settings that were asked for stay. A plan that cannot be traced keeps its formulas and its
    rank among the others. Where none is left, the next ones are traced.
    """
    chosen, rest = result.plans[:num_traced], result.plans[num_traced:]
    settled = _trace_all(chosen, trace, result.fixed)
    halving = (_halve_micro_batch, ("micro_batch", "grad_accum"))
    for shrink, fields in (
        (_shrink_loss_chunks, ("loss_chunk_factor",)),
        *[halving] * NUM_HALVINGS,
    ):
        if not result.fixed.isdisjoint(fields):
            continue
        tried = {
            index: plan
            for index, one in enumerate(settled)
            if one.is_lost and (plan := shrink(one.plan)) is not None
        }
        if tried:
            found = _trace_all(list(tried.values()), trace, result.fixed)
            for index, one in zip(tried, found, strict=True):
                settled[index] = one
    fitting = _sort([one for one in settled if not one.is_lost], result.wanted_batch)
    problems = dict.fromkeys(one.found.problem for one in settled if one.found.traced is None)
    lost = tuple(one.plan for one in settled if one.is_lost)
    if rest and not fitting:
        following = trace_plans(replace(result, plans=rest), trace, num_traced=num_traced)
        return replace(following, lost=(*lost, *following.lost))
    return TracedSearch(
        result=replace(result, plans=(*(one.plan for one in fitting), *rest)),
        traces=tuple(one.found.traced for one in fitting),
        lost=lost,
        notes=tuple(f"not traced: {problem}" for problem in problems),
    )


class _Settled(NamedTuple):
    """A plan after its trace."""

    plan: Plan
    found: TraceResponse
    closed: StepTime
    """Its time by formula."""

    @property
    def is_lost(self) -> bool:
        return self.plan.estimate.verdict not in (Verdict.FITS, Verdict.TIGHT)


def _trace_all(plans: Sequence[Plan], trace: Trace, fixed: Set[str]) -> list[_Settled]:
    answers = trace([make_trace_request(plan, fixed) for plan in plans])
    return [_settle(plan, found) for plan, found in zip(plans, answers, strict=True)]


def _sort(settled: Sequence[_Settled], wanted_batch: int | None) -> list[_Settled]:
    """Best first. Traced seconds are compared with traced ones, else formulas with formulas."""
    is_timed = all(one.plan.estimate.time.tier == TRACED for one in settled)

    def rank(one: _Settled) -> tuple[float, ...]:
        plan, estimate = one.plan, one.plan.estimate
        if not is_timed:
            estimate = estimate.model_copy(update={"time": one.closed})
        overshoot = find_overshoot(plan.strategy, wanted_batch or plan.effective_batch)
        return rank_estimate(plan.strategy, estimate, overshoot=overshoot, num_steps=plan.num_steps)

    return sorted(settled, key=rank)


def _shrink_loss_chunks(plan: Plan) -> Plan | None:
    """With the default loss chunks; None where it has them already."""
    if plan.strategy.loss_chunk_factor == 1:
        return None
    smaller = _change(plan, plan.strategy.model_copy(update={"loss_chunk_factor": 1}))
    why = "small loss chunks: traced, and large ones do not fit"
    return smaller.model_copy(update={"why": (*_drop_reasons(plan.why, _CHUNKS_LEVER), why)})


def _halve_micro_batch(plan: Plan) -> Plan | None:
    """Half as many sequences at once, twice as often; None where one is left."""
    strategy = plan.strategy
    if strategy.micro_batch < 2:
        return None
    micro_batch = strategy.micro_batch // 2
    per_step = strategy.micro_batch * strategy.grad_accum
    update = {"micro_batch": micro_batch, "grad_accum": -(-per_step // micro_batch)}
    smaller = _change(plan, strategy.model_copy(update=update))
    why = f"micro-batch {micro_batch}, not {strategy.micro_batch}: traced, and that does not fit"
    # The sentence about the wanted batch has the old numbers.
    kept = [line for line in plan.why if "micro-batch" not in line]
    return smaller.model_copy(update={"why": (*kept, why)})


def _settle(plan: Plan, found: TraceResponse) -> _Settled:
    """The plan with what its trace says; as it was where there is none."""
    if found.traced is None:
        return _Settled(plan, found, plan.estimate.time)
    plan = _recompute(plan, found.fewest_recomputed)
    closed = plan.estimate.time
    time = None if found.operations is None else time_plan(plan, found.operations)
    estimate = apply_trace(plan.estimate, found.traced, plan.hardware.node, time)
    cost = estimate_cost(
        gpu=plan.hardware.node.gpu,
        num_gpus=plan.strategy.world_size,
        estimate=estimate,
        num_epochs=plan.num_epochs,
    )
    return _Settled(plan.model_copy(update={"estimate": estimate, "cost": cost}), found, closed)


def _recompute(plan: Plan, num_recomputed: int | None) -> Plan:
    """The plan with so many recomputed layers, and the time that this takes."""
    num_layers = plan.model.num_layers
    if num_recomputed is None or num_recomputed == plan.strategy.count_recomputed(num_layers):
        return plan
    is_some = 0 < num_recomputed < num_layers
    strategy = plan.strategy.model_copy(
        update={
            "checkpointing": num_recomputed > 0,
            "recomputed_layers": num_recomputed if is_some else None,
        }
    )
    why = f"recomputes {num_recomputed} of {num_layers} layers: traced, and fewer do not fit"
    if not num_recomputed:
        why = f"recomputes none of {num_layers} layers: traced, and it fits without"
    kept = _drop_reasons(plan.why, *RECOMPUTE_LEVERS)
    return _change(plan, strategy).model_copy(update={"why": (*kept, why)})


def _drop_reasons(why: Sequence[str], *levers: str) -> tuple[str, ...]:
    """Without the sentences about these levers, which are not true any more."""
    return tuple(line for line in why if not line.startswith(tuple(f"{name}:" for name in levers)))


def _change(plan: Plan, strategy: Strategy) -> Plan:
    """The plan with another strategy, estimated by formula."""
    estimate = estimate_job(
        spec=plan.model,
        strategy=strategy,
        node=assume_host(plan.hardware.node),
        network_bytes_per_second=plan.hardware.network_bytes_per_second,
        profile=plan.data,
    )
    reported = estimate.model_copy(update={"assumptions": plan.estimate.assumptions})
    return plan.model_copy(
        update={
            "strategy": strategy,
            "estimate": reported,
            "effective_batch": strategy.examples_per_step,
        }
    )


def _phases(estimate: Estimate, traced: TracedMemory, context_bytes: int) -> tuple[Phase, ...]:
    """Traced stages first; what a trace does not run (merge, quantize) as it was."""
    replaced = {_STAGE_PHASES.get(stage.name) for stage in traced.stages}
    hosts = {phase.name: phase.host_peak_bytes for phase in estimate.phases}
    step_host = max((phase.host_peak_bytes for phase in estimate.phases), default=0)
    made = [
        Phase(
            name=stage.name,
            peak_allocated_bytes=stage.peak_allocated_bytes,
            peak_reserved_bytes=stage.peak_reserved_bytes + context_bytes,
            components={
                "tensors": stage.peak_allocated_bytes,
                "allocator_slack": stage.peak_reserved_bytes - stage.peak_allocated_bytes,
                "cuda_context": context_bytes,
            },
            host_peak_bytes=hosts.get(_STAGE_PHASES.get(stage.name, ""), step_host),
        )
        for stage in traced.stages
    ]
    kept = [p for p in estimate.phases if p.name in (*UNTRACED_PHASES, "inference", "save")]
    return (*made, *(phase for phase in kept if phase.name not in replaced))


def _reason(verdict: Verdict, traced: TracedMemory, gpu: GpuMemory, node: Node) -> str:
    has = f"{node.gpu.name} has {render_bytes(gpu.capacity_bytes)}"
    least = render_bytes(traced.smallest_capacity_bytes + gpu.context_bytes)
    held = render_bytes(traced.peak_reserved_bytes + gpu.context_bytes)
    if verdict is Verdict.FITS:
        spare = render_bytes(gpu.capacity_bytes - gpu.context_bytes - traced.peak_reserved_bytes)
        return f"holds {held} per GPU, traced; {has} ({spare} to spare)"
    if verdict is Verdict.TIGHT:
        return (
            f"would hold {held} per GPU and survives in {least}, traced; {has}, so the allocator "
            "has to give memory back and ask again"
        )
    short = render_bytes(traced.smallest_capacity_bytes + gpu.context_bytes - gpu.capacity_bytes)
    return f"needs at least {least} per GPU, traced; {has} ({short} short)"
