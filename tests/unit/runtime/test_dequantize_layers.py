"""Unpacked layers hold what bitsandbytes unpacks, and nothing packed is left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import model_folder
from torch import nn

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy, Training
from tightfit.runtime.kernels import fp8
from tightfit.runtime.kernels.fp8 import Fp8Linear, scale_matrix
from tightfit.runtime.layers import dequantize_base, dequantize_deferred, is_dequantized
from tightfit.runtime.libraries import torch_dtype
from tightfit.runtime.load import load_base
from tightfit.training.model import prepare_model

CPU = torch.device("cpu")
NUM_LINEARS = {"llama": 14, "qwen2": 14, "gpt2": 8}


def load(family: str, compute: Dtype, *, double_quant: bool = True) -> Any:
    strategy = Strategy(weights=Dtype.NF4, compute=compute, double_quant=double_quant)
    return load_base(model_folder(family), strategy, CPU)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What bitsandbytes unpacks of each packed layer, by the layer's name."""
    from bitsandbytes import functional

    unpack: Any = functional.dequantize_4bit
    found: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "compute_dtype")}
    return {
        name: unpack(layer.weight.data, layer.weight.quant_state) for name, layer in found.items()
    }


@pytest.mark.parametrize("compute", [Dtype.BF16, Dtype.FP32])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("family", list(NUM_LINEARS))
def test_every_matrix_is_what_bitsandbytes_unpacks(
    family: str, compute: Dtype, double_quant: bool
) -> None:
    model = load(family, compute, double_quant=double_quant).eval()  # GPT-2 drops values out
    wanted = values_of(model)
    ids = torch.arange(3, 19).reshape(2, 8)
    before = model(input_ids=ids).logits.detach()

    assert dequantize_base(model) == len(wanted) == NUM_LINEARS[family]

    for name, values in wanted.items():
        layer: Any = model.get_submodule(name)
        assert type(layer) is nn.Linear
        assert is_dequantized(layer)
        assert not layer.weight.requires_grad
        assert layer.weight.dtype is torch_dtype(compute)
        assert torch.equal(layer.weight, values)
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    assert kinds == {"Parameter"}
    after = model(input_ids=ids).logits.detach()
    within = 1e-5 if compute is Dtype.FP32 else 0.02
    assert (after - before).norm() <= within * before.norm()
    assert model.is_loaded_in_4bit  # it is still the nf4 base


def test_biases_stay() -> None:
    model = load("qwen2", Dtype.FP32)
    name = "model.layers.0.self_attn.q_proj"
    bias = model.get_submodule(name).bias
    nn.init.normal_(bias)
    dequantize_base(model)
    assert model.get_submodule(name).bias is bias
    assert bias.abs().sum() > 0


def test_one_matrix_at_a_time_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one is unpacked, codes of those before it are gone and of those after it still there."""
    from bitsandbytes import functional

    model = load("llama", Dtype.FP32)
    real: Any = functional.dequantize_4bit
    codes = codes_of(model)
    num_packed: list[int] = []

    def count(*args: Any, **kwargs: Any) -> Any:
        num_packed.append(sum(code() is not None for code in codes))
        return real(*args, **kwargs)

    monkeypatch.setattr(functional, "dequantize_4bit", count)
    with without_collector():
        dequantize_base(model)
    assert num_packed == list(range(14, 0, -1))


def test_adapters_fold_over_it_as_over_plain_weights() -> None:
    strategy = Strategy(
        weights=Dtype.NF4,
        compute=Dtype.FP32,
        adapter_dtype=Dtype.FP32,
        dequantized_base=True,
        fused_lora=True,
    )
    training = Training(model_path="model", learning_rate=1e-4)
    model = prepare_model(load("llama", Dtype.FP32), strategy, training)
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert len(layers) == 14
    for layer in layers:
        assert (type(layer).__module__, type(layer).__name__) == (
            "peft.tuners.lora.layer",
            "Linear",
        )
        assert "forward" in vars(layer)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_fp8_is_made_of_what_bitsandbytes_unpacks(family: str) -> None:
    model = load(family, Dtype.BF16)
    wanted = values_of(model)
    strategy = Strategy(weights=Dtype.NF4, dequantized_base=True, fused_lora=True, fp8=True)
    training = Training(model_path="model", learning_rate=1e-4)
    model = prepare_model(model, strategy, training)

    assert len(wanted) == NUM_LINEARS[family]
    for name, values in wanted.items():
        layer: Any = model.get_submodule(f"base_model.model.{name}")
        assert "forward" in vars(layer), "folded"
        base = layer.base_layer
        assert isinstance(base, Fp8Linear)
        assert is_dequantized(base)
        rounded, scale = scale_matrix(values)
        assert torch.equal(base.weight.float(), rounded.float())
        assert torch.equal(base.weight_scale[: len(scale)], scale[: len(base.weight_scale)])
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    assert kinds == {"Parameter"}
    assert model.base_model.model.is_loaded_in_4bit  # it is still the nf4 base


def test_fp8_has_one_plain_matrix_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one becomes fp8 its codes are gone, and those of the next are still packed."""
    model = load("llama", Dtype.BF16)
    codes = codes_of(model)
    num_packed: list[int] = []
    plain: list[weakref.ref[torch.Tensor]] = []

    def count(weight: torch.Tensor) -> Any:
        num_packed.append(sum(code() is not None for code in codes))
        assert not any(matrix() is not None for matrix in plain)
        plain.append(weakref.ref(weight))
        return scale_matrix(weight)

    monkeypatch.setattr(fp8, "scale_matrix", count)
    strategy = Strategy(weights=Dtype.NF4, dequantized_base=True, fused_lora=True, fp8=True)
    with without_collector():
        prepare_model(model, strategy, Training(model_path="model", learning_rate=1e-4))
    assert num_packed == list(range(13, -1, -1))


def codes_of(model: nn.Module) -> list[weakref.ref[torch.Tensor]]:
    found = [p for p in model.parameters() if type(p).__name__ == "Params4bit"]
    return [weakref.ref(parameter) for parameter in found]


@contextmanager
def without_collector() -> Iterator[None]:
    """Nobody knows when it comes: what only it would free may stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_what_fp8_cannot_take_is_unpacked_all_the_same() -> None:
    model = load("llama", Dtype.BF16)
    wanted = values_of(model)
    assert dequantize_base(model, is_deferred=True) == len(wanted)
    waiting = [model.get_submodule(name).weight for name in wanted]
    assert {weight.untyped_storage().nbytes() for weight in waiting} == {2}
    dequantize_deferred(model)
    for name, values in wanted.items():
        assert torch.equal(model.get_submodule(name).weight, values)
