"""This machine by NVML: known, unknown, mixed and divided GPUs, and none at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_nvml import H100, MIB, T4, V100, Card, FakeNvml

from tightfit.core.units import GIB
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.local import gpu_from_reading, probe_here
from tightfit.hardware.machine import (
    Machine,
    model_cache,
    read_driver,
    read_free_disk,
    read_machine,
)
from tightfit.hardware.types import Cluster

GOLDEN = Path(__file__).parents[2] / "golden" / "hardware"
MACHINE = Machine(
    memory_bytes=256 * GIB,
    available_memory_bytes=200 * GIB,
    memory_limit_bytes=None,
    num_cores=32,
    num_usable_cores=32,
    shm_bytes=128 * GIB,
    shm_free_bytes=128 * GIB,
    locked_memory_limit_bytes=None,
)


def _probe(*cards: Card, visible: str | None = None) -> Cluster:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return probe_here(
        read_gpus=lambda: read_driver(FakeNvml(cards=cards), environ=environ),
        read_host=lambda: MACHINE,
    )


def _h200() -> tuple[FakeNvml, int]:
    recorded = json.loads((GOLDEN / "nvml_h200.json").read_text())
    cards = [
        Card(**{**card, "compute_capability": tuple(card["compute_capability"])})
        for card in recorded["cards"]
    ]
    fake = FakeNvml(cards=cards, driver=recorded["driver_version"], cuda=recorded["cuda_version"])
    return fake, recorded["torch_total_bytes"]


def test_four_v100() -> None:
    cluster = _probe(V100, V100, V100, V100)
    [group] = cluster.groups
    assert group.name == "here"
    assert group.node.gpu == find_gpu("V100-32GB").model_copy()
    assert group.node.num_gpus == 4
    assert group.node.has_nvlink is True
    assert group.node.free_gpu_memory_bytes == 32500 * MIB
    assert group.node.host_memory_bytes == 256 * GIB
    assert group.num_free_gpus == 4
    assert cluster.warnings == ()


def test_a_real_h200_is_planned_with_what_torch_reported_there() -> None:
    fake, torch_total_bytes = _h200()
    [group] = probe_here(read_gpus=lambda: read_driver(fake, environ={})).groups
    assert group.node.gpu.name == "H200-SXM"
    assert group.node.gpu.memory_bytes == pytest.approx(torch_total_bytes, rel=1e-5)
    assert read_driver(fake, environ={}).cuda_version == (13, 0)


def test_a_card_rebuilt_from_its_clocks_is_like_the_vendors_figures() -> None:
    fake, _ = _h200()
    gpu = gpu_from_reading(read_driver(fake, environ={}).gpus[0])
    known = find_gpu("H200")
    assert gpu.memory_bytes_per_second == pytest.approx(known.memory_bytes_per_second, rel=0.02)
    assert gpu.peak_flops["fp32"] == pytest.approx(known.peak_flops["fp32"], rel=0.02)
    assert gpu.peak_flops["bf16"] == pytest.approx(known.peak_flops["bf16"], rel=0.02)
    assert gpu.pcie_bytes_per_second == pytest.approx(known.pcie_bytes_per_second, rel=0.02)


def test_an_unknown_card_is_planned_for_with_a_warning() -> None:
    ada = Card(
        name="NVIDIA RTX 4500 Ada Generation",
        total_bytes=24570 * MIB,
        compute_capability=(8, 9),
        num_cores=7680,
        sm_mhz=2580,
        memory_mhz=9001,
        bus_bits=192,
        pcie_generation=4,
        pcie_lanes=16,
    )
    cluster = _probe(ada)
    gpu = cluster.groups[0].node.gpu
    assert gpu.name == "NVIDIA RTX 4500 Ada Generation"
    # NVIDIA's datasheet: 432 GB/s, 39.6 TFLOP/s in fp32.
    assert gpu.memory_bytes_per_second == pytest.approx(432e9, rel=0.01)
    assert gpu.peak_flops["fp32"] == pytest.approx(39.6e12, rel=0.01)
    assert gpu.supports_bf16
    assert 23 * GIB < gpu.memory_bytes < 24 * GIB
    assert "not in the catalogue" in cluster.warnings[0]


def test_an_unknown_card_that_tells_little_follows_the_nearest_one() -> None:
    titan = Card(name=b"TITAN V CEO Edition", total_bytes=32768 * MIB, compute_capability=(7, 0))
    gpu = _probe(titan).groups[0].node.gpu
    assert gpu.name == "TITAN V CEO Edition"
    assert "V100" in gpu.notes
    assert not gpu.supports_bf16


def test_different_cards_are_different_groups() -> None:
    cluster = _probe(*[T4] * 6, *[V100] * 2)
    assert {(group.name, group.node.num_gpus) for group in cluster.groups} == {
        ("here/Tesla T4", 6),
        ("here/Tesla V100-SXM2-32GB", 2),
    }
    assert any("differ" in warning for warning in cluster.warnings)


@pytest.mark.parametrize(
    ("total_mib", "name"), [(10240, "GeForce RTX 3080 10GB"), (12288, "GeForce RTX 3080 12GB")]
)
def test_the_memory_tells_which_card_of_a_name_it_is(total_mib: int, name: str) -> None:
    # The driver prints the same name for both.
    card = Card(
        name="NVIDIA GeForce RTX 3080", total_bytes=total_mib * MIB, compute_capability=(8, 6)
    )
    cluster = _probe(card)
    assert cluster.groups[0].node.gpu.name == name
    assert not cluster.warnings


def test_a_card_with_more_memory_than_its_name_says() -> None:
    modified = Card(
        name="NVIDIA GeForce RTX 4090", total_bytes=49140 * MIB, compute_capability=(8, 9)
    )
    cluster = _probe(modified)
    assert cluster.groups[0].node.gpu.memory_bytes > 46 * GIB
    assert "more than the catalogue's" in cluster.warnings[0]


def test_a_card_with_less_memory_than_its_name_says() -> None:
    part = Card(name="Tesla T4", total_bytes=8192 * MIB, compute_capability=(7, 5))
    assert _probe(part).groups[0].node.gpu.memory_bytes < 8192 * MIB


def test_mig_slices_take_the_cards_place() -> None:
    slice_ = Card(
        name="NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        total_bytes=4864 * MIB,
        compute_capability=(8, 0),
    )
    whole = Card(
        name="NVIDIA A100-SXM4-40GB",
        total_bytes=40960 * MIB,
        compute_capability=(8, 0),
        slices=(slice_,) * 3,
    )
    [group] = _probe(whole).groups
    assert group.node.num_gpus == 1
    assert group.node.gpu.memory_bytes < 5 * GIB
    assert group.node.gpu.peak_flops["bf16"] < find_gpu("A100").peak_flops["bf16"] / 6


def test_busy_cards_are_said_and_the_fullest_counts() -> None:
    busy = Card(
        name="Tesla T4",
        total_bytes=15360 * MIB,
        free_bytes=2048 * MIB,
        compute_capability=(7, 5),
        processes=((4242, 13000 * MIB),),
    )
    cluster = _probe(T4, busy)
    [group] = cluster.groups
    assert group.node.free_gpu_memory_bytes == 2048 * MIB
    assert (group.num_free_gpus, group.num_free_nodes) == (1, 0)
    assert "in use" in cluster.warnings[0]


@pytest.mark.parametrize(
    ("setting", "left"),
    [("0,2", 2), ("1", 1), ("GPU-00000003", 1), ("0,9,1", 1), ("0,0", 1)],
)
def test_hidden_cards_are_left_out(setting: str, left: int) -> None:
    cards = [Card(name="Tesla T4", total_bytes=15360 * MIB, compute_capability=(7, 5))] * 3
    cards.append(Card(name="Tesla T4", total_bytes=15360 * MIB, compute_capability=(7, 5)))
    distinct = [Card(**{**vars(card)}) for card in cards]
    cluster = _probe(*distinct, visible=setting)
    assert cluster.num_gpus == left
    assert "CUDA_VISIBLE_DEVICES" in cluster.warnings[0]


@pytest.mark.parametrize("setting", ["", "-1", "none"])
def test_where_all_cards_are_hidden_the_cpu_is_used(setting: str) -> None:
    cluster = _probe(T4, visible=setting)
    assert cluster.groups[0].node.gpu.is_cpu
    assert "CUDA_VISIBLE_DEVICES hides all 1" in cluster.warnings[0]


def test_without_a_driver_the_cpu_is_used_with_a_warning() -> None:
    cluster = probe_here(
        read_gpus=lambda: read_driver(FakeNvml(is_missing=True), environ={}),
        read_host=lambda: MACHINE,
    )
    [group] = cluster.groups
    assert group.node.gpu.is_cpu
    assert group.node.gpu.memory_bytes == 200 * GIB
    assert "NVML Shared Library Not Found" in cluster.warnings[0]


def test_nvml_is_closed_again() -> None:
    fake = FakeNvml(cards=[H100])
    read_driver(fake, environ={})
    assert not fake.is_open


def test_this_machine_is_read(tmp_path: Path) -> None:
    machine = read_machine()
    assert machine.memory_bytes > GIB // 4
    assert 1 <= machine.num_usable_cores <= machine.num_cores
    free = read_free_disk(tmp_path / "not" / "there" / "yet")
    assert free is not None
    assert free > 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limits_are_seen(tmp_path: Path, version: int) -> None:
    if version == 2:
        (tmp_path / "memory.max").write_text("536870912\n")
        (tmp_path / "cpu.max").write_text("150000 100000\n")
    else:
        for name in ("memory", "cpu"):
            (tmp_path / name).mkdir()
        (tmp_path / "memory" / "memory.limit_in_bytes").write_text("536870912\n")
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    machine = read_machine(cgroup=tmp_path)
    assert machine.memory_limit_bytes == 512 * MIB == machine.usable_memory_bytes
    assert machine.num_usable_cores <= 2


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_machine(cgroup=tmp_path).memory_limit_bytes is None


def test_the_model_cache_follows_the_hubs_variables() -> None:
    assert model_cache({"HF_HUB_CACHE": "/a"}) == Path("/a")
    assert model_cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert model_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
