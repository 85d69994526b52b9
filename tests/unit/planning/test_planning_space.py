"""The space holds what a user could ask for, and obeys what they fixed."""

from __future__ import annotations

from typing import Any

import pytest
from planning_cases import SHORT_ROWS, make_cluster, make_request

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.settings import Method, Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.models.resolve import resolve_model
from tightfit.planning.describe import name_method
from tightfit.planning.request import DEFAULT_EFFECTIVE_BATCH, JobRequest
from tightfit.planning.space import (
    choose_attention,
    choose_compute_dtype,
    enumerate_strategies,
    list_layouts,
    list_micro_batches,
    list_precisions,
)


def test_space_covers_every_lever() -> None:
    request = make_request(profile=SHORT_ROWS)
    group = make_cluster((4, "A100-80GB"), num_nodes=2).groups[0]
    found = [
        strategy
        for layout in list_layouts(group, request)
        for strategy in enumerate_strategies(request, layout)
    ]
    assert len(found) == len(set(found)) > 500
    assert {s.sharding for s in found} == set(Sharding)
    assert {s.offload for s in found} == {Offload.NONE, Offload.OPTIMIZER, Offload.ALL}
    assert {name_method(s) for s in found} == {"full", "lora", "lora-int8", "qlora"}
    for lever in ("checkpointing", "fused_kernels", "fused_lora", "packing"):
        assert {getattr(s, lever) for s in found} == {True, False}, lever
    assert {(s.num_nodes, s.gpus_per_node) for s in found} == {(1, 1), (1, 4), (2, 4)}
    assert not any(s.fp8 for s in found), "nobody asked for it"


@pytest.mark.parametrize(("model", "compiled"), [("Llama-2-7b", {False}), ("phi-2", {True, False})])
def test_layers_are_compiled_where_there_are_no_fused_kernels(
    model: str, compiled: set[bool]
) -> None:
    group = make_cluster((1, "A100-80GB")).groups[0]
    request = make_request(model, method="lora")
    found = [
        s for layout in list_layouts(group, request) for s in enumerate_strategies(request, layout)
    ]
    assert {s.compile for s in found} == compiled


def test_fp8_that_is_asked_for_folds_adapters_under_the_compiler_too() -> None:
    request = make_request("phi-2", method="lora", fixed={"fp8": True})
    group = make_cluster((1, "H100-SXM")).groups[0]
    found = [
        s for layout in list_layouts(group, request) for s in enumerate_strategies(request, layout)
    ]
    assert all(s.fp8 for s in found)
    assert {s.compile for s in found if s.fused_lora} == {True, False}


@pytest.mark.parametrize(
    ("num_nodes", "expected"),
    [(1, {(1, 1), (1, 4)}), (6, {(1, 1), (1, 4), (2, 4), (4, 4), (6, 4)})],
)
def test_nodes_double_up_to_all(
    num_nodes: int,
    expected: set[tuple[int, int]],
) -> None:
    group = make_cluster((4, "T4"), num_nodes=num_nodes).groups[0]
    layouts = list_layouts(group, make_request())
    assert {(found.num_nodes, found.gpus_per_node) for found in layouts} == expected


def test_fixed_fields_hold() -> None:
    fixed = {"sharding": "zero3", "checkpointing": True, "lora_rank": 64, "compute": "fp16"}
    request = make_request(method="lora", fixed=fixed)
    layouts = list_layouts(make_cluster((4, "A100-80GB")).groups[0], request)
    found = [s for layout in layouts for s in enumerate_strategies(request, layout)]
    assert found
    for strategy in found:
        assert strategy.sharding is Sharding.ZERO3
        assert strategy.checkpointing
        assert strategy.lora_rank == 64
        assert strategy.compute is Dtype.FP16
        assert strategy.adapter_dtype is Dtype.FP32


@pytest.mark.parametrize("world", [1, 3, 4, 6, 16, 64])
def test_batch_is_met_but_not_passed(world: int) -> None:
    request = make_request()
    strategy = Strategy(sharding=Sharding.DDP, gpus_per_node=world)
    sizes = list_micro_batches(request, strategy)
    for micro_batch, accumulation in sizes:
        total = micro_batch * accumulation * world
        assert total <= max(DEFAULT_EFFECTIVE_BATCH, world)
        assert total > DEFAULT_EFFECTIVE_BATCH // 2
    assert sizes[0][0] == 1


@pytest.mark.parametrize(
    ("model", "gpu", "half"),
    [
        ("Llama-2-7b", "A100-80GB", Dtype.BF16),
        ("Llama-2-7b", "V100-32GB", Dtype.FP16),
        ("gemma-3-1b-it", "T4", Dtype.FP32),
        ("Llama-2-7b", "K80", Dtype.FP32),
    ],
)
def test_arithmetic_follows_the_card(model: str, gpu: str, half: Dtype) -> None:
    assert choose_compute_dtype(resolve_model(model), find_gpu(gpu)) is half


def test_before_ampere_trained_weights_stay_fp32() -> None:
    found = list_precisions(make_request(), find_gpu("T4"))
    fp16 = [fields for fields in found if fields["compute"] is Dtype.FP16]
    assert {f["weights"] for f in fp16 if f["method"] is Method.FULL} == {Dtype.FP32}
    assert {f["adapter_dtype"] for f in fp16} == {Dtype.FP32}
    assert {f["weights"] for f in fp16 if f["method"] is Method.LORA} == {
        Dtype.FP16,
        Dtype.NF4,
        Dtype.INT8,
    }


@pytest.mark.parametrize(
    ("model", "gpu", "attention"),
    [
        ("Llama-2-7b", "T4", Attention.SDPA),
        ("gemma-2-9b", "A100-80GB", Attention.FLEX),
        ("gemma-2-9b", "T4", Attention.EAGER),
        ("bloom-1b1", "A100-80GB", Attention.FLEX),
    ],
)
def test_attention_follows_the_model(model: str, gpu: str, attention: Attention) -> None:
    node = Node(gpu=find_gpu(gpu), num_gpus=1)
    compute = Dtype.BF16 if node.gpu.supports_bf16 else Dtype.FP16
    assert choose_attention(resolve_model(model), node, compute=compute) is attention


@pytest.mark.parametrize(
    ("model", "gpu", "compute", "is_repeated"),
    [
        ("Llama-3.2-1B", "T4", "fp16", True),
        ("Llama-3.2-1B", "A100-80GB", "bf16", False),
        ("Llama-3.2-1B", "A100-80GB", "fp32", True),
        ("Llama-2-7b", "A100-80GB", "fp32", False),
    ],
)
def test_keys_are_repeated_where_no_kernel_takes_grouped_heads(
    model: str, gpu: str, compute: str, is_repeated: bool
) -> None:
    """Padded rows have no mask, for which transformers would repeat them."""
    request = make_request(model, method="full", fixed={"compute": compute})
    (layout,) = list_layouts(make_cluster((1, gpu)).groups[0], request)
    found = list(enumerate_strategies(request, layout))
    assert {s.repeat_keys for s in found if s.attention is Attention.SDPA} == {is_repeated}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "lroa"}, "Did you mean `lora`"),
        ({"effective_batch": 0}, "train nothing"),
        ({"fixed": {"mirco_batch": 4}}, "Did you mean `micro_batch`"),
        ({"fixed": {"micro_batch": -1}}, "`micro_batch` cannot be -1"),
        ({"fixed": {"lora_targets": ("q_porj",)}}, "Did you mean `q_proj`"),
    ],
)
def test_bad_requests_say_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        make_request(**fields)
    assert message in error.value.problem
    assert error.value.remedy


@pytest.mark.parametrize("wanted", [1, 3, 5, 7, 10, 12, 16, 20, 97])
@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_the_batch_asked_for_is_nearly_met(wanted: int, num_gpus: int) -> None:
    request = make_request(effective_batch=wanted)
    strategy = Strategy(
        sharding="ddp" if num_gpus > 1 else "single", gpus_per_node=num_gpus, seq_len=128
    )
    sizes = list_micro_batches(request, strategy)
    share = max(1, wanted // num_gpus)

    assert all(0.95 * share <= size * accum <= share for size, accum in sizes)
    assert sizes[0] == (1, share)


def test_a_gptq_checkpoint_is_planned_as_it_is_packed() -> None:
    spec = resolve_model("Llama-2-7b").model_copy(update={"stored_dtype": Dtype.GPTQ4})
    precisions = list_precisions(JobRequest(spec=spec), find_gpu("A100-80GB"))

    assert {fields["weights"] for fields in precisions} == {Dtype.GPTQ4}
