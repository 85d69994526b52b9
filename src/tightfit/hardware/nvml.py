"""What the NVIDIA driver says about the GPUs of this machine, by NVML; no CUDA, no torch."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_NVLINKS = 36
UNCORRECTED, VOLATILE = 1, 0
CLOCK_SM, CLOCK_MEMORY = 1, 2
SLOWED_BY_HEAT = 0x20 | 0x40
SLOWED_BY_POWER_BRAKE = 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    memory_bytes: int | None
    """None where the driver does not tell, as inside containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One device as NVML shows it. A None was not told by this driver or card."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    processes: tuple[GpuProcess, ...] = ()
    num_active_nvlinks: int = 0
    num_cores: int | None = None
    max_sm_hz: float | None = None
    max_memory_hz: float | None = None
    memory_bus_bits: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    uncorrected_ecc_errors: int | None = None
    slowdown_reasons: int = 0
    """Bits of NVML's clock event reasons."""
    fabric_state: int | None = None
    """Of an NVSwitch box: 1 not started, 2 in progress, 3 complete. 0 or None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReading:
    """All GPUs, or why there are none to see."""

    gpus: tuple[GpuReading, ...] = ()
    driver_version: str | None = None
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    fault: str | None = None
    """Why NVML could not be asked; None where it answered."""
    hidden: int = 0
    """GPUs that CUDA_VISIBLE_DEVICES takes away."""


def read_driver(nvml: Any = None, *, environ: Mapping[str, str] | None = None) -> DriverReading:
    """Ask NVML. `nvml` is pynvml or anything with the same calls. Never raises for the driver."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return DriverReading(fault="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        return DriverReading(fault=str(error))
    try:
        return _read_all(nvml, os.environ if environ is None else environ)
    except nvml.NVMLError as error:
        return DriverReading(fault=str(error))
    finally:
        _ask(nvml, "nvmlShutdown")


def _read_all(nvml: Any, environ: Mapping[str, str]) -> DriverReading:
    version = _ask(nvml, "nvmlSystemGetCudaDriverVersion")
    readings: list[GpuReading] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        readings += [_read_gpu(nvml, part, index) for part in _parts(nvml, device)]
    visible = _visible(readings, environ.get("CUDA_VISIBLE_DEVICES"))
    return DriverReading(
        gpus=tuple(visible),
        driver_version=_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
        cuda_version=(version // 1000, version % 1000 // 10) if version else None,
        hidden=len(readings) - len(visible),
    )


def _parts(nvml: Any, device: Any) -> list[Any]:
    """The device itself, or its MIG slices where it is divided: CUDA then sees only those."""
    mode = _ask(nvml, "nvmlDeviceGetMigMode", device)
    if not mode or mode[0] != 1:
        return [device]
    slices = []
    for index in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", device) or 0):
        part = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", device, index)
        if part is not None:
            slices.append(part)
    return slices


def _read_gpu(nvml: Any, device: Any, index: int) -> GpuReading:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    sm_mhz = _ask(nvml, "nvmlDeviceGetMaxClockInfo", device, CLOCK_SM)
    memory_mhz = _ask(nvml, "nvmlDeviceGetMaxClockInfo", device, CLOCK_MEMORY)
    return GpuReading(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(device)) or "unknown GPU",
        uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", device)) or "",
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=_capability(nvml, device),
        processes=_processes(nvml, device),
        num_active_nvlinks=_active_nvlinks(nvml, device),
        num_cores=_ask(nvml, "nvmlDeviceGetNumGpuCores", device),
        max_sm_hz=sm_mhz * 1e6 if sm_mhz else None,
        max_memory_hz=memory_mhz * 1e6 if memory_mhz else None,
        memory_bus_bits=_ask(nvml, "nvmlDeviceGetMemoryBusWidth", device),
        pcie_generation=_ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", device),
        pcie_lanes=_ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", device),
        uncorrected_ecc_errors=_ask(
            nvml, "nvmlDeviceGetTotalEccErrors", device, UNCORRECTED, VOLATILE
        ),
        slowdown_reasons=_ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", device) or 0,
        fabric_state=_fabric_state(nvml, device),
    )


def _fabric_state(nvml: Any, device: Any) -> int | None:
    shape = getattr(nvml, "c_nvmlGpuFabricInfo_t", None)
    if shape is None:
        return None
    info = shape()
    done = _ask(nvml, "nvmlDeviceGetGpuFabricInfo", device, ctypes.byref(info))
    return None if done is None else int(info.state)


def _capability(nvml: Any, device: Any) -> tuple[int, int]:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    return int(major), int(minor)


def _processes(nvml: Any, device: Any) -> tuple[GpuProcess, ...]:
    found = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", device) or ()
    return tuple(GpuProcess(pid=int(one.pid), memory_bytes=one.usedGpuMemory) for one in found)


def _active_nvlinks(nvml: Any, device: Any) -> int:
    active = 0
    for link in range(MAX_NVLINKS):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", device, link)
        if state is None:
            break  # past the card's last link, or a card without any
        active += int(state == 1)
    return active


def _visible(readings: Sequence[GpuReading], setting: str | None) -> list[GpuReading]:
    """The GPUs CUDA will show. As CUDA does, stop at the first entry that names none of them."""
    if setting is None:
        return list(readings)
    chosen: list[GpuReading] = []
    for entry in (part.strip() for part in setting.split(",")):
        match = next((one for one in readings if _is_named(one, entry)), None)
        if match is None:
            break
        if match not in chosen:
            chosen.append(match)
    return chosen


def _is_named(reading: GpuReading, entry: str) -> bool:
    if entry.isascii() and entry.isdigit():
        return reading.index == int(entry[:9])
    return entry.startswith(("GPU-", "MIG-")) and reading.uuid.startswith(entry)


def _ask(nvml: Any, name: str, *arguments: object) -> Any:
    """None where this card, driver or pynvml does not know the question."""
    call = getattr(nvml, name, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    """Older pynvml gives bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
