"""The whole calibration of one machine, part by part, within a time budget."""

from __future__ import annotations

import contextlib
import importlib
import platform
import socket
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch

from tightfit.core.errors import SetupError
from tightfit.core.progress import Progress
from tightfit.core.version import __version__
from tightfit.hardware.calibration import Calibration
from tightfit.hardware.environment import read_version
from tightfit.hardware.local import read_cpu
from tightfit.hardware.nvml import read_driver
from tightfit.hardware.types import Node
from tightfit.runtime.calibrate.bench import Bench, warm_up
from tightfit.runtime.calibrate.context import measure_context
from tightfit.runtime.calibrate.disturbance import Disturbance
from tightfit.runtime.calibrate.host import measure_host
from tightfit.runtime.calibrate.kernels import (
    measure_attention,
    measure_matmuls,
    measure_nf4,
    measure_optimizers,
    measure_sustained,
    measure_traffic,
)
from tightfit.runtime.calibrate.links import measure_collectives, measure_host_link
from tightfit.runtime.libraries import silence_libraries

DEFAULT_SECONDS = 100.0
"""Time of the measurements; starting torch and processes comes on top."""
WARM_UP_FRACTION = 0.02
PACKAGES = ("torch", "transformers", "bitsandbytes", "triton")


def measure_machine(
    node: Node, *, budget_seconds: float = DEFAULT_SECONDS, report: Progress | None = None
) -> Calibration:
    """Measure the device that `node` describes, on this machine.

    Several GPUs: rates are the first one's, collectives run over all. Nothing is written.
    """
    began = time.monotonic()
    driver = read_driver()
    disturbance = Disturbance(is_cpu=node.gpu.is_cpu)
    _load_libraries()  # before the time runs
    bench = _open_bench(node, budget_seconds)
    found: dict[str, Any] = {}
    parts = _list_parts(bench, node)
    for number, (name, share, measure) in enumerate(parts):
        if report is not None:
            report(f"measuring {name}", number, len(parts))
        later = sum(weight for _, weight, _ in parts[number:])
        with bench.part(share / later):
            found |= measure()
    if report is not None:
        report("measuring", len(parts), len(parts))
    return Calibration(
        gpu_name=node.gpu.name,
        host=socket.gethostname(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        num_gpus=node.num_gpus,
        is_cpu=bench.is_cpu,
        device=read_cpu().model if bench.is_cpu else torch.cuda.get_device_name(bench.device),
        driver_version=None if bench.is_cpu else driver.driver_version,
        versions=_read_versions(),
        seconds=round(time.monotonic() - began, 1),
        skipped=tuple(bench.skipped),
        warnings=disturbance.find(bench.spreads),
        **found,
    )


def _load_libraries() -> None:
    """Import what is installed; what is missing is reported where it is needed."""
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        silence_libraries()
        importlib.import_module("transformers").LlamaForCausalLM  # noqa: B018 (loads it)
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        importlib.import_module("bitsandbytes")


def _open_bench(node: Node, budget_seconds: float) -> Bench:
    gpu = node.gpu
    if not gpu.is_cpu and not torch.cuda.is_available():
        raise SetupError(
            f"torch {torch.__version__} cannot use the {gpu.name} of this machine.",
            remedy="tightfit doctor    (names what is wrong; --device cpu measures the CPU)",
        )
    if gpu.is_cpu and node.num_cores:
        torch.set_num_threads(node.num_cores)  # as a run's worker has them
    dtype = torch.bfloat16 if gpu.supports_bf16 else torch.float16
    return Bench(
        device=torch.device("cpu") if gpu.is_cpu else torch.device("cuda", 0),
        dtype=torch.float32 if gpu.is_cpu else dtype,
        supports_bf16=gpu.supports_bf16,
        deadline=time.monotonic() + budget_seconds,
    )


Part = tuple[str, float, Callable[[], dict[str, Any]]]
"""A name to show, a share of the time, and the measurement."""


def _list_parts(bench: Bench, node: Node) -> list[Part]:
    parts: list[Part] = [
        ("the host's launches", 10.0, lambda: {"host_times": measure_host(bench)}),
        ("matrix products", 40.0, lambda: _measure_products(bench)),
        ("attention", 40.0, lambda: {"attention": tuple(measure_attention(bench))}),
        ("memory", 15.0, lambda: {"traffic": tuple(measure_traffic(bench))}),
        ("AdamW", 5.0, lambda: {"optimizers": tuple(measure_optimizers(bench))}),
        ("nf4", 3.0, lambda: {"nf4_weights_per_second": measure_nf4(bench)}),
    ]
    if not bench.is_cpu:
        parts.insert(0, ("the CUDA context", 5.0, lambda: _measure_context(bench)))
        parts.append(
            ("host copies", 3.0, lambda: {"host_link": measure_host_link(bench)}),
        )
        if node.num_gpus > 1:
            parts.append(("collectives", 20.0, lambda: _measure_collectives(bench, node)))
    return parts


def _measure_products(bench: Bench) -> dict[str, Any]:
    warm_up(bench, seconds=WARM_UP_FRACTION * max(bench.seconds_left, 0.0))
    sustained = measure_sustained(bench)
    return {"matmuls": tuple(measure_matmuls(bench)), "sustained": sustained}


def _measure_context(bench: Bench) -> dict[str, Any]:
    size, why = measure_context()
    if size is None:
        bench.skipped.append(why)
    return {"context_bytes": size}


def _measure_collectives(bench: Bench, node: Node) -> dict[str, Any]:
    count = min(node.num_gpus, torch.cuda.device_count())
    rows, why = measure_collectives(count, timeout_seconds=max(bench.seconds_left, 20.0))
    if why:
        bench.skipped.append(why)
    return {"collectives": tuple(rows)}


def _read_versions() -> dict[str, str]:
    found = {name: read_version(name) for name in PACKAGES}
    versions = {"tightfit": __version__, "python": platform.python_version()}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return versions | {name: version for name, version in found.items() if version is not None}
