"""From a job to its traced memory: record, extend to full depth, replay, sum up."""

from __future__ import annotations

import time

from tightfit.core.strategy import Strategy
from tightfit.estimate.trace.ask import Answer, list_versions
from tightfit.estimate.trace.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    Replay,
    find_smallest_capacity,
    replay,
)
from tightfit.estimate.trace.recording import Recording
from tightfit.estimate.trace.result import TracedMemory
from tightfit.estimate.trace.selective import find_fewest_recomputed
from tightfit.estimate.trace.summary import (
    OTHER_PROCESSES,
    build_timeline,
    describe_peak,
    list_stage_peaks,
)
from tightfit.train.tracing.beside import fork_beside
from tightfit.train.tracing.depths import DepthTracer
from tightfit.train.tracing.job import TraceJob, find_obstacle


class CannotTraceError(Exception):
    """This job is beyond the tracer; the closed form still speaks of it."""


def trace(job: TraceJob) -> Answer:
    """Memory of the job on one card, and how many layers it recomputes where it may choose.

    Recorded from a fake run, replayed through a model of torch's allocator; the operations of
    its step come along.
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
    with fork_beside(1) as beside:  # it takes the longest
        smallest = beside.submit(
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
    return Answer(
        traced=traced,
        fewest_recomputed=fewest,
        operations=None if log is None else log.shortened(),
    )


TIES_FRACTION = 0.005
"""Of the capacity, without expandable segments: the addresses of blocks of one size decide which is
taken, and no trace knows where the driver puts segments (h200_trace.json: 0.3% too low once)."""


def _allow_for_ties(capacity_bytes: int, settings: AllocatorSettings) -> int:
    if settings.expandable_segments:
        return capacity_bytes
    return capacity_bytes + int(TIES_FRACTION * capacity_bytes)


def _find_fewest(tracer: DepthTracer, room_bytes: int, settings: AllocatorSettings) -> int | None:
    """The fewest recomputed layers with which the job never has to give memory back."""

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
    """What a trace would get wrong is refused."""
    obstacle = find_obstacle(strategy)
    if obstacle:
        raise CannotTraceError(obstacle)
