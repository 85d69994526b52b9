"""From a job to its traced memory: record a few layers, extend to full depth, replay, sum up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tightfit.core.strategy import Strategy
from tightfit.core.with_parent import end_with_parent
from tightfit.trace.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    Replay,
    find_smallest_capacity,
    replay,
)
from tightfit.trace.depth import (
    CannotExtend,
    DepthExtrapolation,
    DepthPlan,
    extend_operation_log,
    find_fewest_recomputed,
    list_layer_kinds,
    plan_depths,
)
from tightfit.trace.depth_config import (
    fill_defaults,
    find_extrapolation_obstacle,
    read_depth,
    with_depth,
)
from tightfit.trace.operations import OperationLog
from tightfit.trace.recording import (
    OTHER_PROCESSES,
    Recording,
    build_timeline,
    describe_peak,
    list_stage_peaks,
)
from tightfit.trace.result import TracedMemory
from tightfit.trace.tracer import TraceResponse, list_versions
from tightfit.training.tracing.fake_kernels import import_libraries
from tightfit.training.tracing.job import TraceJob, find_trace_obstacle
from tightfit.training.tracing.record import record_job


def fork_pool(num_processes: int) -> ProcessPoolExecutor:
    """A pool of forked processes: they share what is imported here, and end with this process.

    Without that, one would wait for work forever: it holds both ends of the pipe that its work
    comes through.
    """
    return ProcessPoolExecutor(
        num_processes,
        mp_context=get_context("fork"),
        initializer=_start_child,
        initargs=(os.getpid(),),
    )


def _start_child(parent_pid: int) -> None:
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShallowTraces:
    """Traces of a few layers, from which deeper ones are extrapolated."""

    growth: DepthExtrapolation
    logs: list[OperationLog]
    """Operation logs of the shallowest model and the deeper ones; empty if any has none."""

    def extend(self, plan: DepthPlan) -> Recording:
        recording = self.growth.extend(plan.num_more)
        if self.logs:
            recording.operations = _extend_log(plan, self.logs)
        return recording


def _extend_log(plan: DepthPlan, logs: Sequence[OperationLog]) -> OperationLog | None:
    """None if it cannot be extended: then time comes from the closed form."""
    base, *grown = logs
    try:
        return extend_operation_log(base, grown, list_layer_kinds(plan))
    except CannotExtend:
        return None


def _compare(plan: DepthPlan, recordings: Sequence[Recording]) -> _ShallowTraces:
    base, *grown = recordings
    logs = [one.operations for one in recordings if one.operations is not None]
    is_complete = len(logs) == len(recordings)
    return _ShallowTraces(
        growth=DepthExtrapolation(plan, base, grown), logs=logs if is_complete else []
    )


class DepthTracer:
    """Records one job with any number of recomputed layers; caches its traces."""

    def __init__(self, job: TraceJob) -> None:
        self._job = job
        self.num_layers = read_depth(job.config) or 0
        self.num_traced = 0
        """Layers of the deepest model that ran."""
        self.refusal = (
            "asked for"
            if job.is_full_depth
            else find_extrapolation_obstacle(fill_defaults(job.config))
        )
        self._known: dict[tuple[object, ...], _ShallowTraces] = {}

    def record(self, num_recomputed: int) -> Recording:
        """The full-depth job with its first `num_recomputed` layers recomputed."""
        kinds = self._split(num_recomputed)
        if not self.refusal:
            try:
                return self._extend(kinds, is_recomputed=num_recomputed > 0)
            except CannotExtend as error:
                self.refusal = str(error)
        return self._run(kinds, is_recomputed=num_recomputed > 0)

    def _split(self, num_recomputed: int) -> tuple[int, ...]:
        """Layers of each kind: recomputed ones, then the others."""
        if 0 < num_recomputed < self.num_layers:
            return (num_recomputed, self.num_layers - num_recomputed)
        return (self.num_layers,)

    def _extend(self, kinds: tuple[int, ...], *, is_recomputed: bool) -> Recording:
        plan = plan_depths(kinds)
        if not plan.grown:
            return self._run(kinds, is_recomputed=is_recomputed)
        key = (is_recomputed, plan.base, plan.grown)
        if key not in self._known:
            depths = (plan.base, *plan.grown)
            self._known[key] = _compare(plan, self._run_all(depths, is_recomputed=is_recomputed))
        return self._known[key].extend(plan)

    def _run_all(
        self, depths: Sequence[tuple[int, ...]], *, is_recomputed: bool
    ) -> list[Recording]:
        """Record each depth: the first here, the others in forked processes."""
        self.num_traced = max(self.num_traced, *map(sum, depths))
        jobs = [self._job_of(kinds, is_recomputed=is_recomputed) for kinds in depths]
        import_libraries()
        with fork_pool(len(jobs) - 1) as others:
            waiting = [others.submit(record_job, job) for job in jobs[1:]]
            return [record_job(jobs[0]), *(one.result() for one in waiting)]

    def _run(self, kinds: tuple[int, ...], *, is_recomputed: bool) -> Recording:
        self.num_traced = max(self.num_traced, sum(kinds))
        return record_job(self._job_of(kinds, is_recomputed=is_recomputed))

    def _job_of(self, kinds: tuple[int, ...], *, is_recomputed: bool) -> TraceJob:
        depth = sum(kinds)
        strategy = self._job.strategy.model_copy(
            update={
                "checkpointing": is_recomputed,
                "recomputed_layers": kinds[0] if len(kinds) > 1 else None,
            }
        )
        config = self._job.config
        if depth != self.num_layers:
            config = with_depth(config, depth)
        return self._job.model_copy(update={"strategy": strategy, "config": config})


class CannotTraceError(Exception):
    """The tracer cannot run this job; the closed-form estimate still applies."""


def trace(job: TraceJob) -> TraceResponse:
    """The job's memory on one GPU, its operations, and the fewest layers it must recompute.

    Recorded on fake tensors, then replayed through a model of torch's caching allocator.
    """
    start = time.perf_counter()
    check_traceable(job.strategy)
    settings = AllocatorSettings(expandable_segments=job.expandable_segments)
    tracer = DepthTracer(job)
    num_recomputed = job.strategy.count_recomputed(tracer.num_layers)
    fewest = None
    if job.room_bytes is not None and job.strategy.checkpointing:
        fewest = _find_fewest(tracer, job.room_bytes, settings)
        num_recomputed = num_recomputed if fewest is None else fewest
    recording = tracer.record(num_recomputed)
    training = _until_training_ends(recording)
    with fork_pool(1) as pool:  # the search for the smallest capacity takes longest
        smallest = pool.submit(
            find_smallest_capacity,
            training.sizes,
            training.events,
            settings,
            streams=training.streams,
        )
        unlimited = replay_unlimited(training, settings)
        traced = TracedMemory(
            peak_allocated_bytes=unlimited.peak_allocated_bytes,
            peak_reserved_bytes=unlimited.peak_reserved_bytes,
            stages=list_stage_peaks(recording, CachingAllocator(settings)),
            peak=describe_peak(training),
            timeline=build_timeline(recording),
            smallest_capacity_bytes=_allow_for_ties(smallest.result(), settings),
            num_layers=tracer.num_layers,
            num_traced_layers=tracer.num_traced,
            refusal=tracer.refusal,
            seconds=time.perf_counter() - start,
            versions=list_versions(),
        )
    log = recording.operations
    return TraceResponse(
        traced=traced,
        fewest_recomputed=fewest,
        operations=None if log is None else log.shortened(),
    )


TIES_FRACTION = 0.005
"""Added to the capacity without expandable segments. Between free blocks of one size the allocator
takes the lowest address, which a trace does not know (h200_trace.json: 0.3% too low once)."""


def _allow_for_ties(capacity_bytes: int, settings: AllocatorSettings) -> int:
    if settings.expandable_segments:
        return capacity_bytes
    return capacity_bytes + int(TIES_FRACTION * capacity_bytes)


def _find_fewest(tracer: DepthTracer, room_bytes: int, settings: AllocatorSettings) -> int | None:
    """The fewest recomputed layers with which the allocator never has to free cached blocks."""

    def reserve(num_recomputed: int) -> int:
        training = _until_training_ends(tracer.record(num_recomputed))
        return replay_unlimited(training, settings).peak_reserved_bytes

    return find_fewest_recomputed(reserve, num_layers=tracer.num_layers, room_bytes=room_bytes)


def replay_unlimited(recording: Recording, settings: AllocatorSettings) -> Replay:
    replayed = replay(recording.sizes, recording.events, settings, streams=recording.streams)
    assert replayed is not None, "nothing runs out of memory without a limit"
    return replayed


def _until_training_ends(recording: Recording) -> Recording:
    for position, event in enumerate(recording.events):
        if event > 0 and recording.allocations[event - 1].stage in OTHER_PROCESSES:
            return Recording(allocations=recording.allocations, events=recording.events[:position])
    return recording


def check_traceable(strategy: Strategy) -> None:
    """Raise if a trace of this strategy would be wrong."""
    obstacle = find_trace_obstacle(strategy)
    if obstacle:
        raise CannotTraceError(obstacle)
