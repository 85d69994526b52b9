"""Estimates on a CPU: host memory is the device's, and measured steps are the truth."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB, MIB
from tightfit.estimation.job import estimate_job
from tightfit.estimation.memory import estimate_step_peak_bytes
from tightfit.hardware.local import CpuReading, describe_cpu
from tightfit.hardware.machine import Machine
from tightfit.hardware.types import Node
from tightfit.models.resolve import resolve_model

MACHINE = Machine(
    memory_bytes=24 * GIB,
    available_memory_bytes=20 * GIB,
    memory_limit_bytes=None,
    num_cores=1,
    num_usable_cores=1,
    shm_bytes=None,
    shm_free_bytes=None,
    locked_memory_limit_bytes=None,
)
CHIP = CpuReading(model="Xeon", hz=2.1e9, flags=frozenset({"avx512f", "amx_bf16"}))
SMOL = resolve_model("SmolLM2-135M-Instruct")

# One core of the above: method, dtype, batch, length, recomputed; peak resident MiB, CPU seconds.
MEASURED = [
    ("lora", "fp32", 4, 256, False, 3795, 9.06),
    ("lora", "fp32", 4, 256, True, 2476, 11.94),
    ("lora", "fp32", 8, 256, False, 6723, 18.96),
    ("lora", "fp32", 1, 1024, False, 3762, 9.42),
    ("lora", "fp32", 2, 128, False, 1689, 2.42),
    ("lora", "fp32", 2, 128, True, 1361, 3.35),
    ("lora", "bf16", 4, 256, False, 2348, 4.97),
    ("full", "fp32", 2, 256, False, 3261, 5.60),
    ("dora", "fp32", 4, 256, False, 5412, 10.21),
]


def _node(num_processes: int = 1) -> Node:
    gpu = describe_cpu(MACHINE, CHIP, num_processes=num_processes)
    return Node(gpu=gpu, num_gpus=num_processes, host_memory_bytes=24 * GIB, num_cores=1)


def _strategy(**fields: Any) -> Strategy:
    plain = {"weights": "fp32", "compute": "fp32", "adapter_dtype": "fp32", "seq_len": 256}
    return Strategy(**(plain | fields))


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(map(str, row[:5])))
def test_measured_steps(row: tuple[str, str, int, int, bool, int, float]) -> None:
    method, dtype, batch, length, is_recomputed, peak_mib, cpu_seconds = row
    strategy = _strategy(
        method="full" if method == "full" else "lora",
        **{"weights": dtype, "compute": dtype, "adapter_dtype": dtype},
        micro_batch=batch,
        seq_len=length,
        checkpointing=is_recomputed,
        dora=method == "dora",
    )
    estimate = estimate_job(spec=SMOL, strategy=strategy, node=_node())
    assert estimate.gpu.peak_reserved_bytes / MIB == pytest.approx(peak_mib, rel=0.15)
    assert estimate.time.seconds_per_step == pytest.approx(cpu_seconds, rel=0.2)


def test_the_process_is_the_context_and_the_host() -> None:
    estimate = estimate_job(spec=SMOL, strategy=_strategy(), node=_node())
    assert "cuda_context" not in estimate.gpu.components
    assert estimate.gpu.components["process"] > 0
    assert estimate.host.peak_bytes == estimate.gpu.peak_reserved_bytes
    assert sum(estimate.gpu.components.values()) == estimate.gpu.peak_reserved_bytes
    assert "per process" in estimate.reason


def test_two_processes_take_twice() -> None:
    strategy = _strategy(sharding="ddp", gpus_per_node=2)
    estimate = estimate_job(spec=SMOL, strategy=strategy, node=_node(2))
    assert estimate.host.peak_bytes == 2 * estimate.gpu.peak_reserved_bytes


def test_offload_moves_nothing_away() -> None:
    kept, moved = (
        estimate_step_peak_bytes(
            SMOL, _strategy(method="full", sharding="fsdp", offload=offload), is_cpu=True
        )
        for offload in ("none", "all")
    )
    # Offloaded gradients are counted as state, which leaves no holes.
    assert moved == pytest.approx(kept, rel=0.1)
