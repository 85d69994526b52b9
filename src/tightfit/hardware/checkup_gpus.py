"""GPUs, their driver, and the services that boxes full of them need."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.core.units import render_bytes
from tightfit.hardware.findings import Finding, Status
from tightfit.hardware.nvml import (
    SLOWED_BY_HEAT,
    SLOWED_BY_POWER_BRAKE,
    DriverReading,
    GpuReading,
)
from tightfit.hardware.surroundings import Surroundings

_FABRIC_COMPLETE = 3
_NUM_GPUS_OF_A_SWITCHED_BOX = 8
"""SXM boards with four GPUs are wired directly; eight and more go through NVSwitches."""
_SXM_NAMES = ("SXM4", "H100 80GB HBM3", "H200", "B200")


def check_gpus(here: Surroundings, driver: DriverReading) -> Iterator[Finding]:
    """The driver, then each card."""
    if driver.fault is not None:
        yield _no_driver(here, driver.fault)
        return
    cuda = f", runs CUDA up to {_dotted(driver.cuda_version)}" if driver.cuda_version else ""
    yield _found("driver", Status.OK, f"NVIDIA {driver.driver_version or '(unknown)'}{cuda}")
    if driver.hidden:
        yield _found(
            "visible GPUs",
            Status.WARNING if driver.gpus else Status.FAULT,
            f"CUDA_VISIBLE_DEVICES hides {driver.hidden} of {driver.hidden + len(driver.gpus)}",
            "unset CUDA_VISIBLE_DEVICES, unless the scheduler set it",
        )
    elif not driver.gpus:
        yield _found(
            "GPUs", Status.FAULT, "the driver shows none", "nvidia-smi -L    (lists the GPUs)"
        )
    for gpu in driver.gpus:
        yield from _check_gpu(gpu)


def supported_formats(capability: tuple[int, int]) -> dict[str, bool]:
    """Which number formats the card multiplies in hardware (CUDA C++ Programming Guide).

    int8 is what LLM.int8() needs: tensor cores of 7.5 on.
    """
    return {
        "fp16": capability >= (5, 3),
        "bf16": capability >= (8, 0),
        "int8": capability >= (7, 5),
        "fp8": capability >= (8, 9),
    }


def _no_driver(here: Surroundings, fault: str) -> Finding:
    if here.has_nvidia_card():
        return _found(
            "driver",
            Status.FAULT,
            f"an NVIDIA card is on the bus, but its driver does not answer: {fault}",
            "nvidia-smi    (install the driver; after a driver update reboot)",
        )
    return _found(
        "GPUs",
        Status.INFO,
        f"no NVIDIA GPU here ({fault}); planning needs none",
        "say the hardware in words: tightfit plan MODEL --on 1xT4",
    )


def _check_gpu(gpu: GpuReading) -> Iterator[Finding]:
    formats = supported_formats(gpu.compute_capability)
    said = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in formats.items())
    links = f"; {gpu.num_active_nvlinks} NVLinks" if gpu.num_active_nvlinks else ""
    yield _found(
        f"GPU {gpu.index}",
        Status.OK,
        f"{gpu.name}, {render_bytes(gpu.total_bytes)} ({render_bytes(gpu.free_bytes)} free), "
        f"compute capability {_dotted(gpu.compute_capability)}: {said}{links}",
    )
    if gpu.processes:
        pids = ", ".join(str(process.pid) for process in gpu.processes[:6])
        held = gpu.total_bytes - gpu.free_bytes
        yield _found(
            f"GPU {gpu.index} in use",
            Status.WARNING,
            f"{len(gpu.processes)} processes hold {render_bytes(held)} (pid {pids})",
            f"wait for them, or choose another card; to see them: nvidia-smi -i {gpu.index}",
        )
    if gpu.uncorrected_ecc_errors:
        yield _found(
            f"GPU {gpu.index} memory errors",
            Status.FAULT,
            f"{gpu.uncorrected_ecc_errors} uncorrected ECC errors since the last reset",
            f"have the card reset: nvidia-smi --gpu-reset -i {gpu.index}    (needs root)",
        )
    yield from _check_slowdown(gpu)


def _check_slowdown(gpu: GpuReading) -> Iterator[Finding]:
    for bits, why in ((SLOWED_BY_HEAT, "heat"), (SLOWED_BY_POWER_BRAKE, "the power brake")):
        if gpu.slowdown_reasons & bits:
            yield _found(
                f"GPU {gpu.index} slowed",
                Status.WARNING,
                f"its clocks are held down by {why}",
                f"see to cooling and power: nvidia-smi -q -d PERFORMANCE -i {gpu.index}",
            )


def check_services(here: Surroundings, driver: DriverReading) -> Iterator[Finding]:
    """Fabric manager and DCGM, where there are several A100, H100, H200 or B200 on SXM boards."""
    boards = [gpu for gpu in driver.gpus if any(name in gpu.name for name in _SXM_NAMES)]
    if len(boards) < 2:
        return
    processes = here.list_process_names()
    if here.has_nvswitch() or len(boards) >= _NUM_GPUS_OF_A_SWITCHED_BOX:
        yield _check_fabric(boards, is_running="nv-fabricmanager" in processes)
    has_dcgm = "nv-hostengine" in processes
    yield _found(
        "DCGM",
        Status.OK if has_dcgm else Status.INFO,
        "nv-hostengine runs" if has_dcgm else "nv-hostengine is not to be seen: no health watch",
        None if has_dcgm else "install datacenter-gpu-manager, then: dcgmi diag -r 1",
    )


def _check_fabric(boards: list[GpuReading], *, is_running: bool) -> Finding:
    """From inside a container the service is not seen, but the state it left in the cards is."""
    states = {gpu.fabric_state for gpu in boards}
    is_complete = states == {_FABRIC_COMPLETE}
    if is_complete or (is_running and not states & {1, 2}):
        return _found("fabric manager", Status.OK, "the NVSwitch fabric is up")
    why = "is not running" if not is_running else "has not brought the fabric up"
    return _found(
        "fabric manager",
        Status.FAULT,
        f"nvidia-fabricmanager {why}: CUDA will fail to start on these GPUs (error 802)",
        "systemctl enable --now nvidia-fabricmanager    (same version as the driver; needs root)",
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _found(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="gpu", name=name, status=status, detail=detail, remedy=remedy)
