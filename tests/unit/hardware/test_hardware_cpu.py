"""The CPU as a device: words, shares, and what its flags are worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tightfit.core.errors import InvalidInputError
from tightfit.core.units import GIB
from tightfit.hardware.local import CpuReading, describe_cpu, describe_cpu_node, probe_cpu, read_cpu
from tightfit.hardware.machine import Machine
from tightfit.hardware.resolve import read_cpu_words, resolve_hardware

MACHINE = Machine(
    memory_bytes=64 * GIB,
    available_memory_bytes=48 * GIB,
    memory_limit_bytes=None,
    num_cores=16,
    num_usable_cores=8,
    shm_bytes=None,
    shm_free_bytes=None,
    locked_memory_limit_bytes=None,
)
XEON = CpuReading(model="Xeon", hz=2.0e9, flags=frozenset({"fma", "avx512f", "amx_bf16"}))
OLD = CpuReading(model="Old", hz=3.0e9, flags=frozenset({"fma", "avx2"}))


@pytest.mark.parametrize(
    ("text", "count"),
    [("cpu", 1), ("CPU", 1), ("2xcpu", 2), (" 4 x cpus ", 4), ("cpux", None), ("T4", None)],
)
def test_words(text: str, count: int | None) -> None:
    assert read_cpu_words(text) == count


@pytest.mark.parametrize("text", ["0xcpu", "99999xcpu", "9" * 5000 + "xcpu"])
def test_absurd_counts_are_one_message(text: str) -> None:
    with pytest.raises(InvalidInputError, match="processes"):
        read_cpu_words(text)


def test_processes_share_cores_and_free_memory() -> None:
    whole, half = (describe_cpu(MACHINE, XEON, num_processes=count) for count in (1, 2))
    assert whole.memory_bytes == 48 * GIB == 2 * half.memory_bytes
    assert whole.peak_flops["fp32"] == pytest.approx(8 * 2.0e9 * 64)
    assert half.peak_flops["fp32"] == pytest.approx(whole.peak_flops["fp32"] / 2)
    assert half.memory_bytes_per_second == pytest.approx(whole.memory_bytes_per_second / 2)
    assert (whole.name, half.name) == ("CPU, 8 cores", "CPU, 4 cores")


def test_bf16_only_with_its_units() -> None:
    assert describe_cpu(MACHINE, XEON).supports_bf16
    old = describe_cpu(MACHINE, OLD)
    assert not old.supports_bf16
    assert old.peak_flops.keys() == {"fp32"}
    assert old.peak_flops["fp32"] == pytest.approx(8 * 3.0e9 * 32)


def test_a_containers_limit_counts() -> None:
    limited = replace(MACHINE, memory_limit_bytes=4 * GIB)
    assert describe_cpu(limited, XEON).memory_bytes == 4 * GIB


def test_more_processes_than_cores_is_said() -> None:
    cluster = probe_cpu(9, read_host=lambda: MACHINE, read_chip=lambda: XEON)
    assert cluster.num_gpus == 9
    assert "9 processes share 8 cores" in cluster.warnings[0]


def test_cpuinfo_is_read(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: Some CPU\nflags\t\t: fma avx2\n\nmodel name : Other\n")
    reading = read_cpu(info)
    assert reading.model == "Some CPU"
    assert reading.flags == {"fma", "avx2"}
    assert read_cpu(tmp_path / "nothing").flags == frozenset()


def test_this_machine_can_be_named() -> None:
    [group] = resolve_hardware("2xcpu").groups
    assert group.node.num_gpus == 2
    assert group.node.gpu.is_cpu
    assert 0 < group.node.gpu.memory_bytes * 2 <= (group.node.host_memory_bytes or 0)


def test_a_node_that_only_its_scheduler_describes() -> None:
    node = describe_cpu_node(num_cores=64, memory_bytes=256 * GIB, threads_per_core=2)
    assert node.name == "CPU, 32 cores"
    assert node.memory_bytes == 256 * GIB
    assert node.peak_flops == {"fp32": 32 * 2.0e9 * 32}
    assert "assumed: 2 GHz, AVX2" in node.notes
    reported = describe_cpu_node(num_cores=32, memory_bytes=GIB, features=("icelake", "avx512"))
    assert reported.peak_flops["fp32"] == 2 * node.peak_flops["fp32"]
    assert not reported.supports_bf16
