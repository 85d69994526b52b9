"""Statistics of a `generate` run: timeline, token rates, memory traffic, and the bottleneck.

Passes and bytes moved are estimated from the times and token counts of single answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import NamedTuple

from tightfit.core.frozen import Frozen
from tightfit.core.units import render_bytes, render_seconds
from tightfit.engines.protocol import EngineInfo
from tightfit.estimation.inference import (
    InferenceEstimate,
    estimate_answer_flops,
    estimate_read_fraction,
)
from tightfit.models.spec import ModelSpec
from tightfit.serving.generate.job import AnswerTiming

# Timeline: passes, slots in use and memory traffic, from the times of single answers.

WINDOW_SECONDS = 1.0
MAX_WINDOWS = 600
SAME_PASS_SECONDS = 2e-3
"""First tokens that come this close together came out of one pass over their prompts."""
_SHORTEST_SECONDS = 1e-6


class PassTraffic(NamedTuple):
    """What one pass and one token move through memory."""

    bytes_per_pass: float
    """Weights, which every pass reads once for all answers under way."""
    kv_bytes_per_token: float
    """Keys and values of one token of context, which every new token of that answer reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One run, summed up. Passes and bytes are estimated from token counts and times."""

    seconds: float
    """From the first request to the last answer."""
    num_passes: float
    """Passes over the model: one for each step of all answers under way, and those over prompts."""
    mean_active: float
    """Answers under way together, averaged over the time in which there were any."""
    starved_fraction: float
    """Of the time until the last request: fewer requests were handed in than there are slots."""
    bytes_moved: float
    peak_bytes_per_second: float
    """Over the busiest second."""


def sum_timeline(
    timings: Sequence[AnswerTiming],
    traffic: PassTraffic,
    *,
    num_slots: int,
    num_passes: float | None = None,
) -> Timeline:
    """Sum up. An answer's tokens are taken to come evenly between its first and its last.

    `num_passes` is the engine's own count, where it keeps one.
    """
    start = min(timing.submitted_s for timing in timings)
    end = max(timing.finished_s for timing in timings)
    spans = _spans(timings)
    over_prompts = _prompt_passes(timings)
    estimated = sum((s.until - s.since) * s.passes_per_second for s in spans) + len(over_prompts)
    # Where the engine counted, its count holds, and the shape over time stays ours.
    scale = num_passes / estimated if num_passes and estimated else 1.0
    windows = _Windows(start, end)
    for span in spans:
        rate = scale * span.passes_per_second * traffic.bytes_per_pass
        rate += span.context_per_second * traffic.kv_bytes_per_token
        windows.add(span.since, span.until, rate)
    for moment, num_tokens in over_prompts:
        amount = scale * traffic.bytes_per_pass + num_tokens * traffic.kv_bytes_per_token
        windows.add_at(moment, amount)
    active = sum((span.until - span.since) * span.num_active for span in spans)
    busy = sum(span.until - span.since for span in spans if span.num_active)
    return Timeline(
        seconds=max(end - start, _SHORTEST_SECONDS),
        num_passes=scale * estimated,
        mean_active=active / busy if busy else 1.0,
        starved_fraction=_starved(timings, num_slots),
        bytes_moved=windows.total,
        peak_bytes_per_second=windows.peak,
    )


class _Span(NamedTuple):
    """A stretch of time in which the same answers are under way."""

    since: float
    until: float
    num_active: int
    passes_per_second: float
    context_per_second: float
    """Tokens of context that new tokens read."""


def _spans(timings: Sequence[AnswerTiming]) -> list[_Span]:
    changes: list[tuple[float, int, float, float]] = []
    for timing in timings:
        steps = timing.num_new_tokens - 1
        if steps <= 0:
            continue
        until = max(timing.finished_s, timing.first_token_s + _SHORTEST_SECONDS)
        rate = steps / (until - timing.first_token_s)
        context = rate * (timing.num_prompt_tokens + timing.num_new_tokens / 2)
        changes.append((timing.first_token_s, 1, rate, context))
        changes.append((until, -1, -rate, -context))
    changes.sort(key=lambda change: change[0])
    spans: list[_Span] = []
    num_active, rates, contexts, since = 0, 0.0, 0.0, 0.0
    for moment, count, rate, context in changes:
        if num_active and moment > since:
            spans.append(_Span(since, moment, num_active, rates / num_active, contexts))
        num_active, rates, contexts = num_active + count, rates + rate, contexts + context
        since = moment
        if not num_active:
            rates = contexts = 0.0  # sums of floats leave crumbs
    return spans


def _prompt_passes(timings: Sequence[AnswerTiming]) -> list[tuple[float, int]]:
    """When prompts were read, and how many tokens' keys and values each pass wrote."""
    passes: list[tuple[float, int]] = []
    for timing in sorted(timings, key=lambda timing: timing.first_token_s):
        fresh = timing.num_prompt_tokens - timing.num_cached_tokens
        if passes and timing.first_token_s - passes[-1][0] <= SAME_PASS_SECONDS:
            passes[-1] = (passes[-1][0], passes[-1][1] + fresh)
        else:
            passes.append((timing.first_token_s, fresh))
    return passes


def _starved(timings: Sequence[AnswerTiming], num_slots: int) -> float:
    start = min(timing.submitted_s for timing in timings)
    last = max(timing.submitted_s for timing in timings)
    if last - start < WINDOW_SECONDS:
        return 0.0
    changes = [(timing.submitted_s, 1) for timing in timings]
    changes += [(timing.finished_s, -1) for timing in timings]
    starved, num_open, since = 0.0, 0, start
    for moment, change in sorted(changes):
        until = min(moment, last)
        if num_open < num_slots and until > since:
            starved += until - since
        num_open, since = num_open + change, max(since, until)
    return starved / (last - start)


class _Windows:
    """Amounts over time, in windows of about a second."""

    def __init__(self, start: float, end: float) -> None:
        length = max(end - start, _SHORTEST_SECONDS)
        self._count = max(1, min(MAX_WINDOWS, int(length / WINDOW_SECONDS)))
        self._width = length / self._count
        self._start = start
        self._amounts = [0.0] * self._count

    @property
    def total(self) -> float:
        return sum(self._amounts)

    @property
    def peak(self) -> float:
        return max(self._amounts) / self._width

    def add(self, since: float, until: float, per_second: float) -> None:
        index = self._index(since)
        while since < until and index < self._count:
            edge = self._start + (index + 1) * self._width
            upto = until if index == self._count - 1 else min(until, edge)
            self._amounts[index] += max(0.0, upto - since) * per_second
            since, index = upto, index + 1

    def add_at(self, moment: float, amount: float) -> None:
        self._amounts[self._index(moment)] += amount

    def _index(self, moment: float) -> int:
        return min(max(int((moment - self._start) / self._width), 0), self._count - 1)


# Bottleneck: what a run waited for most, and what to do about it.

BUSY_FRACTION = 0.5
"""Of a measured ceiling: above it, that is what the run waits for."""
STARVED_FRACTION = 0.2
EMPTY_SLOTS_FRACTION = 0.6
IDLE_CORES_FRACTION = 0.6
BUSY_CORES_FRACTION = 0.85
MAX_SUGGESTED_SLOTS = 256


class BottleneckKind(str, Enum):
    """What there was too little of."""

    GPU_UNUSED = "cpu instead of gpu"
    DISK = "disk"
    LOADING = "loading"
    PCIE = "pcie"
    FEEDING = "waiting for prompts"
    MEMORY_BANDWIDTH = "memory bandwidth"
    COMPUTE = "compute"
    BATCH = "batch too small"
    OTHER_WORK = "other processes"
    HOSTS = "other hosts"
    OVERHEAD = "overhead"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSigns:
    """What was seen of a run. None: could not be measured."""

    is_cpu: bool
    idle_gpu: str | None = None
    """A GPU that this machine has and the run did not use."""
    is_offloaded: bool = False
    """Weights lie in host memory and cross the bus for every pass."""
    load_seconds: float = 0.0
    load_disk_bytes: int | None = None
    seconds: float
    bandwidth_fraction: float | None = None
    """Average traffic over the measured copy ceiling."""
    compute_fraction: float | None = None
    starved_fraction: float = 0.0
    mean_active: float
    num_slots: int
    num_answers: int
    cores_fraction: float | None = None
    """On a CPU: core time over wall time and threads."""
    num_hosts: int = 0
    """Other machines that hold a part of the model, of which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The verdict."""

    kind: BottleneckKind
    sentence: str


def name_bottleneck(signs: RunSigns) -> Bottleneck:
    """The one thing to change first. Mistakes come before limits, limits before small batches."""
    for look in (_mistake, _loading, _surroundings, _limit, _cores, _batch):
        found = look(signs)
        if found is not None:
            return found
    return Bottleneck(
        kind=BottleneckKind.OVERHEAD,
        sentence="Neither memory nor arithmetic was busy with every slot in use: each step waits "
        f"for the program around the model; {_more_slots(signs)} shares that wait.",
    )


def suggest_slots(signs: RunSigns) -> int | None:
    """The next number of slots to try; None where more would stay empty."""
    wanted = 4 * signs.num_slots if signs.num_slots < 8 else 2 * signs.num_slots
    slots = min(wanted, MAX_SUGGESTED_SLOTS, signs.num_answers)
    return slots if slots > signs.num_slots else None


def _mistake(signs: RunSigns) -> Bottleneck | None:
    if signs.is_cpu and signs.idle_gpu:
        return Bottleneck(
            kind=BottleneckKind.GPU_UNUSED,
            sentence=f"The CPU did the work while {signs.idle_gpu} stood idle: --device cuda, and "
            "`tightfit doctor` says why it was not taken.",
        )
    if signs.is_offloaded:
        return Bottleneck(
            kind=BottleneckKind.PCIE,
            sentence="PCIe: part of the weights lies in host memory and crosses the bus for every "
            "pass; --weights nf4 or fewer --parallel would keep them on the card.",
        )
    return None


def _loading(signs: RunSigns) -> Bottleneck | None:
    if signs.load_seconds <= signs.seconds:
        return None
    took = (
        f"loading took {render_seconds(signs.load_seconds)}, answering "
        f"{render_seconds(signs.seconds)}"
    )
    if signs.load_disk_bytes and signs.load_disk_bytes / signs.load_seconds > 20e6:
        rate = render_bytes(signs.load_disk_bytes / signs.load_seconds)
        return Bottleneck(
            kind=BottleneckKind.DISK,
            sentence=f"Disk: {took}, reading {render_bytes(signs.load_disk_bytes)} at {rate}/s; "
            "ask more prompts in one run, or keep the model on a faster disk.",
        )
    return Bottleneck(
        kind=BottleneckKind.LOADING,
        sentence=f"Loading: {took}, though little came from the disk; ask more prompts in one "
        "run, or keep the model loaded: tightfit serve.",
    )


def _surroundings(signs: RunSigns) -> Bottleneck | None:
    if signs.starved_fraction > STARVED_FRACTION:
        return Bottleneck(
            kind=BottleneckKind.FEEDING,
            sentence=f"Waiting for prompts: for {signs.starved_fraction:.0%} of the time fewer "
            f"were ready than the {signs.num_slots} slots take; shorter prompts or a free core "
            "for preparing them would help.",
        )
    if signs.num_hosts:
        hosts = "another host" if signs.num_hosts == 1 else f"{signs.num_hosts} other hosts"
        return Bottleneck(
            kind=BottleneckKind.HOSTS,
            sentence=f"Not known: part of the model was computed on {hosts}, and only this machine "
            "was measured; look at the load there and at the network between.",
        )
    is_hurt = not (signs.bandwidth_fraction or 0) > BUSY_FRACTION
    cores = signs.cores_fraction
    if signs.is_cpu and cores is not None and cores < IDLE_CORES_FRACTION and is_hurt:
        return Bottleneck(
            kind=BottleneckKind.OTHER_WORK,
            sentence=f"Cores: the process got {cores:.0%} of the core time it asked for; other "
            "processes hold the rest, or it has more threads than cores (--threads, "
            "OMP_NUM_THREADS).",
        )
    return None


def _limit(signs: RunSigns) -> Bottleneck | None:
    compute, bandwidth = signs.compute_fraction or 0.0, signs.bandwidth_fraction or 0.0
    if max(compute, bandwidth) < BUSY_FRACTION:
        return None
    if compute >= bandwidth:
        return Bottleneck(
            kind=BottleneckKind.COMPUTE,
            sentence=f"Compute: {compute:.0%} of what the device was measured to multiply; "
            "a smaller model or a faster device is what helps.",
        )
    helps = "fewer bytes per weight (tightfit quantize) is what helps."
    if suggest_slots(signs) is not None:
        shared = f"{signs.mean_active:.1f} answers at a time"
        helps = f"the weights are read for {shared}, and {_more_slots(signs)} shares each reading."
    return Bottleneck(
        kind=BottleneckKind.MEMORY_BANDWIDTH,
        sentence=f"Memory bandwidth: {bandwidth:.0%} of the measured copy rate; {helps}",
    )


def _cores(signs: RunSigns) -> Bottleneck | None:
    """Kernels of packed weights stay far below what a plain product reaches, cores busy or not."""
    busy = signs.cores_fraction
    if not signs.is_cpu or busy is None or busy < BUSY_CORES_FRACTION:
        return None
    return Bottleneck(
        kind=BottleneckKind.COMPUTE,
        sentence=f"Compute: the cores that it may use were busy for {busy:.0%} of the time; a "
        "smaller model or a faster device is what helps, or more --threads where cores are idle.",
    )


def _batch(signs: RunSigns) -> Bottleneck | None:
    if signs.mean_active < EMPTY_SLOTS_FRACTION * signs.num_slots:
        return Bottleneck(
            kind=BottleneckKind.BATCH,
            sentence=f"Batch too small: on average {signs.mean_active:.1f} of {signs.num_slots} "
            "slots were in use; more prompts in one run would fill them.",
        )
    slots = suggest_slots(signs)
    if slots is None:
        return None
    return Bottleneck(
        kind=BottleneckKind.BATCH,
        sentence=f"Batch too small: {signs.mean_active:.1f} answers at a time keep neither memory "
        f"nor arithmetic busy; --parallel {slots} would use the same passes for more answers.",
    )


def _more_slots(signs: RunSigns) -> str:
    slots = suggest_slots(signs)
    return "a larger --parallel" if slots is None else f"--parallel {slots}"


class Percentiles(Frozen):
    """Of seconds, one value per answer: the smallest that so many percent do not exceed."""

    p50: float
    p90: float
    p99: float


class Rates(Frozen):
    """Tokens over the time of answering, loading left out."""

    prompt_per_second: float
    new_per_second: float
    total_per_second: float
    prompt_per_minute: float
    new_per_minute: float
    total_per_minute: float


class DiskUse(Frozen):
    """What the kernel says this process made disks read. None: it does not say."""

    load_bytes: int | None
    answer_bytes: int | None
    weight_file_bytes: int | None
    cached_fraction: float | None
    """Share of the weight files that loading found in the page cache."""


class MemoryTraffic(Frozen):
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


class Arithmetic(Frozen):
    """FLOPs, counted from the model's shapes."""

    flops: float
    flops_per_second: float
    measured_ceiling_flops_per_second: float | None
    """What a large matrix product reached on the same device."""
    paper_ceiling_flops_per_second: float | None
    fraction: float | None
    """Of the measured ceiling, else of the one on paper."""


class PeakMemory(Frozen):
    """The most that was held, beside what was predicted."""

    device_bytes: int | None
    """On the card; on a CPU the process's resident memory."""
    allocated_bytes: int | None
    """Of it in live tensors, where torch manages the card."""
    host_bytes: int
    predicted_bytes: int | None
    predicted_parts: dict[str, int] | None


class GenerateStatistics(Frozen):
    """Everything that is reported at the end of a run."""

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
class DeviceCeilings:
    """The device's own limits. None: not known, or not measured."""

    copy_bytes_per_second: float | None = None
    paper_bytes_per_second: float | None = None
    matmul_flops_per_second: float | None = None
    paper_flops_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurements:
    """What was measured of the run."""

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
    timings: Sequence[AnswerTiming]
    num_prompts: int
    num_samples: int
    num_earlier: int
    num_failed: int
    measured: RunMeasurements
    ceilings: DeviceCeilings
    prediction: InferenceEstimate | None = None


def compute_statistics(facts: RunFacts) -> GenerateStatistics:
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
    return GenerateStatistics(
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
        PassTraffic(share * info.weight_bytes, info.kv_bytes_per_token),
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


def _traffic(timeline: Timeline, ceilings: DeviceCeilings) -> MemoryTraffic:
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
) -> RunSigns:
    measured = facts.measured
    return RunSigns(
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


def _disk(measured: RunMeasurements) -> DiskUse:
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
