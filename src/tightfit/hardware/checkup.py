"""The checks behind `tightfit doctor`: GPUs, driver, memory, disks, packages, clusters, hub.

A finding is `ok`, `info`, `warning` (works, but badly) or `fault` (will not work). The exit
code is 6 with a fault, else 0. torch is known by its metadata alone: nothing heavy is imported.
"""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tightfit.core.errors import SetupError
from tightfit.core.findings import Finding, Status
from tightfit.core.frozen import Frozen
from tightfit.core.units import GIB, MIB, render_bytes
from tightfit.hardware.environment import SystemProbes, TorchBuild
from tightfit.hardware.machine import Machine, find_obstacle, model_cache
from tightfit.hardware.nvml import (
    SLOWED_BY_HEAT,
    SLOWED_BY_POWER_BRAKE,
    DriverReading,
    GpuReading,
)

# GPUs, their driver, and the services that boxes full of them need.

_FABRIC_COMPLETE = 3
_NUM_GPUS_OF_A_SWITCHED_BOX = 8
"""SXM boards with four GPUs are wired directly; eight and more go through NVSwitches."""
_SXM_NAMES = ("SXM4", "H100 80GB HBM3", "H200", "B200")


def check_gpus(here: SystemProbes, driver: DriverReading) -> Iterator[Finding]:
    """The driver, then each card."""
    if driver.fault is not None:
        yield _no_driver(here, driver.fault)
        return
    cuda = f", runs CUDA up to {_dotted(driver.cuda_version)}" if driver.cuda_version else ""
    yield _gpu_finding("driver", Status.OK, f"NVIDIA {driver.driver_version or '(unknown)'}{cuda}")
    if driver.hidden:
        yield _gpu_finding(
            "visible GPUs",
            Status.WARNING if driver.gpus else Status.FAULT,
            f"CUDA_VISIBLE_DEVICES hides {driver.hidden} of {driver.hidden + len(driver.gpus)}",
            "unset CUDA_VISIBLE_DEVICES, unless the scheduler set it",
        )
    elif not driver.gpus:
        yield _gpu_finding(
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


def _no_driver(here: SystemProbes, fault: str) -> Finding:
    if here.has_nvidia_card():
        return _gpu_finding(
            "driver",
            Status.FAULT,
            f"an NVIDIA card is on the bus, but its driver does not answer: {fault}",
            "nvidia-smi    (install the driver; after a driver update reboot)",
        )
    return _gpu_finding(
        "GPUs",
        Status.INFO,
        f"no NVIDIA GPU here ({fault}); planning needs none",
        "say the hardware in words: tightfit plan MODEL --on 1xT4",
    )


def _check_gpu(gpu: GpuReading) -> Iterator[Finding]:
    formats = supported_formats(gpu.compute_capability)
    said = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in formats.items())
    links = f"; {gpu.num_active_nvlinks} NVLinks" if gpu.num_active_nvlinks else ""
    yield _gpu_finding(
        f"GPU {gpu.index}",
        Status.OK,
        f"{gpu.name}, {render_bytes(gpu.total_bytes)} ({render_bytes(gpu.free_bytes)} free), "
        f"compute capability {_dotted(gpu.compute_capability)}: {said}{links}",
    )
    if gpu.processes:
        pids = ", ".join(str(process.pid) for process in gpu.processes[:6])
        held = gpu.total_bytes - gpu.free_bytes
        yield _gpu_finding(
            f"GPU {gpu.index} in use",
            Status.WARNING,
            f"{len(gpu.processes)} processes hold {render_bytes(held)} (pid {pids})",
            f"wait for them, or choose another card; to see them: nvidia-smi -i {gpu.index}",
        )
    if gpu.uncorrected_ecc_errors:
        yield _gpu_finding(
            f"GPU {gpu.index} memory errors",
            Status.FAULT,
            f"{gpu.uncorrected_ecc_errors} uncorrected ECC errors since the last reset",
            f"have the card reset: nvidia-smi --gpu-reset -i {gpu.index}    (needs root)",
        )
    yield from _check_slowdown(gpu)


def _check_slowdown(gpu: GpuReading) -> Iterator[Finding]:
    for bits, why in ((SLOWED_BY_HEAT, "heat"), (SLOWED_BY_POWER_BRAKE, "the power brake")):
        if gpu.slowdown_reasons & bits:
            yield _gpu_finding(
                f"GPU {gpu.index} slowed",
                Status.WARNING,
                f"its clocks are held down by {why}",
                f"see to cooling and power: nvidia-smi -q -d PERFORMANCE -i {gpu.index}",
            )


def check_services(here: SystemProbes, driver: DriverReading) -> Iterator[Finding]:
    """Fabric manager and DCGM, where there are several A100, H100, H200 or B200 on SXM boards."""
    boards = [gpu for gpu in driver.gpus if any(name in gpu.name for name in _SXM_NAMES)]
    if len(boards) < 2:
        return
    processes = here.list_process_names()
    if here.has_nvswitch() or len(boards) >= _NUM_GPUS_OF_A_SWITCHED_BOX:
        yield _check_fabric(boards, is_running="nv-fabricmanager" in processes)
    has_dcgm = "nv-hostengine" in processes
    yield _gpu_finding(
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
        return _gpu_finding("fabric manager", Status.OK, "the NVSwitch fabric is up")
    why = "is not running" if not is_running else "has not brought the fabric up"
    return _gpu_finding(
        "fabric manager",
        Status.FAULT,
        f"nvidia-fabricmanager {why}: CUDA will fail to start on these GPUs (error 802)",
        "systemctl enable --now nvidia-fabricmanager    (same version as the driver; needs root)",
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _gpu_finding(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="gpu", name=name, status=status, detail=detail, remedy=remedy)


# RAM, cores, shared memory and disks, held against what training asks of them.

LITTLE_MEMORY_BYTES = 8 * GIB
CONTAINER_SHM_BYTES = 64 * MIB
"""Docker's default. NCCL and data loader workers die of it."""
LITTLE_SHM_BYTES = GIB
LITTLE_LOCKED_MEMORY_BYTES = 64 * MIB
"""InfiniBand pins its buffers; below this NCCL cannot register them."""
CORES_PER_GPU = 2


def check_machine(here: SystemProbes, driver: DriverReading) -> Iterator[Finding]:
    """RAM, cores, /dev/shm and locked memory."""
    machine = here.read_host()
    yield _check_memory(machine, driver)
    yield _check_cores(machine, num_gpus=len(driver.gpus))
    yield _check_shm(machine)
    locked = machine.locked_memory_limit_bytes
    if machine.has_infiniband and locked is not None and locked < LITTLE_LOCKED_MEMORY_BYTES:
        yield _memory_finding(
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
        return _memory_finding("RAM", Status.WARNING, f"{detail}: {why}", remedy)
    return _memory_finding("RAM", Status.INFO if machine.memory_limit_bytes else Status.OK, detail)


def _check_cores(machine: Machine, *, num_gpus: int) -> Finding:
    usable, detail = machine.num_usable_cores, f"{machine.num_cores}"
    if usable < machine.num_cores:
        detail = f"{usable} of {machine.num_cores} may be used (affinity or quota)"
    if num_gpus and usable < CORES_PER_GPU * num_gpus:
        return _memory_finding(
            "cores",
            Status.WARNING,
            f"{detail}: fewer than {CORES_PER_GPU} for each of {num_gpus} GPUs; loading will lag",
            "ask for more cores for the job or container (Slurm --cpus-per-task, docker --cpus)",
        )
    status = Status.INFO if usable < machine.num_cores else Status.OK
    return _memory_finding("cores", status, detail)


def _check_shm(machine: Machine) -> Finding:
    if machine.shm_bytes is None:
        return _memory_finding(
            "/dev/shm",
            Status.FAULT,
            "is not there",
            "mount -t tmpfs tmpfs /dev/shm    (needs root)",
        )
    detail = f"{render_bytes(machine.shm_bytes)}, {render_bytes(machine.shm_free_bytes or 0)} free"
    remedy = "docker run --shm-size=16g or --ipc=host; Kubernetes: a Memory emptyDir at /dev/shm"
    if machine.shm_bytes <= CONTAINER_SHM_BYTES:
        detail += ": a container's default, too small for several GPUs or data loaders"
        return _memory_finding("/dev/shm", Status.FAULT, detail, remedy)
    if (machine.shm_free_bytes or 0) < LITTLE_SHM_BYTES:
        return _memory_finding(
            "/dev/shm", Status.WARNING, f"{detail}: little for several GPUs", remedy
        )
    return _memory_finding("/dev/shm", Status.OK, detail)


def check_disks(here: SystemProbes) -> Iterator[Finding]:
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


def _memory_finding(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="memory", name=name, status=status, detail=detail, remedy=remedy)


# torch and its companions by their metadata, and whether torch suits the driver and the cards.

MIN_DRIVER_BY_CUDA = {11: 450, 12: 525, 13: 580}
"""By CUDA's major version. Source: docs.nvidia.com/deploy/cuda-compatibility, minor versions."""

_TRAINING = ("transformers", "peft", "accelerate", "datasets", "safetensors")
_OPTIONAL = {
    "bitsandbytes": "4-bit and 8-bit weights, 8-bit optimizers",
    "liger-kernel": "fused kernels",
    "deepspeed": "ZeRO with offload",
    "flash-attn": "FlashAttention kernels",
}
_FLASH_ATTENTION_NEEDS = (8, 0)


def check_packages(here: SystemProbes, driver: DriverReading) -> Iterator[Finding]:
    """torch first: the rest is no use without it."""
    torch = here.read_torch_build()
    yield from _check_torch(torch, driver)
    missing = [name for name in _TRAINING if here.read_version(name) is None]
    for name in _TRAINING:
        version = here.read_version(name)
        if version is not None:
            yield _package_finding(name, Status.OK, version)
    if missing:
        yield _package_finding(
            "training",
            Status.INFO,
            f"not installed: {', '.join(missing)}; planning needs none of them",
            "pip install 'tightfit[train]'",
        )
    for name, purpose in _OPTIONAL.items():
        yield _check_optional(name, purpose, here.read_version(name), driver)


def _check_torch(torch: TorchBuild | None, driver: DriverReading) -> Iterator[Finding]:
    if torch is None:
        yield _package_finding(
            "torch",
            Status.INFO,
            "not installed; planning needs none",
            "pip install 'tightfit[train]'",
        )
        return
    built = "built for the CPU alone"
    if torch.cuda:
        built = f"built for CUDA {torch.cuda[0]}.{torch.cuda[1]}"
    elif torch.hip:
        built = f"built for ROCm {torch.hip}"
    yield _package_finding("torch", Status.OK, f"{torch.version}, {built}")
    if not driver.gpus:
        return
    if torch.cuda is None:
        yield _package_finding(
            "torch and GPU",
            Status.FAULT,
            f"torch {torch.version} cannot use the {driver.gpus[0].name} here",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
            f"{_wheel_for(driver)}",
        )
        return
    yield from _check_driver(torch, driver)
    yield from _check_architectures(torch, driver.gpus)


def _check_driver(torch: TorchBuild, driver: DriverReading) -> Iterator[Finding]:
    major = torch.cuda[0] if torch.cuda else 0
    needed = MIN_DRIVER_BY_CUDA.get(major)
    release = re.match(r"[0-9]+", driver.driver_version or "")
    if needed is None or release is None or int(release.group()) >= needed:
        return
    yield _package_finding(
        "torch and driver",
        Status.FAULT,
        f"torch for CUDA {major} needs driver {needed} or newer; here is {driver.driver_version}",
        "update the driver, or: pip install --force-reinstall torch --index-url "
        f"https://download.pytorch.org/whl/{_wheel_for(driver)}",
    )


def oldest_capability(torch: TorchBuild) -> tuple[int, int]:
    """The oldest compute capability that the wheel of this torch has kernels for.

    Source: PyTorch's RELEASE.md, CUDA support matrix; pytorch issues 157517 (Maxwell and
    Pascal leave the 12.8 builds), 172352 (Volta leaves them with 2.11). Builds from
    source may differ, so a card below it is a warning where torch was not a wheel's build.
    """
    cuda = torch.cuda or (0, 0)
    if cuda >= (13, 0):
        return (7, 5)
    if cuda >= (12, 8):
        release = tuple(int(part) for part in re.findall(r"[0-9]+", torch.version)[:2])
        return (7, 0) if (2, 8) <= release < (2, 11) else (7, 5)
    return (5, 0)


def _check_architectures(torch: TorchBuild, gpus: tuple[GpuReading, ...]) -> Iterator[Finding]:
    oldest = oldest_capability(torch)
    cuda = torch.cuda or (0, 0)
    for name, capability in sorted({(gpu.name, gpu.compute_capability) for gpu in gpus}):
        wheel = None
        if capability < oldest:
            wheel = "cu126"
        elif capability >= (10, 0) and cuda < (12, 8):
            wheel = "cu128"
        if wheel is not None:
            yield _package_finding(
                f"torch and {name}",
                Status.FAULT,
                f"torch {torch.version} for CUDA {cuda[0]}.{cuda[1]} has no kernels for compute "
                f"capability {capability[0]}.{capability[1]}",
                "pip install --force-reinstall torch --index-url "
                f"https://download.pytorch.org/whl/{wheel}",
            )


def _wheel_for(driver: DriverReading) -> str:
    """The wheel index that suits the oldest card and the driver."""
    oldest = min(gpu.compute_capability for gpu in driver.gpus)
    release = re.match(r"[0-9]+", driver.driver_version or "")
    is_new = release is not None and int(release.group()) >= MIN_DRIVER_BY_CUDA[13]
    if oldest < (7, 5):
        return "cu126"
    return "cu130" if is_new else "cu128"


def _check_optional(name: str, purpose: str, version: str | None, driver: DriverReading) -> Finding:
    if version is None:
        return _package_finding(name, Status.INFO, f"not installed ({purpose}); optional")
    old = [gpu for gpu in driver.gpus if gpu.compute_capability < _FLASH_ATTENTION_NEEDS]
    if name == "flash-attn" and old:
        return _package_finding(
            name,
            Status.WARNING,
            f"{version} does not run on {old[0].name}: it needs compute capability 8.0",
            "plan with --attention sdpa on this card",
        )
    return _package_finding(name, Status.OK, f"{version} ({purpose})")


def _package_finding(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="packages", name=name, status=status, detail=detail, remedy=remedy)


# Slurm, Kubernetes and the model hub: reachable or not, and with which rights.

TIMEOUT_SECONDS = 3.0
_TRUE = ("1", "true", "yes", "on")
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def check_slurm(here: SystemProbes) -> list[Finding]:
    """Whether `sinfo` answers, and with which partitions."""
    try:
        version = here.run(("sinfo", "--version"), TIMEOUT_SECONDS).strip()
    except SetupError:
        return [_cluster_finding("Slurm", Status.INFO, "not on this machine")]
    try:
        partitions = here.run(("sinfo", "-h", "-o", "%R"), TIMEOUT_SECONDS).split()
    except SetupError as error:
        detail = f"{version} is installed, but its controller does not answer: {error.problem}"
        return [
            _cluster_finding("Slurm", Status.WARNING, detail, "scontrol ping    (is slurmctld up?)")
        ]
    names = ", ".join(dict.fromkeys(partitions)) or "none that this user may use"
    return [_cluster_finding("Slurm", Status.OK, f"{version}; partitions: {names}")]


def check_kubernetes(here: SystemProbes) -> list[Finding]:
    """Whether `kubectl` answers. Silence is a warning only where a cluster is configured."""
    try:
        here.run(("kubectl", "version", "--client"), TIMEOUT_SECONDS)
    except SetupError:
        return [_cluster_finding("Kubernetes", Status.INFO, "no kubectl on this machine")]
    try:
        ask = ("kubectl", "get", "nodes", "-o", "name", "--request-timeout=2s")
        nodes = here.run(ask, TIMEOUT_SECONDS).split()
    except SetupError as error:
        if not _is_configured(here):
            return [
                _cluster_finding(
                    "Kubernetes", Status.INFO, "kubectl is here, no cluster is configured"
                )
            ]
        detail = f"the configured cluster does not answer: {error.problem}"
        return [_cluster_finding("Kubernetes", Status.WARNING, detail, "kubectl cluster-info")]
    return [_cluster_finding("Kubernetes", Status.OK, f"{len(nodes)} nodes")]


def _is_configured(here: SystemProbes) -> bool:
    paths = here.environ.get("KUBECONFIG", "").split(":")
    home = here.environ.get("HOME", "")
    candidates = [*filter(None, paths), f"{home}/.kube/config"]
    return "KUBERNETES_SERVICE_HOST" in here.environ or any(
        here.has_file(Path(path)) for path in candidates
    )


def check_hub(here: SystemProbes) -> Iterator[Finding]:
    """Token and offline switches. The token itself is never shown."""
    where = _token_place(here)
    yield Finding(
        area="hub",
        name="token",
        status=Status.OK if where else Status.INFO,
        detail=f"found in {where}" if where else "none; gated models cannot be downloaded",
        remedy=None if where else "hf auth login",
    )
    offline = [name for name in _OFFLINE_VARIABLES if _is_on(here.environ, name)]
    yield Finding(
        area="hub",
        name="offline mode",
        status=Status.INFO if offline else Status.OK,
        detail=f"on, by {', '.join(offline)}: only cached models" if offline else "off",
        remedy=f"to download: unset {' '.join(offline)}" if offline else None,
    )


def _token_place(here: SystemProbes) -> str | None:
    for name in _TOKEN_VARIABLES:
        if here.environ.get(name, "").strip():
            return f"the variable {name}"
    stated = here.environ.get("HF_TOKEN_PATH")
    home = here.environ.get("HF_HOME")
    base = model_cache({"HF_HOME": home} if home else {**here.environ, **_NO_HUB}).parent
    path = Path(stated) if stated else base / "token"
    return f"the file {path}" if here.has_file(path) else None


_NO_HUB = {"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": ""}
"""The token stays at its default place where only the cache was moved."""


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().casefold() in _TRUE


def _cluster_finding(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="cluster", name=name, status=status, detail=detail, remedy=remedy)


__all__ = ["Checkup", "Finding", "Status", "run_checkup"]


class Checkup(Frozen):
    """All findings, in the order they are shown."""

    findings: tuple[Finding, ...]
    worst: Status
    exit_code: int
    """6 where there is a fault, else 0."""

    def count(self, status: Status) -> int:
        return Counter(finding.status for finding in self.findings)[status]


def run_checkup(surroundings: SystemProbes | None = None) -> Checkup:
    """Look at everything. Takes a few seconds at most, whatever hangs."""
    here = surroundings or SystemProbes()
    # The two that wait for a network run beside the rest.
    with ThreadPoolExecutor(max_workers=2) as pool:
        slurm = pool.submit(check_slurm, here)
        kubernetes = pool.submit(check_kubernetes, here)
        driver = here.read_gpus()
        findings = [
            *_check_python(here),
            *check_gpus(here, driver),
            *check_services(here, driver),
            *check_machine(here, driver),
            *check_disks(here),
            *check_packages(here, driver),
            *slurm.result(),
            *kubernetes.result(),
            *check_hub(here),
        ]
    return _conclude(findings)


def _check_python(here: SystemProbes) -> Iterator[Finding]:
    version = ".".join(map(str, here.python_version))
    place = "a virtual environment" if sys.prefix != sys.base_prefix else "the system's Python"
    yield Finding(
        area="python",
        name="Python",
        status=Status.OK,
        detail=f"{version} in {place}, on {platform.system()} {platform.release()}",
    )


def _conclude(findings: list[Finding]) -> Checkup:
    worst = max((finding.status for finding in findings), key=list(Status).index)
    code = SetupError.exit_code if worst is Status.FAULT else 0
    return Checkup(findings=tuple(findings), worst=worst, exit_code=code)
