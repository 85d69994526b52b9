"""Traced memory and time for `estimate` and for the first plans of a search."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tightfit.core.errors import DoesNotFitError, SetupError, UsageError
from tightfit.core.packages import TRACING, require_packages
from tightfit.core.profiles import DataProfile
from tightfit.core.progress import Progress
from tightfit.core.text import count_of, sanitize
from tightfit.estimation.host_and_disk import PROCESS_BYTES, estimate_loading_bytes_by_rank
from tightfit.estimation.result import TRACED, Estimate, GpuMemory, StepTime
from tightfit.hardware.types import Node
from tightfit.models.catalogue import read_source_config
from tightfit.models.spec import ModelSpec
from tightfit.planning.advice import Advice, judge_alternatives, list_alternatives
from tightfit.planning.rules import Case
from tightfit.planning.search import SearchResult
from tightfit.planning.traced import (
    TracedSearch,
    TraceRequest,
    apply_trace,
    find_document_len,
    trace_plans,
    with_traced_time,
)
from tightfit.trace.result import OperationLog, TracedMemory, TracedTime
from tightfit.trace.traced_time import estimate_traced_time
from tightfit.trace.tracer import Tracer, TraceResponse, has_torch
from tightfit.training.tracing.job import TraceJob, find_trace_obstacle

_log = logging.getLogger(__name__)

TRACE_WORKER = "tightfit.training.tracing.worker"
NUM_TRACED = 3
"""Plans that `bench` traces where it measures several."""
TRACE_VARIABLE = "TIGHTFIT_TRACE"
"""`0` keeps verbs from tracing unasked, as on a login node where seconds of CPU are unwelcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTracer:
    """Traces strategies of one model."""

    spec: ModelSpec
    config: dict[str, Any]
    profile: DataProfile | None = None
    progress: Progress | None = None

    def trace(self, requests: Sequence[TraceRequest]) -> list[TraceResponse]:
        """All in one process, which takes seconds to start. The `Trace` that planning asks for."""
        obstacles = [find_trace_obstacle(request.strategy) for request in requests]
        possible = [request for request, why in zip(requests, obstacles, strict=True) if not why]
        answers = iter(self._ask(possible))
        return [
            TraceResponse(traced=None, problem=why) if why else next(answers) for why in obstacles
        ]

    def _ask(self, requests: Sequence[TraceRequest]) -> list[TraceResponse]:
        jobs = [
            TraceJob(
                config=self.config,
                strategy=request.strategy,
                compute_capability=request.node.gpu.compute_capability,
                document_len=find_document_len(self.profile, request.strategy),
                room_bytes=request.room_bytes if request.wants_fewest_recomputed else None,
            ).model_dump(mode="json")
            for request in requests
        ]
        tracer = Tracer(module=TRACE_WORKER)
        progress = self.progress

        def report(num_done: int) -> None:
            if progress is not None:
                progress("tracing the step", num_done, len(jobs))

        report(0)
        try:
            answers = tracer.ask(jobs, report)
        except KeyboardInterrupt:
            _log.info("interrupted: tracing was stopped")
            raise
        report(len(jobs))  # answers from the cache report nothing
        _log_uncached(tracer.write_errors)
        return answers

    def advise(self, case: Case, traced: TracedMemory, *, room_bytes: int) -> tuple[Advice, ...]:
        """Single changes that lower the peak, each traced."""
        alternatives = list_alternatives(case, traced.peak)
        requests = [
            TraceRequest(strategy=found.strategy, node=case.node, room_bytes=room_bytes)
            for found in alternatives
        ]
        known = {
            found.strategy: answer.traced
            for found, answer in zip(alternatives, self.trace(requests), strict=True)
        }
        return judge_alternatives(
            alternatives, known.__getitem__, before=traced, capacity_bytes=room_bytes
        )


def choose_tracer(
    spec: ModelSpec,
    node: Node,
    *,
    asked: bool | None,
    profile: DataProfile | None = None,
    progress: Progress | None = None,
) -> ModelTracer | None:
    """A tracer; None where only the closed forms can be used.

    Raises where a trace was asked for and is not possible.
    """
    if asked is False or (asked is None and os.environ.get(TRACE_VARIABLE) == "0"):
        return None
    config = None if node.gpu.is_cpu else read_source_config(spec)
    if config is None and asked:
        reason = f"{spec.name} has no config.json that transformers could build"
        if node.gpu.is_cpu:
            reason = "a trace is of a GPU's memory, and this job runs on the CPU"
        raise UsageError(f"This cannot be traced: {reason}.", remedy="leave --trace out")
    if asked:
        require_packages("Tracing", *TRACING)
    if config is None or not has_torch():
        return None
    return ModelTracer(spec=spec, config=config, profile=profile, progress=progress)


def _log_uncached(errors: Sequence[str]) -> None:
    """Once a process: without a cache every repeated question is traced again."""
    if errors and not _LOGGED:
        _LOGGED.append(errors[0])
        why = sanitize(errors[0].rstrip("."))
        _log.warning(
            "traces cannot be kept, so each is made anew (%s); TIGHTFIT_CACHE names another folder",
            why,
        )


_LOGGED: list[str] = []


def trace_search(
    result: SearchResult,
    *,
    num_traced: int,
    asked: bool | None = None,
    progress: Progress | None = None,
) -> TracedSearch:
    """The search with its first plans traced, or as it was where no trace is possible."""
    first = result.plans[0]
    tracer = choose_tracer(
        first.model, first.hardware.node, asked=asked, profile=first.data, progress=progress
    )
    if tracer is None:
        return TracedSearch(result=result, traces=(), lost=(), notes=())
    found = trace_plans(result, tracer.trace, num_traced=num_traced)
    if not found.result.plans:
        lost = found.lost[0]
        raise DoesNotFitError(
            f"Nothing fits: {lost.summary} {lost.estimate.reason}.",
            remedy=(
                "leave --trace out    (goes by the formulas alone)"
                if asked
                else f"{TRACE_VARIABLE}=0 goes by the formulas alone"
            ),
        )
    best = found.result.plans[0]
    estimate = best.estimate.model_copy(
        update={"assumptions": (*best.estimate.assumptions, *_describe_traces(found))}
    )
    plans = (best.model_copy(update={"estimate": estimate}), *found.result.plans[1:])
    return replace(found, result=replace(found.result, plans=plans))


def _describe_traces(found: TracedSearch) -> tuple[str, ...]:
    num_traced = sum(traced is not None for traced in found.traces)
    num_timed = sum(plan.estimate.time.tier == TRACED for plan in found.result.plans)
    notes = []
    if num_traced:
        what = "memory and time" if num_timed == num_traced else "memory"
        others = ", of the others by formula" if num_traced < len(found.result.plans) else ""
        notes.append(f"{what} of {count_of(num_traced, 'plan')} traced{others}")
    if num_timed < num_traced:
        count = f"{num_timed} of them" if num_timed else "none"
        notes.append(f"time is traced for {count}: not all operations were understood")
    for plan in found.lost:
        notes.append(f"left out after tracing: {plan.summary}")
    return (*notes, *found.notes)


@dataclass(frozen=True, kw_only=True)
class TracedEstimate:
    """One traced configuration. No slots: `advice` is cached on the instance."""

    case: Case
    tracer: ModelTracer
    room_bytes: int
    """What the card leaves to torch's allocator."""
    traced: TracedMemory
    operations: OperationLog | None = None

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Single changes that lower the peak. Traced on first use: slower than all the rest."""
        return self.tracer.advise(self.case, self.traced, room_bytes=self.room_bytes)

    def apply(self, closed_form: Estimate) -> Estimate:
        """The estimate with traced memory and time in place of the closed forms."""
        return apply_trace(
            closed_form, self.traced, self.case.node, self.time_step(closed_form.time)
        )

    def time_step(self, closed: StepTime) -> StepTime | None:
        if self.operations is None:
            return None
        return with_traced_time(closed, self.operations, self.case.node.gpu, self.case.strategy)

    def time_stages(self) -> TracedTime | None:
        if self.operations is None:
            return None
        return estimate_traced_time(self.operations, self.case.node.gpu, self.case.strategy)

    def list_loading_bytes(self) -> list[int]:
        return estimate_loading_bytes_by_rank(self.case.spec, self.case.strategy)

    def describe(self, closed_form: Estimate) -> dict[str, Any]:
        """What `--json` adds to the estimate."""
        time = self.time_stages()
        return {
            "totals": self._describe_totals(closed_form.gpu),
            "closed_form": closed_form.model_dump(
                mode="json", include={"verdict", "reason", "gpu", "time"}
            ),
            "trace": self.traced.model_dump(mode="json"),
            "traced_time": None if time is None else time.model_dump(mode="json"),
            "advice": [one.model_dump(mode="json") for one in self.advice],
            "host_loading": {
                "process_bytes": PROCESS_BYTES,
                "weight_bytes_by_rank": self.list_loading_bytes(),
            },
        }

    def _describe_totals(self, closed_form: GpuMemory) -> dict[str, Any]:
        """The same figures of both tiers under the same names, the context out and in."""
        traced, context = self.traced, closed_form.context_bytes
        torch_alone = {
            "peak_allocated_bytes": traced.peak_allocated_bytes,
            "peak_reserved_bytes": traced.peak_reserved_bytes,
            "smallest_capacity_bytes": traced.smallest_capacity_bytes,
        }
        return {
            "context_bytes": context,
            "traced_without_context": torch_alone,
            "traced_with_context": {name: size + context for name, size in torch_alone.items()},
            "closed_form_without_context": {
                "peak_allocated_bytes": closed_form.peak_allocated_bytes,
                "peak_reserved_bytes": closed_form.peak_reserved_bytes - context,
            },
            "closed_form_with_context": {
                "peak_allocated_bytes": closed_form.peak_allocated_bytes + context,
                "peak_reserved_bytes": closed_form.peak_reserved_bytes,
            },
        }


def trace_estimate(
    case: Case, judged: Estimate, *, progress: Progress | None = None
) -> TracedEstimate:
    """Trace one configuration. Raises where it cannot be traced."""
    obstacle = find_trace_obstacle(case.strategy)
    if obstacle:
        raise UsageError(
            f"This job cannot be traced: {obstacle}.",
            remedy="leave --trace out    (the closed forms estimate it)",
        )
    tracer = choose_tracer(case.spec, case.node, asked=True, progress=progress)
    assert isinstance(tracer, ModelTracer), "asked for, a tracer comes or an error is raised"
    room = max(1, judged.gpu.capacity_bytes - judged.gpu.context_bytes)
    found = tracer.trace([TraceRequest(strategy=case.strategy, node=case.node, room_bytes=room)])[0]
    if found.traced is None:
        raise SetupError(
            f"This job cannot be traced: {found.problem}.",
            remedy=found.remedy or "leave --trace out    (the closed forms estimate it)",
        )
    return TracedEstimate(
        case=case,
        tracer=tracer,
        room_bytes=room,
        traced=found.traced,
        operations=found.operations,
    )
