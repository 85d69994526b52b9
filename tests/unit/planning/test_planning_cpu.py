"""Plans for a CPU: what is proposed, and what must be asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning_cases import SHORT_ROWS, make_request

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Loss, Method, Offload, Sharding
from tightfit.core.strategy import Training
from tightfit.core.units import GIB
from tightfit.hardware.local import CpuReading, probe_cpu
from tightfit.hardware.machine import Machine
from tightfit.hardware.types import Cluster
from tightfit.models.config import read_config
from tightfit.planning.search import SearchResult, search

MACHINE = Machine(
    memory_bytes=64 * GIB,
    available_memory_bytes=60 * GIB,
    memory_limit_bytes=None,
    num_cores=8,
    num_usable_cores=8,
    shm_bytes=None,
    shm_free_bytes=None,
    locked_memory_limit_bytes=None,
)
PLAIN = frozenset({"avx512f", "fma"})


def _cpu(num_processes: int = 1, *, flags: frozenset[str] = PLAIN) -> Cluster:
    chip = CpuReading(model="CPU", hz=2e9, flags=flags)
    return probe_cpu(num_processes, read_host=lambda: MACHINE, read_chip=lambda: chip)


def _search(cluster: Cluster, **request: Any) -> SearchResult:
    return search(make_request("SmolLM2-135M-Instruct", **request), cluster)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_proposals_are_what_a_cpu_can_do(num_processes: int) -> None:
    result = _search(_cpu(num_processes), profile=SHORT_ROWS)
    assert result.plans
    for plan in result.plans:
        s = plan.strategy
        assert s.compute is s.weights is Dtype.FP32
        assert s.offload is Offload.NONE
        assert s.attention is not Attention.FLASH
        assert s.loss in (Loss.PLAIN, Loss.CHUNKED)
        assert not s.compile
        assert not s.fused_kernels
        assert not s.repeat_keys
    assert result.plans[0].strategy.world_size == num_processes


def test_bf16_where_the_cpu_has_it() -> None:
    found = _search(_cpu(flags=PLAIN | {"avx512_bf16"})).plans[0].strategy
    assert found.compute is Dtype.BF16


def test_nf4_is_there_for_the_asking() -> None:
    [*plans] = _search(_cpu(), method="qlora").plans
    assert plans
    assert plans[0].strategy.weights is Dtype.NF4
    assert plans[0].strategy.dequantized_base
    assert not any("slow on a CPU" in warning for warning in plans[0].warnings)
    packed = _search(_cpu(), method="qlora", fixed={"dequantized_base": False}).plans[0]
    assert any("slow on a CPU" in warning for warning in packed.warnings)


@pytest.mark.parametrize(("inner", "is_legal"), [(1536, True), (1552, False), (1544, True)])
def test_nf4_is_refused_where_bitsandbytes_dequantizes_wrongly(inner: int, is_legal: bool) -> None:
    """Measured by `quantize_and_dequantize`: a multiple of 16, and not of 64."""
    request = make_request("SmolLM2-135M-Instruct", method="qlora")
    config = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "vocab_size": 1000,
    }
    spec = read_config(config, name="odd", source="a test")
    result = search(replace(request, spec=spec), _cpu())
    assert bool(result.plans) == is_legal


def test_offload_on_a_cpu_can_be_asked_for() -> None:
    fixed = {"sharding": "fsdp", "offload": "all", "gpus_per_node": 2}
    plan = _search(_cpu(2), method="full", fixed=fixed).plans[0]
    assert plan.strategy.offload is Offload.ALL
    assert any("saves nothing" in warning for warning in plan.warnings)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_processes_can_share_in_every_way(sharding: str) -> None:
    plan = _search(_cpu(2), method="full", fixed={"sharding": sharding, "gpus_per_node": 2}).plans[
        0
    ]
    assert plan.strategy.sharding is Sharding(sharding)


def test_a_model_too_big_is_short_of_memory_per_process() -> None:
    result = search(make_request("Llama-2-7b", method="full"), _cpu())
    assert result.failure is not None
    assert "per process; CPU, 8 cores has 60.0 GiB" in result.failure


def test_a_plan_carries_the_training_of_its_method() -> None:
    training = {
        method: Training(model_path="/m", learning_rate=rate, keep_checkpoints=7)
        for method, rate in ((Method.FULL, 1e-5), (Method.LORA, 1e-4))
    }
    plans = _search(_cpu(), training=training).plans
    assert {plan.strategy.method for plan in plans} == {Method.FULL, Method.LORA}
    for plan in plans:
        assert plan.training is training[plan.strategy.method]
    without = _search(_cpu()).plans[0]
    assert without.training is None
    few, many = (plan.estimate.disk.components["checkpoints"] for plan in (without, plans[0]))
    assert many / few == pytest.approx(8 / 3, rel=0.01)
