"""Trained layers that read one norm, joined: the same results and gradients in fewer passes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from test_folded_adapters import IDS, assert_same, backward, distance, strategy_in
from tiny_models import make_model
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Sharding
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.readers import can_join_trained, join_trained
from tightfit.train.finish import recompute_layers


def trained(family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return make_model(family).to(dtype).train()


def join(model: Any) -> Any:
    joined = copy.deepcopy(model)
    assert join_trained(joined) == 5 * len(decoder_layers(joined))
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


def test_who_is_joined() -> None:
    full = {"method": Method.FULL, "fused_kernels": True}
    assert can_join_trained("llama", strategy_in(Dtype.BF16, **full))
    assert not can_join_trained("gpt2", strategy_in(Dtype.BF16, **full))
    for change in (
        {"compile": True},
        {"fp8": True},
        {"method": Method.LORA},
        {"sharding": Sharding.FSDP},
        {"weights": Dtype.FP32},
    ):
        assert not can_join_trained("llama", strategy_in(Dtype.BF16, **(full | change)))
