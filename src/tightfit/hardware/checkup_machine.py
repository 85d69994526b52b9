"""RAM, cores, shared memory and disks, held against what training asks of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tightfit.core.units import GIB, MIB, render_bytes
from tightfit.hardware.findings import Finding, Status
from tightfit.hardware.machine import Machine, find_obstacle, model_cache
from tightfit.hardware.nvml import DriverReading
from tightfit.hardware.surroundings import Surroundings

LITTLE_MEMORY_BYTES = 8 * GIB
CONTAINER_SHM_BYTES = 64 * MIB
"""Docker's default. NCCL and data loader workers die of it."""
LITTLE_SHM_BYTES = GIB
LITTLE_LOCKED_MEMORY_BYTES = 64 * MIB
"""InfiniBand pins its buffers; below this NCCL cannot register them."""
CORES_PER_GPU = 2


def check_machine(here: Surroundings, driver: DriverReading) -> Iterator[Finding]:
    """RAM, cores, /dev/shm and locked memory."""
    machine = here.read_host()
    yield _check_memory(machine, driver)
    yield _check_cores(machine, num_gpus=len(driver.gpus))
    yield _check_shm(machine)
    locked = machine.locked_memory_limit_bytes
    if machine.has_infiniband and locked is not None and locked < LITTLE_LOCKED_MEMORY_BYTES:
        yield _found(
            "locked memory",
            Status.WARNING,
            f"limited to {render_bytes(locked)}; InfiniBand needs it unlimited",
            "ulimit -l unlimited    (Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
        )


def _check_memory(machine: Machine, driver: DriverReading) -> Finding:
    usable, detail = machine.usable_memory_bytes, f"{render_bytes(machine.memory_bytes)}"
    if machine.memory_limit_bytes is not None:
        detail = f"{render_bytes(usable)}, a limit on this process ({detail} in the machine)"
    detail += f", {render_bytes(min(machine.available_memory_bytes, usable))} available"
    largest = max((gpu.total_bytes for gpu in driver.gpus), default=0)
    if usable < max(LITTLE_MEMORY_BYTES, largest):
        why = "less than one GPU holds" if usable < largest else "little for loading a model"
        remedy = "ask for more memory for the job or container (Slurm --mem, docker --memory)"
        return _found("RAM", Status.WARNING, f"{detail}: {why}", remedy)
    return _found("RAM", Status.INFO if machine.memory_limit_bytes else Status.OK, detail)


def _check_cores(machine: Machine, *, num_gpus: int) -> Finding:
    usable, detail = machine.num_usable_cores, f"{machine.num_cores}"
    if usable < machine.num_cores:
        detail = f"{usable} of {machine.num_cores} may be used (affinity or quota)"
    if num_gpus and usable < CORES_PER_GPU * num_gpus:
        return _found(
            "cores",
            Status.WARNING,
            f"{detail}: fewer than {CORES_PER_GPU} for each of {num_gpus} GPUs; loading will lag",
            "ask for more cores for the job or container (Slurm --cpus-per-task, docker --cpus)",
        )
    status = Status.INFO if usable < machine.num_cores else Status.OK
    return _found("cores", status, detail)


def _check_shm(machine: Machine) -> Finding:
    if machine.shm_bytes is None:
        return _found(
            "/dev/shm",
            Status.FAULT,
            "is not there",
            "mount -t tmpfs tmpfs /dev/shm    (needs root)",
        )
    detail = f"{render_bytes(machine.shm_bytes)}, {render_bytes(machine.shm_free_bytes or 0)} free"
    remedy = "docker run --shm-size=16g or --ipc=host; Kubernetes: a Memory emptyDir at /dev/shm"
    if machine.shm_bytes <= CONTAINER_SHM_BYTES:
        detail += ": a container's default, too small for several GPUs or data loaders"
        return _found("/dev/shm", Status.FAULT, detail, remedy)
    if (machine.shm_free_bytes or 0) < LITTLE_SHM_BYTES:
        return _found("/dev/shm", Status.WARNING, f"{detail}: little for several GPUs", remedy)
    return _found("/dev/shm", Status.OK, detail)


def check_disks(here: Surroundings) -> Iterator[Finding]:
    """Free space where models are kept, where runs are written, and for temporary files."""
    cache = model_cache(here.environ)
    temporary = Path(here.environ.get("TMPDIR") or tempfile.gettempdir())
    places = [
        ("model cache", cache, 20 * GIB, "export HF_HOME=/a/larger/disk"),
        ("temporary files", temporary, 2 * GIB, "export TMPDIR=/a/larger/disk"),
    ]
    try:
        places.insert(1, ("this folder", Path.cwd(), 10 * GIB, "run in a folder on a larger disk"))
    except OSError:
        yield Finding(
            area="disk",
            name="this folder",
            status=Status.FAULT,
            detail="the folder this runs in was deleted",
            remedy="cd ~    (or to any folder that exists)",
        )
    for name, path, little, remedy in places:
        obstacle = find_obstacle(path)
        if obstacle is not None:
            yield Finding(
                area="disk",
                name=name,
                status=Status.FAULT,
                detail=f"{path} cannot be a folder: {obstacle} is not one",
                remedy=remedy.replace("larger/disk", "folder"),
            )
            continue
        yield _check_disk(name, path, here.read_free_disk(path), little=little, remedy=remedy)


def _check_disk(name: str, path: Path, free: int | None, *, little: int, remedy: str) -> Finding:
    if free is None:
        detail = f"{path} cannot be looked at"
        return Finding(area="disk", name=name, status=Status.WARNING, detail=detail, remedy=remedy)
    status = Status.OK
    if free < little:
        status = Status.FAULT if free < little // 20 else Status.WARNING
    return Finding(
        area="disk",
        name=name,
        status=status,
        detail=f"{render_bytes(free)} free at {path}",
        remedy=remedy if status is not Status.OK else None,
    )


def _found(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="memory", name=name, status=status, detail=detail, remedy=remedy)
