"""Spare columns: the adapter's part inside the one product, with peft's results and gradients."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from test_fused_lora import IDS, adapted, assert_same, backward, distance, fold, strategy_in
from torch import Tensor, nn

from tightfit.core.dtypes import Dtype
from tightfit.estimation.weights import FUSED_PROJECTION_NAMES, uses_augmented_weights
from tightfit.models.families.registry import find_family
from tightfit.runtime.kernels.fused_lora import (
    AUGMENTED_COLUMNS,
    augmented_view,
    fuse_lora_projections,
)
from tightfit.runtime.kernels.fused_projections import FUSED_PROJECTIONS, is_augmented
from tightfit.runtime.layers import decoder_layers
from tightfit.training.recompute import recompute_layers


def write_with_room(norm: Any, x: Tensor) -> Tensor:
    """What the kernel does: the norm's own result, in rows with zeros behind them."""
    y = type(norm).forward(norm, x)
    wide = nn.functional.pad(y, (0, getattr(norm, AUGMENTED_COLUMNS)))
    return wide[..., : y.shape[-1]]


def make_room(model: Any) -> Any:
    """A folded copy whose norms leave room, and whose adapters use it."""
    roomy = fold(model)
    assert fuse_lora_projections(roomy) > 0
    for module in roomy.modules():
        if hasattr(module, AUGMENTED_COLUMNS):
            module.forward = MethodType(write_with_room, module)
    return roomy


def scale(model: Any, times: float) -> Any:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] *= times
    return model


def users(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, FUSED_PROJECTIONS)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window", "llama-tied"])
def test_results_and_gradients_are_those_of_peft(family: str) -> None:
    """qwen2 has biases, qwen3 norms between the product and attention."""
    model = adapted(family)
    roomy = make_room(model)
    assert len(users(roomy)) == 10
    assert_same(backward(roomy), backward(model), within=1e-5)


@pytest.mark.parametrize(
    ("fields", "num_users", "width"),
    [
        ({"lora_targets": ("q_proj", "v_proj", "down_proj")}, 4, 64),
        ({"lora_rank": 24}, 10, 128),
        ({"lora_rank": 22}, 10, 128),
    ],
)
def test_other_targets_ranks_and_scales(fields: dict[str, Any], num_users: int, width: int) -> None:
    """Three layers of rank 22 need more than one block; the scale is no power of two."""
    model = scale(adapted("llama", **fields), 0.7)
    roomy = make_room(model)
    assert len(users(roomy)) == num_users
    assert {
        getattr(m, AUGMENTED_COLUMNS) for m in roomy.modules() if hasattr(m, AUGMENTED_COLUMNS)
    } <= {64, width}
    assert_same(backward(roomy), backward(model), within=1e-5)


def test_readers_of_one_norm_have_places_of_their_own() -> None:
    """Each B stands where its own A writes, and zeros where the others do."""
    roomy = make_room(adapted("llama"))
    backward(roomy)
    for layer in decoder_layers(roomy):
        attention: Any = layer.self_attn
        for number, name in enumerate(FUSED_PROJECTION_NAMES[0]):
            reader = getattr(attention, name)
            spare = augmented_view(reader.base_layer.weight)[:, 64:].clone()
            own = spare[:, 4 * number : 4 * number + 4]
            b = reader.lora_B["default"].weight
            assert torch.allclose(own, b * reader.scaling["default"])
            assert b.abs().min() > 0
            own.zero_()
            assert spare.abs().max() == 0


@torch.no_grad()
def test_readers_asked_alone_twice_and_out_of_turn_answer_the_same() -> None:
    """A result that waits is one of the same input, and is given once."""
    model = adapted("llama")
    layer: Any = decoder_layers(make_room(model))[0]
    plain: Any = decoder_layers(model)[0]
    norm, attention = layer.input_layernorm, layer.self_attn
    first, second = (norm(torch.randn(2, 5, 64)) for _ in range(2))
    assert is_augmented(first.reshape(-1, 64))
    asked = [("v_proj", first), ("q_proj", first), ("q_proj", first), ("k_proj", second)]
    asked += [("k_proj", first), ("v_proj", first), ("v_proj", second), ("q_proj", second)]
    for name, x in asked:
        wanted = getattr(plain.self_attn, name)(x)
        assert distance(getattr(attention, name)(x), wanted) < 1e-5, name


def test_a_reader_whose_adapter_is_off_answers_without_it() -> None:
    model = adapted("llama")
    roomy = make_room(model)
    for one in (model, roomy):
        for layer in decoder_layers(one):
            attention: Any = layer.self_attn
            attention.k_proj.enable_adapters(False)
    assert_same(backward(roomy), backward(model), within=1e-5)


def test_recomputed_layers_have_the_same_gradients() -> None:
    model = adapted("llama")
    roomy = make_room(model)
    recompute_layers(decoder_layers(roomy))
    assert_same(backward(roomy), backward(model), within=1e-5)


def test_changed_adapters_count_at_once_and_micro_batches_add_up() -> None:
    model = adapted("llama")
    roomy = make_room(model)
    backward(roomy)  # fills the spare columns with what is old afterwards
    for one in (model, roomy):
        for name, parameter in one.named_parameters():
            if "lora_" in name:
                parameter.data.mul_(-0.5)
    halves = [backward(roomy, IDS[:1]), backward(roomy, IDS[1:])]
    whole = backward(model)
    for name in whole.keys() - {"logits"}:
        assert distance(halves[0][name] + halves[1][name], whole[name]) < 1e-5, name


def test_an_input_without_room_is_multiplied_as_before() -> None:
    """As from a norm that somebody else has replaced."""
    model = adapted("llama")
    roomy = make_room(model)
    for module in roomy.modules():
        if hasattr(module, AUGMENTED_COLUMNS):
            del module.forward
    assert_same(backward(roomy), backward(model), within=1e-5)


def test_compiled_layers_leave_none() -> None:
    kernels = {"fused_kernels": True, "fused_lora": True}
    assert uses_augmented_weights("llama", strategy_in(Dtype.BF16, **kernels))
    assert not uses_augmented_weights("llama", strategy_in(Dtype.BF16, **kernels, compile=True))


def test_matrices_keep_their_values_and_adapters_their_names() -> None:
    model = adapted("llama")
    wanted, found = model.state_dict(), make_room(model).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_copy_writes_into_its_own_columns() -> None:
    roomy = make_room(adapted("llama"))
    before = backward(roomy)
    other = copy.deepcopy(roomy)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    backward(other)
    assert_same(backward(roomy), before, within=1e-12)


def test_sixteen_bits_lose_no_more_than_with_two_products() -> None:
    """Against fp32 of the same values: the sum is rounded once in place of twice."""
    model = scale(adapted("llama", Dtype.BF16), 0.7)
    exact = backward(copy.deepcopy(model).float())
    apart = {
        kind: sum(distance(value, exact[name]) for name, value in backward(one).items())
        for kind, one in (("folded", fold(model)), ("roomy", make_room(model)))
    }
    assert apart["roomy"] < 1.1 * apart["folded"]


def test_norms_of_these_families_feed_those_matrices_alone() -> None:
    """Each reader gets the very tensor that its norm has made, and nothing else is given it."""
    for family in ("llama", "mistral-window", "qwen2", "qwen3", "gemma"):
        model = adapted(family)
        assert find_family(model.config.model_type).fuses_projections
        made: dict[int, list[str]] = {}

        def note(args: Any, name: str, made: Any = made) -> None:
            made.setdefault(args[0].data_ptr(), []).append(name)

        layer: Any = decoder_layers(model)[0]
        outputs: list[Tensor] = []
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda _m, _a, y, outputs=outputs: outputs.append(y))
        for name, module in layer.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(
                    lambda _m, a, name=name, note=note: note(a, name.rpartition(".")[2])
                )
        model(input_ids=IDS)
        readers = [tuple(made[y.data_ptr()]) for y in outputs[:2]]
        assert tuple(readers) == FUSED_PROJECTION_NAMES, family
