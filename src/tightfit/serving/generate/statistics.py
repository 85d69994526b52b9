"""Statistics of a `generate` run: token rates, memory traffic, arithmetic, and the bottleneck.

Passes and bytes moved are estimated from the times and token counts of single answers.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from itertools import chain
from math import ceil
from typing import NamedTuple

from tightfit.core.dtypes import Dtype
from tightfit.core.frozen import Frozen
from tightfit.core.units import MIB, render_bytes, render_seconds
from tightfit.engines.protocol import Done, EngineInfo, FinishReason
from tightfit.estimation.inference import estimate_answer_flops, estimate_read_fraction
from tightfit.hardware.types import Gpu
from tightfit.models.spec import ModelSpec
from tightfit.runtime.libraries import is_out_of_memory
from tightfit.serving.generate.prediction import InferencePrediction
from tightfit.serving.generate.run import EngineRun, GenerateJob

# What is reported. The names are the keys of --json and --stats.


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
    """Disk reads of this process, as the kernel counts them. None: it does not count."""

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
    """Peak memory beside its prediction."""

    device_bytes: int | None
    """On the GPU; on a CPU the process's resident memory."""
    allocated_bytes: int | None
    """Of it in live tensors, where torch manages the GPU."""
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
    """What limited the run, and what to do about it."""


def sum_run(
    run: EngineRun,
    job: GenerateJob,
    prediction: InferencePrediction | None,
    *,
    num_earlier: int,
    ceilings: DeviceCeilings | None = None,
) -> GenerateStatistics:
    """All figures of a run that answered something.

    Measures the device's limits where they are not given: the model has left it by now.
    """
    info, timings, measured = run.info, run.timings, run.measured
    spec = expected = files = None
    if prediction is not None:
        spec, expected = prediction.spec, prediction.estimate
        files = prediction.weight_file_bytes
        ceilings = ceilings or probe_ceilings(
            prediction.gpu, info.device, prediction.job.compute, num_threads=run.num_threads
        )
    ceilings = ceilings or DeviceCeilings()
    read_fraction = 1.0
    if spec is not None:
        read_fraction = estimate_read_fraction(spec, num_active=info.num_slots)
    timeline = sum_timeline(
        timings,
        bytes_per_pass=read_fraction * info.weight_bytes,
        kv_bytes_per_token=info.kv_bytes_per_token,
        num_slots=info.num_slots,
        num_passes=measured.num_passes,
    )
    seconds = timeline.seconds
    prompt = sum(t.num_prompt_tokens for t in timings)
    new = sum(t.num_new_tokens for t in timings)
    average = timeline.bytes_moved / seconds
    copy = ceilings.copy_bytes_per_second
    flops = _sum_flops(info, spec, timings)
    most_flops = ceilings.matmul_flops_per_second or ceilings.paper_flops_per_second
    bandwidth_fraction = average / copy if copy else None
    compute_fraction = flops / seconds / most_flops if most_flops else None
    disk = measured.load_disk_bytes
    found = name_bottleneck(
        run, timeline, bandwidth_fraction=bandwidth_fraction, compute_fraction=compute_fraction
    )
    return GenerateStatistics(
        model=info.model,
        engine=f"{info.engine} {info.version}".strip(),
        format=info.format,
        device=info.device,
        why=info.why,
        num_prompts=len(job.prompts),
        num_samples=job.num_samples,
        num_answers=len(timings),
        num_earlier_answers=num_earlier,
        num_failed=len(run.failures),
        num_cut=sum(t.reason is FinishReason.LENGTH for t in timings),
        prompt_tokens=prompt,
        cached_prompt_tokens=sum(t.num_cached_tokens for t in timings),
        new_tokens=new,
        load_seconds=measured.load_seconds,
        seconds=seconds,
        rates=Rates(
            prompt_per_second=prompt / seconds,
            new_per_second=new / seconds,
            total_per_second=(prompt + new) / seconds,
            prompt_per_minute=60 * prompt / seconds,
            new_per_minute=60 * new / seconds,
            total_per_minute=60 * (prompt + new) / seconds,
        ),
        first_token_seconds=percentiles([t.first_token_s - t.submitted_s for t in timings]),
        answer_seconds=percentiles([t.finished_s - t.submitted_s for t in timings]),
        num_slots=info.num_slots,
        mean_active=timeline.mean_active,
        disk=DiskUse(
            load_bytes=disk,
            answer_bytes=measured.answer_disk_bytes,
            weight_file_bytes=files,
            cached_fraction=None if disk is None or not files else max(0.0, 1 - disk / files),
        ),
        traffic=MemoryTraffic(
            num_passes=timeline.num_passes,
            bytes_moved=timeline.bytes_moved,
            average_bytes_per_second=average,
            peak_bytes_per_second=timeline.peak_bytes_per_second,
            measured_ceiling_bytes_per_second=copy,
            paper_ceiling_bytes_per_second=ceilings.paper_bytes_per_second,
            average_fraction=bandwidth_fraction,
            peak_fraction=timeline.peak_bytes_per_second / copy if copy else None,
        ),
        arithmetic=Arithmetic(
            flops=flops,
            flops_per_second=flops / seconds,
            measured_ceiling_flops_per_second=ceilings.matmul_flops_per_second,
            paper_ceiling_flops_per_second=ceilings.paper_flops_per_second,
            fraction=compute_fraction,
        ),
        memory=PeakMemory(
            device_bytes=measured.device_peak_bytes,
            allocated_bytes=measured.allocated_peak_bytes,
            host_bytes=measured.host_peak_bytes,
            predicted_bytes=None if expected is None else expected.peak_bytes,
            predicted_parts=None if expected is None else expected.components,
        ),
        energy_joules=measured.energy_joules,
        predicted_new_tokens_per_second=None
        if prediction is None
        else prediction.new_tokens_per_second,
        bottleneck=found.kind.value,
        sentence=found.sentence,
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """By nearest rank: each is one of the values."""
    ordered = sorted(values)
    p50, p90, p99 = (
        ordered[max(0, ceil(percent / 100 * len(ordered)) - 1)] for percent in (50, 90, 99)
    )
    return Percentiles(p50=p50, p90=p90, p99=p99)


def _sum_flops(info: EngineInfo, spec: ModelSpec | None, timings: Sequence[Done]) -> float:
    if spec is None:  # a family we have no shapes of: two per parameter and token
        read = sum(t.num_prompt_tokens - t.num_cached_tokens + t.num_new_tokens for t in timings)
        return 2.0 * info.num_params * read
    return sum(
        estimate_answer_flops(
            spec,
            num_prompt=t.num_prompt_tokens,
            num_new=t.num_new_tokens,
            num_cached=t.num_cached_tokens,
        )
        for t in timings
    )


# Timeline: passes, slots in use and memory traffic, from the times of single answers.

WINDOW_SECONDS = 1.0
MAX_WINDOWS = 600
SAME_PASS_SECONDS = 2e-3
"""First tokens that come this close together came out of one pass over their prompts."""
_SHORTEST_SECONDS = 1e-6


class Timeline(NamedTuple):
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
    timings: Sequence[Done],
    *,
    bytes_per_pass: float,
    kv_bytes_per_token: float,
    num_slots: int,
    num_passes: float | None = None,
) -> Timeline:
    """Sum up. An answer's tokens are taken to come evenly between its first and its last.

    Every pass reads the weights once for all answers under way; every new token reads the keys
    and values of its context. `num_passes` is the engine's own count, where it keeps one.
    """
    import numpy as np

    start = min(t.submitted_s for t in timings)
    length = max(max(t.finished_s for t in timings) - start, _SHORTEST_SECONDS)

    # Each answer adds its rate of steps, and of context tokens read, at its first token, and
    # takes them away at its last. Between two of these moments everything is constant.
    changes = [(start, 0, 0.0, 0.0)]
    for timing in timings:
        steps = timing.num_new_tokens - 1
        if steps <= 0:
            continue
        since, until = timing.first_token_s, timing.finished_s
        until = max(until, since + _SHORTEST_SECONDS)
        rate = steps / (until - since)
        context = rate * (timing.num_prompt_tokens + timing.num_new_tokens / 2)
        changes += [(since, 1, rate, context), (until, -1, -rate, -context)]
    moments, *sums = np.array(sorted(changes)).T
    active, rates, contexts = (np.cumsum(column)[:-1] for column in sums)
    spans = np.diff(moments)
    passes_per_second = np.divide(rates, active, out=np.zeros_like(rates), where=active > 0)

    prompt_passes = _prompt_passes(timings)
    estimated = float(spans @ passes_per_second) + len(prompt_passes)
    # Where the engine counted, its count is used; the shape over time stays estimated.
    scale = num_passes / estimated if num_passes else 1.0

    bytes_per_second = scale * bytes_per_pass * passes_per_second
    bytes_per_second += kv_bytes_per_token * np.where(active > 0, contexts, 0.0)
    moved = np.concatenate(([0.0], np.cumsum(spans * bytes_per_second)))
    num_windows = max(1, min(MAX_WINDOWS, int(length / WINDOW_SECONDS)))
    edges = start + np.linspace(0.0, length, num_windows + 1)
    windows = np.diff(np.interp(edges, moments, moved))
    for moment, num_tokens in prompt_passes:
        window = min(int((moment - start) / length * num_windows), num_windows - 1)
        windows[window] += scale * bytes_per_pass + num_tokens * kv_bytes_per_token
    busy = float(spans[active > 0].sum())
    return Timeline(
        seconds=length,
        num_passes=scale * estimated,
        mean_active=float(spans @ active) / busy if busy else 1.0,
        starved_fraction=_starved_fraction(timings, num_slots),
        bytes_moved=float(windows.sum()),
        peak_bytes_per_second=float(windows.max()) * num_windows / length,
    )


def _prompt_passes(timings: Sequence[Done]) -> list[tuple[float, int]]:
    """When prompts were read, and how many tokens' keys and values each pass wrote."""
    passes: list[tuple[float, int]] = []
    for timing in sorted(timings, key=lambda timing: timing.first_token_s):
        fresh = timing.num_prompt_tokens - timing.num_cached_tokens
        if passes and timing.first_token_s - passes[-1][0] <= SAME_PASS_SECONDS:
            passes[-1] = (passes[-1][0], passes[-1][1] + fresh)
        else:
            passes.append((timing.first_token_s, fresh))
    return passes


def _starved_fraction(timings: Sequence[Done], num_slots: int) -> float:
    first, last = (pick(t.submitted_s for t in timings) for pick in (min, max))
    if last - first < WINDOW_SECONDS:
        return 0.0
    changes = sorted(
        [(t.submitted_s, 1) for t in timings] + [(min(t.finished_s, last), -1) for t in timings]
    )
    starved, num_open, since = 0.0, 0, first
    for moment, change in changes:
        if num_open < num_slots:
            starved += moment - since
        num_open, since = num_open + change, moment
    return starved / (last - first)


# Bottleneck: what a run waited for most, and what to do about it.

BUSY_FRACTION = 0.5
"""Of a measured ceiling: above it, that is what the run waits for."""
STARVED_FRACTION = 0.2
EMPTY_SLOTS_FRACTION = 0.6
IDLE_CORES_FRACTION = 0.6
BUSY_CORES_FRACTION = 0.85
MAX_SUGGESTED_SLOTS = 256
SLOWEST_DISK_BYTES_PER_SECOND = 20e6
"""Below it, the time of loading went elsewhere."""


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


class Bottleneck(NamedTuple):
    """The verdict."""

    kind: BottleneckKind
    sentence: str


def name_bottleneck(
    run: EngineRun,
    timeline: Timeline,
    *,
    bandwidth_fraction: float | None,
    compute_fraction: float | None,
) -> Bottleneck:
    """The one thing to change first. Mistakes come before limits, limits before small batches.

    The fractions are of the measured ceilings; None: not measured.
    """
    bandwidth, compute = bandwidth_fraction or 0.0, compute_fraction or 0.0
    mistakes = _find_mistakes(run, timeline, bandwidth)
    return next(chain(mistakes, _find_limits(run, timeline, bandwidth, compute)))


def _find_mistakes(run: EngineRun, timeline: Timeline, bandwidth: float) -> Iterator[Bottleneck]:
    """Why the device did not get to work, or worked for others."""
    kinds, measured, info = BottleneckKind, run.measured, run.info
    is_cpu = info.device == "cpu"
    if is_cpu and measured.idle_gpu:
        yield Bottleneck(
            kinds.GPU_UNUSED,
            f"The CPU did the work while {measured.idle_gpu} stood idle: --device cuda, and "
            "`tightfit doctor` says why it was not taken.",
        )
    if measured.is_offloaded:
        yield Bottleneck(
            kinds.PCIE,
            "PCIe: part of the weights lies in host memory and crosses the bus for every pass; "
            "--weights nf4 or fewer --parallel would keep them on the card.",
        )
    if measured.load_seconds > timeline.seconds:
        took = (
            f"loading took {render_seconds(measured.load_seconds)}, answering "
            f"{render_seconds(timeline.seconds)}"
        )
        rate = (measured.load_disk_bytes or 0) / measured.load_seconds
        if rate > SLOWEST_DISK_BYTES_PER_SECOND:
            yield Bottleneck(
                kinds.DISK,
                f"Disk: {took}, reading {render_bytes(measured.load_disk_bytes or 0)} at "
                f"{render_bytes(rate)}/s; ask more prompts in one run, or keep the model on a "
                "faster disk.",
            )
        yield Bottleneck(
            kinds.LOADING,
            f"Loading: {took}, though little came from the disk; ask more prompts in one run, or "
            "keep the model loaded: tightfit serve.",
        )
    if timeline.starved_fraction > STARVED_FRACTION:
        yield Bottleneck(
            kinds.FEEDING,
            f"Waiting for prompts: for {timeline.starved_fraction:.0%} of the time fewer were "
            f"ready than the {info.num_slots} slots take; shorter prompts or a free core for "
            "preparing them would help.",
        )
    if info.num_hosts:
        hosts = "another host" if info.num_hosts == 1 else f"{info.num_hosts} other hosts"
        yield Bottleneck(
            kinds.HOSTS,
            f"Not known: part of the model was computed on {hosts}, and only this machine was "
            "measured; look at the load there and at the network between.",
        )
    cores = measured.cores_fraction
    is_starved = cores is not None and cores < IDLE_CORES_FRACTION
    if is_cpu and is_starved and bandwidth <= BUSY_FRACTION:
        yield Bottleneck(
            kinds.OTHER_WORK,
            f"Cores: the process got {cores:.0%} of the core time it asked for; other processes "
            "hold the rest, or it has more threads than cores (--threads, OMP_NUM_THREADS).",
        )


def _find_limits(
    run: EngineRun, timeline: Timeline, bandwidth: float, compute: float
) -> Iterator[Bottleneck]:
    """What the device was busy with, or why it was not."""
    kinds, active, num_slots = BottleneckKind, timeline.mean_active, run.info.num_slots
    cores = run.measured.cores_fraction or 0.0
    slots = suggest_slots(num_slots, len(run.timings))
    if compute >= max(bandwidth, BUSY_FRACTION):
        yield Bottleneck(
            kinds.COMPUTE,
            f"Compute: {compute:.0%} of what the device was measured to multiply; a smaller model "
            "or a faster device is what helps.",
        )
    if bandwidth >= BUSY_FRACTION:
        helps = "fewer bytes per weight (tightfit quantize) is what helps."
        if slots is not None:
            helps = (
                f"the weights are read for {active:.1f} answers at a time, and "
                f"--parallel {slots} shares each reading."
            )
        yield Bottleneck(
            kinds.MEMORY_BANDWIDTH,
            f"Memory bandwidth: {bandwidth:.0%} of the measured copy rate; {helps}",
        )
    # Kernels of packed weights stay far below what a plain product reaches, cores busy or not.
    if run.info.device == "cpu" and cores >= BUSY_CORES_FRACTION:
        yield Bottleneck(
            kinds.COMPUTE,
            f"Compute: the cores that it may use were busy for {cores:.0%} of the "
            "time; a smaller model or a faster device is what helps, or more --threads where "
            "cores are idle.",
        )
    if active < EMPTY_SLOTS_FRACTION * num_slots:
        yield Bottleneck(
            kinds.BATCH,
            f"Batch too small: on average {active:.1f} of {num_slots} slots were "
            "in use; more prompts in one run would fill them.",
        )
    if slots is not None:
        yield Bottleneck(
            kinds.BATCH,
            f"Batch too small: {active:.1f} answers at a time keep neither memory nor "
            f"arithmetic busy; --parallel {slots} would use the same passes for more answers.",
        )
    yield Bottleneck(
        kinds.OVERHEAD,
        "Neither memory nor arithmetic was busy with every slot in use: each step waits for the "
        "program around the model; a larger --parallel shares that wait.",
    )


def suggest_slots(num_slots: int, num_answers: int) -> int | None:
    """The next number of slots to try; None where more would stay empty."""
    wanted = 4 * num_slots if num_slots < 8 else 2 * num_slots
    slots = min(wanted, MAX_SUGGESTED_SLOTS, num_answers)
    return slots if slots > num_slots else None


# Device limits: the measured rates of a copy and of a matrix product, and the data sheet.

PROBE_SECONDS = 0.25
CPU_COPY_BYTES = 64 * MIB
"""Of each thread: past its share of the last cache."""
MAX_COPY_THREADS = 32
GPU_COPY_BYTES = 512 * MIB
CPU_MATRIX, GPU_MATRIX = 1024, 8192
_WARMUP_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCeilings:
    """The device's own limits. None: not known, or not measured."""

    copy_bytes_per_second: float | None = None
    paper_bytes_per_second: float | None = None
    matmul_flops_per_second: float | None = None
    paper_flops_per_second: float | None = None


def probe_ceilings(gpu: Gpu, device: str, compute: Dtype, *, num_threads: int) -> DeviceCeilings:
    """Measure both limits, after the model has left the device. Takes about a second."""
    return DeviceCeilings(
        copy_bytes_per_second=probe_copy_bandwidth(device, num_threads=num_threads),
        # The data sheet of a machine's RAM is not known.
        paper_bytes_per_second=None if device == "cpu" else gpu.memory_bytes_per_second,
        matmul_flops_per_second=probe_matmul_flops(device, compute),
        paper_flops_per_second=gpu.flops(compute),
    )


def probe_copy_bandwidth(device: str, *, num_threads: int = 1) -> float | None:
    """Bytes read and written per second by a plain copy; None where it cannot be tried."""
    try:
        if device == "cpu":
            return _copy_on_cpu(min(num_threads, MAX_COPY_THREADS))
        import torch

        gpu = torch.device(_first_device(device))
        source = torch.ones(GPU_COPY_BYTES, dtype=torch.uint8, device=gpu)
        target = torch.empty_like(source)
        rounds = _count_rounds(lambda: target.copy_(source), lambda: torch.cuda.synchronize(gpu))
        return 2.0 * GPU_COPY_BYTES * rounds
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return None
        raise


def probe_matmul_flops(device: str, compute: Dtype) -> float | None:
    """FLOP/s of a large square product in `compute`; None where it cannot be tried."""
    if device == "cpu" and "torch" not in sys.modules:
        # llama.cpp runs without torch, which takes long to load.
        import numpy as np

        square = np.ones((CPU_MATRIX, CPU_MATRIX), dtype=np.float32)
        product = np.empty_like(square)
        return 2.0 * CPU_MATRIX**3 * _count_rounds(lambda: np.matmul(square, square, out=product))
    if find_spec("torch") is None:
        return None
    import torch

    from tightfit.runtime.libraries import torch_dtype

    is_cpu = device == "cpu"
    size = CPU_MATRIX if is_cpu else GPU_MATRIX
    target = torch.device("cpu" if is_cpu else _first_device(device))
    try:
        left = torch.ones((size, size), dtype=torch_dtype(compute), device=target)
        out = torch.empty_like(left)
        rounds = _count_rounds(
            lambda: torch.mm(left, left, out=out),
            (lambda: None) if is_cpu else (lambda: torch.cuda.synchronize(target)),
        )
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise
    return 2.0 * size**3 * rounds


def _copy_on_cpu(num_threads: int) -> float:
    """With as many copies at once: one thread does not fill the memory bus."""
    import numpy as np

    # Made here: where memory is short, a thread that fails would leave the others at the barrier.
    sources = [np.ones(CPU_COPY_BYTES, dtype=np.uint8) for _ in range(num_threads)]
    targets = [source.copy() for source in sources]  # touched, so that the kernel gave the pages
    ready = threading.Barrier(num_threads)

    def work(number: int) -> float:
        ready.wait()
        return _count_rounds(lambda: np.copyto(targets[number], sources[number]))

    with ThreadPoolExecutor(num_threads) as pool:
        return 2.0 * CPU_COPY_BYTES * sum(pool.map(work, range(num_threads)))


def _count_rounds(work: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    """Rounds per second of the best of several short stretches: other work only takes away."""
    for _ in range(_WARMUP_ROUNDS):
        work()
    wait()
    best, num_rounds = 0.0, 1
    end = time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(num_rounds):
            work()
        wait()
        took = max(time.perf_counter() - began, 1e-9)
        best = max(best, num_rounds / took)
        if took < PROBE_SECONDS / 10:  # a GPU starts its work and returns at once
            num_rounds *= 2
    return best


def _first_device(device: str) -> str:
    """`cuda:0-3` computes on one GPU at a time: the first one's limits are the limits."""
    return "cuda:0" if device == "cuda" else device.partition("-")[0]
