"""Trained layers that read one norm, joined: the same results and gradients in fewer passes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from test_fused_lora import IDS, assert_same, backward, distance, strategy_in
from tiny_models import make_model
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Method, Sharding
from tightfit.estimation.weights import can_fuse_trained_projections
from tightfit.runtime.kernels.fp8 import use_fp8
from tightfit.runtime.kernels.fused_lora import fuse_trained_projections
from tightfit.runtime.layers import decoder_layers
from tightfit.training.recompute import recompute_layers


def trained(family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return make_model(family).to(dtype).train()


def join(model: Any) -> Any:
    joined = copy.deepcopy(model)
    assert fuse_trained_projections(joined) == 5 * len(decoder_layers(joined))
    return joined


class CountOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def count_sums(model: Any) -> int:
    """Tensors as wide as x that are added to one another in a step."""
    with CountOperations() as counted:
        backward(model)
    return sum(count for name, count in counted.counts.items() if name.startswith("aten::add."))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window", "llama-tied"])
def test_results_and_gradients_are_those_of_layers_apart(family: str) -> None:
    """qwen2 has biases, qwen3 norms between the product and attention."""
    model = trained(family)
    assert_same(backward(join(model)), backward(model), within=1e-5)


def test_recomputed_layers_have_the_same_gradients() -> None:
    model = trained()
    joined = join(model)
    recompute_layers(decoder_layers(joined))
    assert_same(backward(joined), backward(model), within=1e-5)


def test_gradients_add_up_over_micro_batches() -> None:
    model = trained()
    joined = join(model)
    halves = [backward(joined, IDS[:1]), backward(joined, IDS[1:])]
    whole = backward(model)
    for name in whole.keys() - {"logits"}:
        assert distance(halves[0][name] + halves[1][name], whole[name]) < 1e-5, name


def test_sixteen_bits_lose_no_more_than_apart() -> None:
    model = trained(dtype=torch.bfloat16)
    exact = backward(copy.deepcopy(model).float())
    apart = {
        kind: sum(distance(value, exact[name]) for name, value in backward(one).items())
        for kind, one in (("apart", model), ("joined", join(model)))
    }
    assert apart["joined"] < 1.05 * apart["apart"]


def test_gradients_of_one_input_are_not_added_afterwards() -> None:
    """Of a layer's three and two readers, two and one sums are spared."""
    model = trained()
    assert count_sums(model) - count_sums(join(model)) == 3 * len(decoder_layers(model))


def test_autocast_and_other_dtypes_are_multiplied_as_before() -> None:
    model = trained()
    joined = join(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(backward(joined), backward(model), within=1e-12)


def test_a_copy_computes_with_its_own_weights() -> None:
    joined = join(trained())
    before = backward(joined)
    other = copy.deepcopy(joined)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    assert distance(backward(other)["logits"], before["logits"]) > 0.1
    assert_same(backward(joined), before, within=1e-12)


# In fp8


def in_fp8(model: Any, *, is_backward_alone: bool = True) -> Any:
    given = copy.deepcopy(model)
    use_fp8(given, is_backward_alone=is_backward_alone)
    return given


@pytest.mark.parametrize("is_backward_alone", [True, False], ids=["gradients", "products"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_in_fp8_results_are_those_apart(family: str, is_backward_alone: bool) -> None:
    """qwen2 has biases. Gradients of a layer that comes later are those apart, bit for bit."""
    model = in_fp8(trained(family, torch.bfloat16), is_backward_alone=is_backward_alone)
    found, wanted = backward(join(model)), backward(model)
    assert found.keys() == wanted.keys()
    last = [name for name in wanted if "layers.1.mlp" in name or name == "logits"]
    assert len(last) == 4
    assert all(torch.equal(found[name], wanted[name]) for name in last)


def test_fp8_loses_no_more_than_apart() -> None:
    model = trained(dtype=torch.bfloat16)
    exact = backward(copy.deepcopy(model).float())
    apart = {
        kind: sum(distance(value, exact[name]) for name, value in backward(one).items())
        for kind, one in (("apart", in_fp8(model)), ("joined", join(in_fp8(model))))
    }
    assert 0 < apart["joined"] < 1.05 * apart["apart"]


def test_in_fp8_three_products_are_one() -> None:
    """Backward, of each layer: what five readers have to do is two for x and two for weights."""
    model = in_fp8(trained(dtype=torch.bfloat16))
    counts = []
    for one in (model, join(model)):
        with CountOperations() as counted:
            backward(one)
        counts.append(counted.counts["aten::_scaled_mm"])
    assert counts == [14 * len(decoder_layers(model)), 8 * len(decoder_layers(model))]


def test_in_fp8_tokens_that_fill_no_row_are_multiplied_in_bf16() -> None:
    model = in_fp8(trained(dtype=torch.bfloat16))
    ids = IDS[:, :15]
    found, wanted = backward(join(model), ids), backward(model, ids)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[name], wanted[name])


def test_in_fp8_other_dtypes_are_multiplied_as_before() -> None:
    model = join(in_fp8(trained(dtype=torch.bfloat16))).float()
    assert_same(backward(model), backward(trained(dtype=torch.bfloat16).float()), within=1e-12)


def test_who_is_joined() -> None:
    full = {"method": Method.FULL, "fused_kernels": True}
    assert can_fuse_trained_projections("llama", strategy_in(Dtype.BF16, **full))
    assert not can_fuse_trained_projections("gpt2", strategy_in(Dtype.BF16, **full))
    for change in (
        {"compile": True},
        {"method": Method.LORA},
        {"sharding": Sharding.FSDP},
        {"weights": Dtype.FP32},
    ):
        assert not can_fuse_trained_projections("llama", strategy_in(Dtype.BF16, **(full | change)))
