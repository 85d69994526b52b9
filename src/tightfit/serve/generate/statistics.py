"""Statistics of a run of `generate`: what was measured, and what is estimated from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from pydantic import BaseModel, ConfigDict

from tightfit.engines.protocol import EngineInfo
from tightfit.estimate.inference import (
    InferenceEstimate,
    estimate_answer_flops,
    estimate_read_fraction,
)
from tightfit.models.spec import ModelSpec
from tightfit.serve.generate.bottleneck import Signs, name_bottleneck
from tightfit.serve.generate.job import Timing
from tightfit.serve.generate.timeline import Timeline, Traffic, sum_timeline


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Percentiles(_Frozen):
    """Of seconds, one value per answer: the smallest that so many percent do not exceed."""

    p50: float
    p90: float
    p99: float


class Rates(_Frozen):
    """Tokens over the time of answering, loading left out."""

    prompt_per_second: float
    new_per_second: float
    total_per_second: float
    prompt_per_minute: float
    new_per_minute: float
    total_per_minute: float


class DiskUse(_Frozen):
    """What the kernel says this process made disks read. None: it does not say."""

    load_bytes: int | None
    answer_bytes: int | None
    weight_file_bytes: int | None
    cached_fraction: float | None
    """Share of the weight files that loading found in the page cache."""


class MemoryTraffic(_Frozen):
    """Bytes through the device's memory, estimated: weights once a pass, and keys and values."""

    num_passes: float
    bytes_moved: float
    average_bytes_per_second: float
    peak_bytes_per_second: float
    """Over the busiest second."""
    measured_ceiling_bytes_per_second: float | None
    """What a plain copy reached on the same device, reading and writing counted."""
    paper_ceiling_bytes_per_second: float | None
    average_fraction: float | None
    """Of the measured ceiling."""
    peak_fraction: float | None


class Arithmetic(_Frozen):
    """FLOPs, counted from the model's shapes."""

    flops: float
    flops_per_second: float
    measured_ceiling_flops_per_second: float | None
    """What a large matrix product reached on the same device."""
    paper_ceiling_flops_per_second: float | None
    fraction: float | None
    """Of the measured ceiling, else of the one on paper."""


class PeakMemory(_Frozen):
    """The most that was held, beside what was predicted."""

    device_bytes: int | None
    """On the card; on a CPU the process's resident memory."""
    allocated_bytes: int | None
    """Of it in live tensors, where torch manages the card."""
    host_bytes: int
    predicted_bytes: int | None
    predicted_parts: dict[str, int] | None


class Statistics(_Frozen):
    """Everything that is said at the end of a run."""

    model: str
    engine: str
    format: str
    device: str
    why: str
    num_prompts: int
    num_samples: int
    num_answers: int
    """Of this run."""
    num_earlier_answers: int
    """Taken over from a run that was interrupted."""
    num_failed: int
    num_cut: int
    """Ended by the limit on new tokens."""
    prompt_tokens: int
    cached_prompt_tokens: int
    new_tokens: int
    load_seconds: float
    seconds: float
    rates: Rates
    first_token_seconds: Percentiles
    """From handing in, waiting for a slot included."""
    answer_seconds: Percentiles
    num_slots: int
    mean_active: float
    disk: DiskUse
    traffic: MemoryTraffic
    arithmetic: Arithmetic
    memory: PeakMemory
    energy_joules: float | None
    predicted_new_tokens_per_second: float | None
    bottleneck: str
    """Its kind, in a few words."""
    sentence: str
    """What held the run back, and what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The device's own limits. None: not known, or not measured."""

    copy_bytes_per_second: float | None = None
    paper_bytes_per_second: float | None = None
    matmul_flops_per_second: float | None = None
    paper_flops_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the machine said of the run."""

    load_seconds: float
    load_disk_bytes: int | None = None
    answer_disk_bytes: int | None = None
    weight_file_bytes: int | None = None
    device_peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    host_peak_bytes: int = 0
    energy_joules: float | None = None
    idle_gpu: str | None = None
    is_offloaded: bool = False
    cores_fraction: float | None = None
    num_passes: float | None = None
    """The engine's own count, where it keeps one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One finished run, as the command knows it."""

    info: EngineInfo
    spec: ModelSpec | None
    timings: Sequence[Timing]
    num_prompts: int
    num_samples: int
    num_earlier: int
    num_failed: int
    measured: Measured
    ceilings: Ceilings
    prediction: InferenceEstimate | None = None


def compute_statistics(facts: RunFacts) -> Statistics:
    """All figures of a run that answered something."""
    info, timings, measured = facts.info, facts.timings, facts.measured
    timeline = _timeline(facts)
    seconds = timeline.seconds
    traffic = _traffic(timeline, facts.ceilings)
    arithmetic = _arithmetic(facts, seconds)
    found = name_bottleneck(_signs(facts, timeline, traffic, arithmetic))
    prompt, new = (
        _sum(t.num_prompt_tokens for t in timings),
        _sum(t.num_new_tokens for t in timings),
    )
    expected = facts.prediction
    return Statistics(
        model=info.model,
        engine=f"{info.engine} {info.version}".strip(),
        format=info.format,
        device=info.device,
        why=info.why,
        num_prompts=facts.num_prompts,
        num_samples=facts.num_samples,
        num_answers=len(timings),
        num_earlier_answers=facts.num_earlier,
        num_failed=facts.num_failed,
        num_cut=_sum(t.is_cut for t in timings),
        prompt_tokens=prompt,
        cached_prompt_tokens=_sum(t.num_cached_tokens for t in timings),
        new_tokens=new,
        load_seconds=measured.load_seconds,
        seconds=seconds,
        rates=_rates(prompt, new, seconds),
        first_token_seconds=percentiles([t.first_token_s - t.submitted_s for t in timings]),
        answer_seconds=percentiles([t.finished_s - t.submitted_s for t in timings]),
        num_slots=info.num_slots,
        mean_active=timeline.mean_active,
        disk=_disk(measured),
        traffic=traffic,
        arithmetic=arithmetic,
        memory=PeakMemory(
            device_bytes=measured.device_peak_bytes,
            allocated_bytes=measured.allocated_peak_bytes,
            host_bytes=measured.host_peak_bytes,
            predicted_bytes=None if expected is None else expected.peak_bytes,
            predicted_parts=None if expected is None else expected.components,
        ),
        energy_joules=measured.energy_joules,
        predicted_new_tokens_per_second=(
            None if expected is None else expected.new_tokens_per_second
        ),
        bottleneck=found.kind.value,
        sentence=found.sentence,
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """By nearest rank: each is one of the values."""
    ordered = sorted(values)

    def at(percent: int) -> float:
        return ordered[max(0, ceil(percent / 100 * len(ordered)) - 1)]

    return Percentiles(p50=at(50), p90=at(90), p99=at(99))


def _timeline(facts: RunFacts) -> Timeline:
    info = facts.info
    share = 1.0
    if facts.spec is not None:
        share = estimate_read_fraction(facts.spec, num_active=info.num_slots)
    return sum_timeline(
        facts.timings,
        Traffic(share * info.weight_bytes, info.kv_bytes_per_token),
        num_slots=info.num_slots,
        num_passes=facts.measured.num_passes,
    )


def _rates(prompt: int, new: int, seconds: float) -> Rates:
    return Rates(
        prompt_per_second=prompt / seconds,
        new_per_second=new / seconds,
        total_per_second=(prompt + new) / seconds,
        prompt_per_minute=60 * prompt / seconds,
        new_per_minute=60 * new / seconds,
        total_per_minute=60 * (prompt + new) / seconds,
    )


def _traffic(timeline: Timeline, ceilings: Ceilings) -> MemoryTraffic:
    average = timeline.bytes_moved / timeline.seconds
    ceiling = ceilings.copy_bytes_per_second
    return MemoryTraffic(
        num_passes=timeline.num_passes,
        bytes_moved=timeline.bytes_moved,
        average_bytes_per_second=average,
        peak_bytes_per_second=timeline.peak_bytes_per_second,
        measured_ceiling_bytes_per_second=ceiling,
        paper_ceiling_bytes_per_second=ceilings.paper_bytes_per_second,
        average_fraction=average / ceiling if ceiling else None,
        peak_fraction=timeline.peak_bytes_per_second / ceiling if ceiling else None,
    )


def _arithmetic(facts: RunFacts, seconds: float) -> Arithmetic:
    flops = _sum_flops(facts)
    ceilings = facts.ceilings
    ceiling = ceilings.matmul_flops_per_second or ceilings.paper_flops_per_second
    return Arithmetic(
        flops=flops,
        flops_per_second=flops / seconds,
        measured_ceiling_flops_per_second=ceilings.matmul_flops_per_second,
        paper_ceiling_flops_per_second=ceilings.paper_flops_per_second,
        fraction=flops / seconds / ceiling if ceiling else None,
    )


def _sum_flops(facts: RunFacts) -> float:
    if facts.spec is None:  # a family we have no shapes of: two per parameter and token
        read = sum(
            t.num_prompt_tokens - t.num_cached_tokens + t.num_new_tokens for t in facts.timings
        )
        return 2.0 * facts.info.num_params * read
    return sum(
        estimate_answer_flops(
            facts.spec,
            num_prompt=t.num_prompt_tokens,
            num_new=t.num_new_tokens,
            num_cached=t.num_cached_tokens,
        )
        for t in facts.timings
    )


def _signs(
    facts: RunFacts, timeline: Timeline, traffic: MemoryTraffic, arithmetic: Arithmetic
) -> Signs:
    measured = facts.measured
    return Signs(
        is_cpu=facts.info.device == "cpu",
        idle_gpu=measured.idle_gpu,
        is_offloaded=measured.is_offloaded,
        load_seconds=measured.load_seconds,
        load_disk_bytes=measured.load_disk_bytes,
        seconds=timeline.seconds,
        bandwidth_fraction=traffic.average_fraction,
        compute_fraction=arithmetic.fraction,
        starved_fraction=timeline.starved_fraction,
        mean_active=timeline.mean_active,
        num_slots=facts.info.num_slots,
        num_answers=len(facts.timings),
        cores_fraction=measured.cores_fraction,
        num_hosts=facts.info.num_hosts,
    )


def _disk(measured: Measured) -> DiskUse:
    read, files = measured.load_disk_bytes, measured.weight_file_bytes
    cached = None if read is None or not files else max(0.0, 1 - read / files)
    return DiskUse(
        load_bytes=read,
        answer_bytes=measured.answer_disk_bytes,
        weight_file_bytes=files,
        cached_fraction=cached,
    )


def _sum(numbers: Iterable[int]) -> int:
    return sum(numbers)
