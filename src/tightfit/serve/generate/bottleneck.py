"""What a run waited for most, in one sentence that ends with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tightfit.core.units import render_bytes, render_seconds

BUSY_FRACTION = 0.5
"""Of a measured ceiling: above it, that is what the run waits for."""
STARVED_FRACTION = 0.2
EMPTY_SLOTS_FRACTION = 0.6
IDLE_CORES_FRACTION = 0.6
BUSY_CORES_FRACTION = 0.85
MOST_SLOTS = 256


class Kind(str, Enum):
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
class Signs:
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

    kind: Kind
    sentence: str


def name_bottleneck(signs: Signs) -> Bottleneck:
    """The one thing to change first. Mistakes come before limits, limits before small batches."""
    for look in (_mistake, _loading, _surroundings, _limit, _cores, _batch):
        found = look(signs)
        if found is not None:
            return found
    return Bottleneck(
        kind=Kind.OVERHEAD,
        sentence="Neither memory nor arithmetic was busy with every slot in use: each step waits "
        f"for the program around the model; {_more_slots(signs)} shares that wait.",
    )


def suggest_slots(signs: Signs) -> int | None:
    """The next number of slots to try; None where more would stay empty."""
    wanted = 4 * signs.num_slots if signs.num_slots < 8 else 2 * signs.num_slots
    slots = min(wanted, MOST_SLOTS, signs.num_answers)
    return slots if slots > signs.num_slots else None


def _mistake(signs: Signs) -> Bottleneck | None:
    if signs.is_cpu and signs.idle_gpu:
        return Bottleneck(
            kind=Kind.GPU_UNUSED,
            sentence=f"The CPU did the work while {signs.idle_gpu} stood idle: --device cuda, and "
            "`tightfit doctor` says why it was not taken.",
        )
    if signs.is_offloaded:
        return Bottleneck(
            kind=Kind.PCIE,
            sentence="PCIe: part of the weights lies in host memory and crosses the bus for every "
            "pass; --weights nf4 or fewer --parallel would keep them on the card.",
        )
    return None


def _loading(signs: Signs) -> Bottleneck | None:
    if signs.load_seconds <= signs.seconds:
        return None
    took = (
        f"loading took {render_seconds(signs.load_seconds)}, answering "
        f"{render_seconds(signs.seconds)}"
    )
    if signs.load_disk_bytes and signs.load_disk_bytes / signs.load_seconds > 20e6:
        rate = render_bytes(signs.load_disk_bytes / signs.load_seconds)
        return Bottleneck(
            kind=Kind.DISK,
            sentence=f"Disk: {took}, reading {render_bytes(signs.load_disk_bytes)} at {rate}/s; "
            "ask more prompts in one run, or keep the model on a faster disk.",
        )
    return Bottleneck(
        kind=Kind.LOADING,
        sentence=f"Loading: {took}, though little came from the disk; ask more prompts in one "
        "run, or keep the model loaded: tightfit serve.",
    )


def _surroundings(signs: Signs) -> Bottleneck | None:
    if signs.starved_fraction > STARVED_FRACTION:
        return Bottleneck(
            kind=Kind.FEEDING,
            sentence=f"Waiting for prompts: for {signs.starved_fraction:.0%} of the time fewer "
            f"were ready than the {signs.num_slots} slots take; shorter prompts or a free core "
            "for preparing them would help.",
        )
    if signs.num_hosts:
        hosts = "another host" if signs.num_hosts == 1 else f"{signs.num_hosts} other hosts"
        return Bottleneck(
            kind=Kind.HOSTS,
            sentence=f"Not known: part of the model was computed on {hosts}, and only this machine "
            "was measured; look at the load there and at the network between.",
        )
    is_hurt = not (signs.bandwidth_fraction or 0) > BUSY_FRACTION
    cores = signs.cores_fraction
    if signs.is_cpu and cores is not None and cores < IDLE_CORES_FRACTION and is_hurt:
        return Bottleneck(
            kind=Kind.OTHER_WORK,
            sentence=f"Cores: the process got {cores:.0%} of the core time it asked for; other "
            "processes hold the rest, or it has more threads than cores (--threads, "
            "OMP_NUM_THREADS).",
        )
    return None


def _limit(signs: Signs) -> Bottleneck | None:
    compute, bandwidth = signs.compute_fraction or 0.0, signs.bandwidth_fraction or 0.0
    if max(compute, bandwidth) < BUSY_FRACTION:
        return None
    if compute >= bandwidth:
        return Bottleneck(
            kind=Kind.COMPUTE,
            sentence=f"Compute: {compute:.0%} of what the device was measured to multiply; "
            "a smaller model or a faster device is what helps.",
        )
    helps = "fewer bytes per weight (tightfit quantize) is what helps."
    if suggest_slots(signs) is not None:
        shared = f"{signs.mean_active:.1f} answers at a time"
        helps = f"the weights are read for {shared}, and {_more_slots(signs)} shares each reading."
    return Bottleneck(
        kind=Kind.MEMORY_BANDWIDTH,
        sentence=f"Memory bandwidth: {bandwidth:.0%} of the measured copy rate; {helps}",
    )


def _cores(signs: Signs) -> Bottleneck | None:
    """Kernels of packed weights stay far below what a plain product reaches, cores busy or not."""
    busy = signs.cores_fraction
    if not signs.is_cpu or busy is None or busy < BUSY_CORES_FRACTION:
        return None
    return Bottleneck(
        kind=Kind.COMPUTE,
        sentence=f"Compute: the cores that it may use were busy for {busy:.0%} of the time; a "
        "smaller model or a faster device is what helps, or more --threads where cores are idle.",
    )


def _batch(signs: Signs) -> Bottleneck | None:
    if signs.mean_active < EMPTY_SLOTS_FRACTION * signs.num_slots:
        return Bottleneck(
            kind=Kind.BATCH,
            sentence=f"Batch too small: on average {signs.mean_active:.1f} of {signs.num_slots} "
            "slots were in use; more prompts in one run would fill them.",
        )
    slots = suggest_slots(signs)
    if slots is None:
        return None
    return Bottleneck(
        kind=Kind.BATCH,
        sentence=f"Batch too small: {signs.mean_active:.1f} answers at a time keep neither memory "
        f"nor arithmetic busy; --parallel {slots} would use the same passes for more answers.",
    )


def _more_slots(signs: Signs) -> str:
    slots = suggest_slots(signs)
    return "a larger --parallel" if slots is None else f"--parallel {slots}"
