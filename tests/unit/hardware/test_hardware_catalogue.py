"""The GPU catalogue: every row loads, every number has a source, and names find their row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from importlib import resources

import pytest

from machine_pace import allow
from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.units import GIB, MIB
from tightfit.hardware import catalogue
from tightfit.hardware.catalogue import (
    describe_gpu,
    find_gpu,
    list_gpus,
    match_gpu,
    search_gpus,
)
from tightfit.hardware.types import Gpu, Node

DOCUMENT = json.loads(resources.files("tightfit.catalogue").joinpath("gpus.json").read_text())
ROWS = DOCUMENT["gpus"]


def find_row(name: str) -> dict[str, object]:
    return next(row for row in ROWS if row["name"] == name)


def test_there_are_as_many_gpus_as_rows() -> None:
    assert len(list_gpus()) == len(ROWS) >= 30


@pytest.mark.parametrize("gpu", list_gpus(), ids=lambda gpu: gpu.name)
def test_memory_is_near_the_size_as_sold(gpu: Gpu) -> None:
    assert 0.85 <= gpu.memory_bytes / (gpu.marketing_gb * GIB) <= 1.0


@pytest.mark.parametrize("gpu", list_gpus(), ids=lambda gpu: gpu.name)
def test_rates_are_in_the_range_of_real_cards(gpu: Gpu) -> None:
    assert 1.9e11 <= gpu.memory_bytes_per_second <= 1e13
    assert 3e12 <= gpu.peak_flops["fp32"] <= 2e14
    assert all(3e12 <= rate <= 1e16 for rate in gpu.peak_flops.values())
    assert gpu.pcie_bytes_per_second in (8.0e9, 15.75e9, 31.5e9, 63.0e9)
    if gpu.compute_capability is not None:
        assert gpu.supports_bf16 == (gpu.compute_capability >= (8, 0))
    assert ("bf16" in gpu.peak_flops) == gpu.supports_bf16
    if gpu.achievable_bf16_flops is not None:
        assert gpu.achievable_bf16_flops < gpu.peak_flops["bf16"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_every_number_has_a_source_and_no_private_reference(row: dict[str, object]) -> None:
    numbers = [value for value in row.values() if isinstance(value, dict) and "value" in value]
    peaks = row["peak_tflops_dense"]
    assert isinstance(peaks, dict)
    for number in [*numbers, *peaks.values()]:
        assert number["source"].strip()
        assert not re.search(r"idx:|\d{8,}", number["source"])
        # A single word must be a key that the file itself explains.
        if " " not in number["source"]:
            assert number["source"] in DOCUMENT["sources"]
    prices = row["prices"]
    assert isinstance(prices, list)
    assert all(price["source"] in DOCUMENT["sources"] for price in prices)
    assert len(describe_gpu(str(row["name"])).numbers) == len(numbers) + len(peaks)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("pcie", {"value": "PCIe 4 x16", "source": "own"}, "there are PCIe 2.0 x16, PCIe 3.0 x16"),
        ("tdp_w", None, "no `tdp_w`"),
        ("memory_mib", 1, "unknown field `memory_mib`"),
        ("peak_tflops_dense", {"fp16_tensor": {}}, "unknown kind of peak `fp16_tensor`"),
    ],
)
def test_a_faulty_row_is_named_with_what_is_wrong(
    field: str, value: object, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**find_row("Tesla K20m"), field: value}
    if value is None:
        del row[field]
    monkeypatch.setattr(catalogue, "_document", lambda: {"gpus": [row]})
    catalogue._rows.cache_clear()
    try:
        with pytest.raises(InvalidInputError, match=rf"gpus.json, Tesla K20m: .*{named}"):
            catalogue._rows()
    finally:
        catalogue._rows.cache_clear()


def test_no_two_rows_share_a_name() -> None:
    owners: dict[str, str] = {}
    for row in ROWS:
        for alias in (row["name"], *row["aliases"], *row.get("default_for", ())):
            key = catalogue._normal(alias)
            assert key
            assert owners.setdefault(key, row["name"]) == row["name"], alias


@pytest.mark.parametrize(
    ("name", "memory_mib"),
    [
        # The smallest totals that torch printed on these cards.
        ("T4", 14913),
        ("V100-32GB", 32494),
        ("RTX 4090", 24081),
        ("A100-80GB", 81038),
        ("H200", 143156),
        # No torch total was seen; nvidia-smi with ECC on.
        ("RTX6000", 23040),
    ],
)
def test_memory_is_the_smallest_total_that_was_seen(name: str, memory_mib: int) -> None:
    assert find_gpu(name).memory_bytes == memory_mib * MIB


def test_memory_that_nobody_saw_is_marked() -> None:
    assert "no total was seen" in find_gpu("K20m").notes


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("V100", "Tesla V100-SXM2-16GB"),
        ("v100-32gb", "Tesla V100-SXM2-32GB"),
        ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
        ("V100D-32Q", "Tesla V100-PCIE-32GB"),
        ("A100", "A100-SXM4-40GB"),
        ("A100-80GB", "A100-SXM4-80GB"),
        ("a100_80gb_pcie", "A100-PCIE-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("nvidia_a100-sxm4-80gb", "A100-SXM4-80GB"),
        ("H100", "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("4090", "GeForce RTX 4090"),
        ("3090", "GeForce RTX 3090"),
        ("RTX6000", "Quadro RTX 6000"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA A10G", "A10G"),
        ("nvidia-tesla-t4", "Tesla T4"),
        ("RTX 4090-24GB", "GeForce RTX 4090"),
        ("AMD Instinct MI300X", "AMD MI300X"),
        ("3060", "GeForce RTX 3060"),
        ("RTX3060-12GB", "GeForce RTX 3060"),
        ("1080ti", "GeForce GTX 1080 Ti"),
        ("NVIDIA GeForce GTX 1080 Ti", "GeForce GTX 1080 Ti"),
        ("2080 Ti", "GeForce RTX 2080 Ti"),
        ("RTX 3080", "GeForce RTX 3080 10GB"),
        ("rtx3080-12gb", "GeForce RTX 3080 12GB"),
        ("NVIDIA GeForce RTX 4060 Ti", "GeForce RTX 4060 Ti 8GB"),
        ("4060Ti 16GB", "GeForce RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "GeForce RTX 4070 Ti SUPER"),
        ("RTX6000Ada", "RTX 6000 Ada"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA GeForce RTX 5090", "GeForce RTX 5090"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI325X", "AMD MI325X"),
        ("Radeon RX 7900 XTX", "AMD Radeon RX 7900 XTX"),
        ("AMD Radeon PRO W7900", "AMD Radeon PRO W7900"),
        ("NVIDIA TITAN RTX", "TITAN RTX"),
        ("Tesla P40", "Tesla P40"),
        ("M40", "Tesla M40 12GB"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A16", "A16"),
    ],
)
def test_names_find_their_row(said: str, name: str) -> None:
    assert find_gpu(said).name == name


def test_a_word_for_several_cards_takes_the_smallest_and_names_the_others() -> None:
    for word in ("V100", "A100", "H100"):
        match = match_gpu(word)
        others = [find_gpu(name) for name in match.others]
        assert others
        assert all(match.gpu.marketing_gb <= other.marketing_gb for other in others)
    assert match_gpu("V100-32GB").others == ("Tesla V100-PCIE-32GB",)
    assert match_gpu("V100-PCIE-32GB").others == ()


@pytest.mark.parametrize(
    "name", ["NVIDIA RTX 4500 Ada Generation", "NVIDIA H200 NVL", "RTX 3060 Mobile", "RTX 4090 D"]
)
def test_a_different_card_of_a_similar_name_is_not_taken(name: str) -> None:
    with pytest.raises(NotFoundError):
        find_gpu(name)


# How many times its fp32 rate a card multiplies fp16 matrices with fp32 sums, by NVIDIA's
# architecture papers (Turing, GA102, Ada, RTX Blackwell): GeForce cards do half of it.
_TIMES_FP32 = {
    "GeForce RTX 20": 4,
    "Quadro RTX": 8,
    "TITAN RTX": 8,
    "TITAN V": 8,
    "GeForce RTX 30": 2,
    "GeForce RTX 40": 2,
    "GeForce RTX 50": 2,
    "RTX A": 4,
    "RTX 4000 Ada": 4,
    "RTX 5000 Ada": 4,
    "RTX 6000 Ada": 4,
    "RTX PRO": 4,
    "A2": 4,
    "A16": 4,
    "L40S": 4,
}


def test_tensor_rates_stand_in_the_architectures_ratio_to_fp32() -> None:
    checked = 0
    for gpu in list_gpus():
        times = [ratio for start, ratio in _TIMES_FP32.items() if gpu.name.startswith(start)]
        if times:
            checked += 1
            ratio = gpu.peak_flops["fp16"] / gpu.peak_flops["fp32"]
            assert ratio == pytest.approx(times[0], rel=0.02), gpu.name
    assert checked >= 35


def test_prices_say_which_is_the_cheapest_median() -> None:
    t4 = find_gpu("T4")
    assert t4.cheapest is not None
    assert t4.cheapest.usd_per_gpu_hour == min(price.usd_per_gpu_hour for price in t4.prices)
    assert find_gpu("K20m").cheapest is None


def test_an_unknown_gpu_gets_near_names_and_a_next_step() -> None:
    with pytest.raises(NotFoundError) as caught:
        find_gpu("V10O")
    assert "V100" in caught.value.problem
    assert "tightfit hardware" in caught.value.remedy
    assert "cluster file" in caught.value.remedy
    with pytest.raises(NotFoundError, match="RTX 3060") as slip:
        find_gpu("RTX 3069-12GB")
    assert "like" in slip.value.remedy
    with pytest.raises(NotFoundError) as odd:
        find_gpu("my\ncard\x1b[31m")
    assert odd.value.problem.isprintable()


def test_a_memory_the_card_does_not_come_with_names_the_ones_it_does() -> None:
    with pytest.raises(InvalidInputError) as caught:
        find_gpu("V100-24GB")
    assert "16 or 32 GB" in caught.value.problem
    with pytest.raises(NotFoundError) as missing:
        find_gpu("GPU-24GB")
    assert "RTX 3090" in missing.value.problem


def test_search_finds_parts_of_names_and_forgives_slips() -> None:
    assert {gpu.name for gpu in search_gpus("v100")} >= {
        "Tesla V100-SXM2-16GB",
        "Tesla V100-PCIE-32GB",
    }
    assert [gpu.name for gpu in search_gpus("rtx 409")] == ["GeForce RTX 4090"]
    assert "Tesla T4" in {gpu.name for gpu in search_gpus("Telsa T4")}
    assert all(gpu.compute_capability is None for gpu in search_gpus("amd"))
    assert search_gpus("zzzzqqqq") == []
    assert len(search_gpus("")) == len(ROWS)


def test_an_optional_bridge_counts_only_where_it_is_stated() -> None:
    gpu = find_gpu("RTX 3090")
    assert Node(gpu=gpu, num_gpus=2).link_bytes_per_second == gpu.pcie_bytes_per_second
    bridged = Node(gpu=gpu, num_gpus=2, has_nvlink=True)
    assert bridged.link_bytes_per_second == gpu.nvlink_bytes_per_second
    v100 = find_gpu("V100-32GB")
    assert Node(gpu=v100, num_gpus=4).link_bytes_per_second == 150e9


def test_prices_are_dated_and_sxm_cards_do_not_borrow_the_pcie_price() -> None:
    prices = [price for gpu in list_gpus() for price in gpu.prices]
    assert len(prices) > 50
    assert {price.date for price in prices} == {DOCUMENT["price_date"]}
    runpod = [price for price in find_gpu("H100-SXM").prices if price.cloud == "runpod"]
    assert len(runpod) == 1
    assert "H100-SXM" in runpod[0].source


def test_the_catalogue_loads_fast() -> None:
    best = float("inf")
    for _ in range(10):
        for cached in (catalogue._document, catalogue._rows, catalogue._index, catalogue._gpu):
            cached.cache_clear()
        started = time.perf_counter()
        find_gpu("V100")
        best = min(best, time.perf_counter() - started)
    assert best < allow(0.03)


def test_the_room_loads_no_heavy_package() -> None:
    probe = (
        "import sys, tightfit.hardware.resolve, tightfit.hardware.checkup,"
        " tightfit.hardware.local, tightfit.hardware.slurm, tightfit.hardware.kubernetes;"
        " print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", probe], text=True).split()
    assert {"torch", "transformers", "datasets", "pynvml"}.isdisjoint(loaded)
