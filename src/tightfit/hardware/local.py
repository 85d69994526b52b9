"""This machine as a cluster of one node: GPUs as their drivers report them, or its CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tightfit.core.text import count_of
from tightfit.core.units import GIB, render_bytes
from tightfit.hardware.catalogue import find_architecture, guess_gpu, list_gpus
from tightfit.hardware.machine import (
    DriverReading,
    GpuReading,
    Machine,
    model_cache,
    read_driver,
    read_free_disk,
    read_machine,
)
from tightfit.hardware.types import Cluster, Gpu, Node, NodeGroup

# The CPU as a training device: this machine's cores and RAM, shared by one or more processes.

FLOPS_PER_CYCLE = {"avx512f": 64.0, "fma": 32.0, "asimd": 16.0}
"""fp32 per core: two fused multiply-add units of 16, 8 or 4 lanes, two operations each.
Source: Intel 64 optimization manual; Arm Neoverse N1 optimization guide."""
SCALAR_FLOPS_PER_CYCLE = 8.0
BF16_TIMES_FP32 = {"amx_bf16": 16.0, "avx512_bf16": 2.0, "bf16": 2.0}
"""By CPU flag: a tile unit does 1024 operations a cycle, a dot product of pairs twice fp32's.
Source: Intel 64 optimization manual, chapter on AMX; Arm BFDOT."""
ASSUMED_HZ = 2.0e9
"""Where neither the kernel nor psutil knows the clock."""
ASSUMED_FLAG = "fma"
"""Of a node that only its scheduler describes: x86 servers have AVX2 with it since 2013."""
BYTES_PER_SECOND_PER_CORE = 15e9
MOST_BYTES_PER_SECOND = 150e9
"""RAM: 11e9 copying and 18e9 adding on one core of a Xeon with AVX-512; two sockets of DDR4."""
LOOPBACK_BYTES_PER_SECOND = 1.25e9
"""Between processes, before the losses that `communication.py` counts: an all-reduce of 16 MiB
over gloo took two of them 34 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """What the kernel says of the CPU."""

    model: str
    hz: float | None
    flags: frozenset[str]


def read_cpu(info: Path = Path("/proc/cpuinfo")) -> CpuReading:
    """Model, clock and instruction sets of the first core."""
    try:
        text = info.read_text("utf-8", "replace").partition("\n\n")[0]
    except OSError:
        text = ""
    lines = (line.partition(":") for line in text.splitlines())
    reported = {key.strip().casefold(): value.strip() for key, _, value in lines}
    return CpuReading(
        model=reported.get("model name") or os.uname().machine,
        hz=_read_clock(reported.get("cpu mhz", "")),
        flags=frozenset((reported.get("flags") or reported.get("features") or "").split()),
    )


def _read_clock(megahertz: str) -> float | None:
    try:
        reported = psutil.cpu_freq()
    except (OSError, RuntimeError, NotImplementedError, AttributeError):
        reported = None
    if reported is not None and max(reported.max, reported.current) > 0:
        return float(max(reported.max, reported.current)) * 1e6
    try:
        return float(megahertz) * 1e6 or None
    except ValueError:
        return None


def probe_cpu(
    num_processes: int = 1,
    *,
    read_host: Callable[[], Machine] = read_machine,
    read_chip: Callable[[], CpuReading] = read_cpu,
    warnings: tuple[str, ...] = (),
) -> Cluster:
    """This machine without its GPUs: `num_processes` that share its cores and its free RAM."""
    machine, chip = read_host(), read_chip()
    if num_processes > machine.num_usable_cores:
        shared = count_of(machine.num_usable_cores, "core")
        note = f"{num_processes} processes share {shared}: each runs slower than alone."
        warnings = (*warnings, note)
    node = Node(
        gpu=describe_cpu(machine, chip, num_processes=num_processes),
        num_gpus=num_processes,
        host_memory_bytes=machine.usable_memory_bytes,
        num_cores=machine.num_usable_cores,
        shm_bytes=machine.shm_bytes or None,
        disk_bytes=read_free_disk(model_cache(os.environ)) or None,
    )
    name = "cpu" if num_processes == 1 else f"{num_processes}xcpu"
    group = NodeGroup(name=name, node=node, num_nodes=1, num_free_nodes=1)
    return Cluster(groups=(group,), source="here", warnings=warnings)


def describe_cpu(machine: Machine, chip: CpuReading, *, num_processes: int = 1) -> Gpu:
    """One process's share of the machine, in the terms of a card.

    Memory is what is free now, within the container's limit. fp32 is cores x clock x
    what the widest vector units do in a cycle; bf16 is there where the CPU has units
    for it.
    """
    cores = machine.num_usable_cores / num_processes
    per_cycle = next(
        (rate for flag, rate in FLOPS_PER_CYCLE.items() if flag in chip.flags),
        SCALAR_FLOPS_PER_CYCLE,
    )
    fp32 = cores * (chip.hz or ASSUMED_HZ) * per_cycle
    bf16 = next((times for flag, times in BF16_TIMES_FP32.items() if flag in chip.flags), None)
    free = min(machine.available_memory_bytes, machine.usable_memory_bytes)
    bandwidth = min(cores * BYTES_PER_SECOND_PER_CORE, MOST_BYTES_PER_SECOND / num_processes)
    clock = "an assumed clock" if chip.hz is None else f"{chip.hz / 1e9:.2g} GHz"
    return Gpu(
        name=f"CPU, {count_of(max(1, round(cores)), 'core')}",
        marketing_gb=max(1.0, float(round(machine.usable_memory_bytes / GIB / num_processes))),
        memory_bytes=max(1, free // num_processes),
        compute_capability=None,
        peak_flops={"fp32": fp32} | ({} if bf16 is None else {"bf16": bf16 * fp32}),
        memory_bytes_per_second=bandwidth,
        pcie_bytes_per_second=LOOPBACK_BYTES_PER_SECOND,
        supports_bf16=bf16 is not None,
        is_cpu=True,
        source="/proc/cpuinfo, psutil",
        notes=f"{chip.model}: cores x {clock} x {per_cycle:.0f} fp32 operations a cycle",
    )


def describe_cpu_node(
    *, num_cores: int, memory_bytes: int, features: Sequence[str] = (), threads_per_core: int = 1
) -> Gpu:
    """A node's CPU, of which its scheduler states cores and memory alone, as one process's device.

    Hardware threads share a core's units: `num_cores` / `threads_per_core` count. The clock
    is assumed, and AVX2, unless the node's features name more.
    """
    words = " ".join(features).casefold()
    flag = "avx512f" if "avx512" in words or "amx" in words else ASSUMED_FLAG
    cores = max(1, num_cores // max(1, threads_per_core))
    machine = Machine(
        memory_bytes=memory_bytes,
        available_memory_bytes=memory_bytes,
        memory_limit_bytes=None,
        num_cores=cores,
        num_usable_cores=cores,
        shm_bytes=None,
        shm_free_bytes=None,
        locked_memory_limit_bytes=None,
    )
    chip = CpuReading(model="", hz=None, flags=frozenset({flag}))
    notes = (
        f"assumed: {ASSUMED_HZ / 1e9:.2g} GHz, {'AVX-512' if flag == 'avx512f' else 'AVX2'} "
        f"({FLOPS_PER_CYCLE[flag]:.0f} fp32 operations a cycle and core), no bf16 units"
    )
    source = "cores and memory as the cluster's scheduler states them"
    return describe_cpu(machine, chip).model_copy(update={"source": source, "notes": notes})


TORCH_SHARE_OF_TOTAL = 0.98
"""Of NVML's total, what torch sees: 0.984 (RTX 4090) to 0.996 (H200) over the catalogue's cards."""
MEMORY_TOLERANCE = 0.10
"""A total this far above the catalogue's is another card under the same name."""
_PCIE_LANE_BYTES_PER_SECOND = {
    1: 0.25e9,
    2: 0.5e9,
    3: 0.985e9,
    4: 1.97e9,
    5: 3.94e9,
    6: 7.56e9,
}


def probe_here(
    *,
    read_gpus: Callable[[], DriverReading] = read_driver,
    read_host: Callable[[], Machine] = read_machine,
    read_chip: Callable[[], CpuReading] = read_cpu,
) -> Cluster:
    """The GPUs of this machine, one group per kind; its CPU where it has none."""
    reading = read_gpus()
    if not reading.gpus:
        why = f" ({reading.error})" if reading.error else ""
        note = (
            f"No NVIDIA GPU is to be seen on this machine{why}: its CPU is used (tightfit doctor)."
        )
        if reading.hidden:
            note = f"{reading.hidden_by} hides all {reading.hidden} GPUs: the CPU is used."
        warnings_of_cpu = (note, *reading.notes)
        return probe_cpu(read_host=read_host, read_chip=read_chip, warnings=warnings_of_cpu)
    machine = read_host()
    warnings = list(reading.notes)
    if reading.hidden:
        warnings.append(
            f"{reading.hidden_by} leaves {len(reading.gpus)} GPUs; {reading.hidden} are hidden."
        )
    kinds: dict[tuple[str, int], list[GpuReading]] = {}
    for gpu in reading.gpus:
        kinds.setdefault((gpu.name, round(gpu.total_bytes / GIB)), []).append(gpu)
    groups = [
        _group(gpus, machine, alone=len(kinds) == 1, warnings=warnings) for gpus in kinds.values()
    ]
    if len(groups) > 1:
        warnings.append("The GPUs differ; each kind is planned for apart, and they share the RAM.")
    return Cluster(groups=tuple(groups), source="here", warnings=tuple(dict.fromkeys(warnings)))


def _group(
    gpus: Sequence[GpuReading], machine: Machine, *, alone: bool, warnings: list[str]
) -> NodeGroup:
    is_amd = gpus[0].compute_capability is None
    guess = guess_gpu(gpus[0].name, ())
    if guess.gpu is not None:  # one name may mean several sizes; the driver shows which
        guess = guess_gpu(gpus[0].name, (f"{round(gpus[0].total_bytes / GIB)}gb",))
    if guess.gpu is None:
        gpu = gpu_from_reading(gpus[0])
        warnings.append(f"{gpus[0].name} is not in the catalogue: {gpu.notes}.")
    else:
        gpu = _with_seen_memory(guess.gpu, gpus[0], warnings)
        warnings += guess.warnings
    node = Node(
        gpu=gpu,
        num_gpus=1 if guess.is_slice else len(gpus),
        host_memory_bytes=machine.usable_memory_bytes,
        num_cores=machine.num_usable_cores,
        shm_bytes=machine.shm_bytes or None,
        disk_bytes=read_free_disk(model_cache(os.environ)) or None,
        free_gpu_memory_bytes=max(1, min(one.free_bytes for one in gpus)),
        # AMD's tools name no links here: the catalogue's are assumed.
        has_nvlink=(
            all(one.num_active_nvlinks > 0 for one in gpus)
            if len(gpus) > 1 and not is_amd
            else None
        ),
    )
    busy = [one for one in gpus if one.processes]
    if busy:
        held = max(one.total_bytes - one.free_bytes for one in busy)
        warnings.append(
            f"{len(busy)} of {len(gpus)} {gpu.name} are in use, up to {render_bytes(held)} each."
        )
    return NodeGroup(
        name="here" if alone else f"here/{gpu.name}",
        node=node,
        num_nodes=1,
        num_free_nodes=0 if busy else 1,
        num_free_gpus=len(gpus) - len(busy),
    )


def _with_seen_memory(gpu: Gpu, reading: GpuReading, warnings: list[str]) -> Gpu:
    """The catalogue's card with the memory this one shows, where they do not agree."""
    seen = int(reading.total_bytes * TORCH_SHARE_OF_TOTAL)
    if reading.total_bytes < gpu.memory_bytes:
        return gpu.model_copy(update={"memory_bytes": seen})
    if reading.total_bytes > gpu.memory_bytes * (1 + MEMORY_TOLERANCE):
        warnings.append(
            f"{reading.name} shows {render_bytes(reading.total_bytes)}, "
            f"more than the catalogue's {gpu.name}; the shown memory is used."
        )
        sold = float(round(reading.total_bytes / GIB))
        return gpu.model_copy(update={"memory_bytes": seen, "marketing_gb": sold})
    return gpu


def gpu_from_reading(reading: GpuReading) -> Gpu:
    """A card the catalogue does not know, from the driver's facts.

    fp32 is 2 x cores x clock, memory speed is bus width x clock x 2 (double data rate).
    Tensor rates, and whatever the driver does not say, follow the known card of the
    nearest compute capability.
    """
    near = nearest_gpu(reading)
    if reading.compute_capability is None:
        return _amd_gpu(reading, near)
    fp32 = near.peak_flops["fp32"]
    if reading.num_cores and reading.max_sm_hz:
        fp32 = 2.0 * reading.num_cores * reading.max_sm_hz
    scale = fp32 / near.peak_flops["fp32"]
    bandwidth = near.memory_bytes_per_second
    if reading.memory_bus_bits and reading.max_memory_hz:
        bandwidth = reading.memory_bus_bits / 8 * reading.max_memory_hz * 2
    pcie = near.pcie_bytes_per_second
    lane = _PCIE_LANE_BYTES_PER_SECOND.get(reading.pcie_generation or 0)
    if lane and reading.pcie_lanes:
        pcie = lane * reading.pcie_lanes
    nvlink = near.nvlink_bytes_per_second if reading.num_active_nvlinks else None
    return Gpu(
        name=reading.name,
        marketing_gb=float(max(1, round(reading.total_bytes / GIB))),
        memory_bytes=int(reading.total_bytes * TORCH_SHARE_OF_TOTAL),
        compute_capability=reading.compute_capability,
        peak_flops={kind: rate * scale for kind, rate in near.peak_flops.items()},
        memory_bytes_per_second=bandwidth,
        nvlink_bytes_per_second=nvlink,
        pcie_bytes_per_second=pcie,
        supports_bf16=reading.compute_capability >= (8, 0),
        source="nvml",
        notes=f"rates from the driver's clocks, and by the likeness of {near.name}",
    )


_WITHOUT_BF16 = ("gfx8", "gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx10")
"""Before CDNA and RDNA 3. Source: rocm.docs.amd.com, data types and precision support."""


def _amd_gpu(reading: GpuReading, near: Gpu) -> Gpu:
    """AMD's tools tell a card's memory, and nothing of its rates."""
    peaks = dict(near.peak_flops)
    supports_bf16 = not reading.architecture.startswith(_WITHOUT_BF16)
    if not supports_bf16:
        peaks.pop("bf16", None)
    return near.model_copy(
        update={
            "name": reading.name,
            "marketing_gb": float(max(1, round(reading.total_bytes / GIB))),
            "memory_bytes": int(reading.total_bytes * TORCH_SHARE_OF_TOTAL),
            "peak_flops": peaks,
            "supports_bf16": supports_bf16,
            "achievable_bf16_flops": None,
            "nvlink_bytes_per_second": None,
            "prices": (),
            "source": "AMD's tools",
            "notes": f"rates by the likeness of {near.name}"
            + (f", for {reading.architecture}" if reading.architecture else ""),
        }
    )


def _nearest_amd(reading: GpuReading) -> Gpu:
    """Of the same architecture, else of the same generation, then the nearest memory."""

    def distance(gpu: Gpu) -> tuple[bool, bool, float, float]:
        here, there = reading.architecture, find_architecture(gpu)
        memory = abs(gpu.marketing_gb * GIB - reading.total_bytes)
        return here != there, here[:-2] != there[:-2], memory, gpu.peak_flops["fp16"]

    return min((gpu for gpu in list_gpus() if find_architecture(gpu)), key=distance)


def nearest_gpu(reading: GpuReading) -> Gpu:
    """The catalogue's card of the nearest compute capability, older first, then nearest memory."""
    if reading.compute_capability is None:
        return _nearest_amd(reading)
    wanted = reading.compute_capability[0] + reading.compute_capability[1] / 10

    def distance(gpu: Gpu) -> tuple[float, bool, float]:
        major, minor = gpu.compute_capability or (0, 0)
        steps = major + minor / 10 - wanted
        return abs(steps), steps > 0, abs(gpu.memory_bytes - reading.total_bytes)

    return min((gpu for gpu in list_gpus() if gpu.compute_capability), key=distance)
