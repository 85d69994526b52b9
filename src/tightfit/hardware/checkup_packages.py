"""torch and its companions by their metadata, and whether torch suits the driver and the cards."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tightfit.hardware.findings import Finding, Status
from tightfit.hardware.nvml import DriverReading, GpuReading
from tightfit.hardware.surroundings import Surroundings, TorchBuild

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


def check_packages(here: Surroundings, driver: DriverReading) -> Iterator[Finding]:
    """torch first: the rest is no use without it."""
    torch = here.read_torch_build()
    yield from _check_torch(torch, driver)
    missing = [name for name in _TRAINING if here.read_version(name) is None]
    for name in _TRAINING:
        version = here.read_version(name)
        if version is not None:
            yield _found(name, Status.OK, version)
    if missing:
        yield _found(
            "training",
            Status.INFO,
            f"not installed: {', '.join(missing)}; planning needs none of them",
            "pip install 'tightfit[train]'",
        )
    for name, purpose in _OPTIONAL.items():
        yield _check_optional(name, purpose, here.read_version(name), driver)


def _check_torch(torch: TorchBuild | None, driver: DriverReading) -> Iterator[Finding]:
    if torch is None:
        yield _found(
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
    yield _found("torch", Status.OK, f"{torch.version}, {built}")
    if not driver.gpus:
        return
    if torch.cuda is None:
        yield _found(
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
    yield _found(
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
            yield _found(
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
        return _found(name, Status.INFO, f"not installed ({purpose}); optional")
    old = [gpu for gpu in driver.gpus if gpu.compute_capability < _FLASH_ATTENTION_NEEDS]
    if name == "flash-attn" and old:
        return _found(
            name,
            Status.WARNING,
            f"{version} does not run on {old[0].name}: it needs compute capability 8.0",
            "plan with --attention sdpa on this card",
        )
    return _found(name, Status.OK, f"{version} ({purpose})")


def _found(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="packages", name=name, status=status, detail=detail, remedy=remedy)
