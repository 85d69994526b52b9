"""Fused LoRA: peft's results and gradients, its names and files, and its forward elsewhere."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import make_model, model_folder
from torch import Tensor, nn

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy, Training
from tightfit.runtime.adapters import add_adapters, load_adapter, save_adapter
from tightfit.runtime.kernels.fused_lora import can_fuse_lora, fuse_lora
from tightfit.runtime.load import load_base
from tightfit.training.model import prepare_model

CPU = torch.device("cpu")
IDS = torch.arange(3, 51).reshape(3, 16)
TRAINING = Training(model_path="model", learning_rate=1e-4)
DTYPES = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}


def strategy_in(dtype: Dtype, **fields: Any) -> Strategy:
    plain: dict[str, Any] = {
        "weights": dtype,
        "compute": dtype,
        "adapter_dtype": dtype,
        "lora_rank": 4,
        "checkpointing": False,
    }
    return Strategy(**(plain | fields))


def adapted(family: str = "llama", dtype: Dtype = Dtype.FP32, **fields: Any) -> Any:
    """A model with adapters that already do something, in training mode."""
    if family == "gemma2":  # sdpa cannot cap logits
        fields["attention"] = Attention.EAGER
    strategy = strategy_in(dtype, **fields)
    torch.manual_seed(0)
    model = load_base(model_folder(family), strategy, CPU)
    return stir(add_adapters(model, strategy, TRAINING)).train()


def stir(model: Any) -> Any:
    """B starts at zero, where A would have no gradient."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.manual_seed(len(name))
            nn.init.normal_(parameter, std=0.1)
    return model


def fold(model: Any) -> Any:
    """A folded copy."""
    folded = copy.deepcopy(model)
    assert fuse_lora(folded) > 0
    return folded


def backward(model: Any, ids: Tensor = IDS) -> dict[str, Tensor]:
    """The logits and every gradient of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # T5 and GPT-2 have dropout of their own
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=ids, **extra).logits
    logits.float().logsumexp(-1).sum().backward()
    return {"logits": logits.detach(), **gradients(model)}


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, over all values."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], *, within: float) -> None:
    assert found.keys() == wanted.keys()
    assert len(found) > 4
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert distance(found[name], value) < within, name


def is_folded(module: nn.Module) -> bool:
    return "forward" in vars(module)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "t5"])
def test_results_and_gradients_are_those_of_peft(family: str) -> None:
    """With and without a bias, and with GPT-2's transposed matrices. In fp64: a processor's fp32
    may be off by more than tells a wrong product from a right one."""
    model = adapted(family).double()
    assert_same(backward(fold(model)), backward(model), within=1e-6)


def test_every_adapter_of_a_plain_model_is_folded() -> None:
    for family, count in (("llama", 14), ("gpt2", 8)):
        assert fuse_lora(adapted(family)) == count


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_sixteen_bits_lose_no_more_than_with_peft(dtype: Dtype) -> None:
    """Against fp32 of the very same values, layer by layer, over all gradients together."""
    torch.manual_seed(1)
    base = nn.Sequential(nn.Linear(96, 160, bias=False))
    config = LoraConfig(r=8, lora_alpha=24, target_modules=["0"])
    layer = stir(get_peft_model(base, config, autocast_adapter_dtype=False))
    narrow = layer.to(DTYPES[dtype])
    x = torch.randn(4, 50, 96).to(DTYPES[dtype])
    g = torch.randn(4, 50, 160).to(DTYPES[dtype])

    def run(model: Any, kind: torch.dtype) -> dict[str, Tensor]:
        inputs = x.to(kind).requires_grad_()
        y = model(inputs)
        y.backward(g.to(kind))
        assert inputs.grad is not None
        return {"y": y.detach(), "x": inputs.grad, **gradients(model)}

    wanted = run(copy.deepcopy(narrow).float(), torch.float32)
    of_peft, found = run(copy.deepcopy(narrow), x.dtype), run(fold(narrow), x.dtype)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == x.dtype
        assert distance(found[name], value) <= 1.1 * distance(of_peft[name], value), name


@pytest.mark.parametrize("double_quant", [True, False])
def test_nf4_weights_are_unpacked_as_bitsandbytes_does(double_quant: bool) -> None:
    model = adapted(dtype=Dtype.FP32, weights=Dtype.NF4, double_quant=double_quant)
    folded = copy.deepcopy(model)
    assert fuse_lora(folded) == 14
    assert_same(backward(folded), backward(model), within=1e-5)


@pytest.mark.parametrize("weights", [Dtype.FP32, Dtype.NF4])
def test_recomputed_layers_have_the_same_gradients(weights: Dtype) -> None:
    plain: Any = adapted(weights=weights)

    def finished(*, is_folded: bool) -> Any:
        strategy = strategy_in(
            Dtype.FP32, weights=weights, checkpointing=True, fused_lora=is_folded
        )
        model = prepare_model(load_base(model_folder("llama"), strategy, CPU), strategy, TRAINING)
        model.load_state_dict(plain.state_dict(), strict=False)
        return model

    folded = finished(is_folded=True)
    assert any(is_folded(module) for module in folded.modules() if hasattr(module, "lora_A"))
    assert_same(backward(folded), backward(finished(is_folded=False)), within=1e-5)
    assert_same(backward(folded), backward(plain), within=1e-5)


def test_gradients_add_up_over_micro_batches() -> None:
    model = adapted()
    folded = fold(model)
    for one in (model, folded):
        for part in IDS:
            one(input_ids=part[None]).logits.logsumexp(-1).sum().backward()
    assert_same(gradients(folded), gradients(model), within=1e-6)


def test_twenty_steps_go_down_the_same_curve() -> None:
    model = adapted()
    curves = [_train(one) for one in (fold(model), model)]
    assert curves[1][-1] < 0.9 * curves[1][0]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def _train(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_frozen_input_and_frozen_adapters_ask_for_nothing() -> None:
    model = adapted(lora_targets=("q_proj",))
    folded = fold(model)
    for one in (model, folded):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("lora_B" in name)
    wanted = backward(model)
    assert {name for name in wanted if "lora_A" in name} == set()
    found = backward(folded)
    assert found.keys() == wanted.keys()
    assert all(distance(found[name], value) < 1e-6 for name, value in wanted.items())


def test_siblings_keep_one_copy_of_their_input() -> None:
    """What autograd holds beside weights, storage by storage, is what it holds with peft."""
    model = adapted()

    def held(one: Any) -> int:
        sizes: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in one.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            kept = one(input_ids=IDS).logits
        assert kept.requires_grad
        return sum(sizes.values())

    assert held(fold(model)) == held(model)


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo's own
def test_the_compiler_sees_one_graph() -> None:
    model = adapted()
    layer = fold(model).base_model.model.model.layers[0].mlp
    plain = model.base_model.model.model.layers[0].mlp
    x = torch.randn(2, 8, 64)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def run(module: Any) -> dict[str, Tensor]:
        inputs = x.clone().requires_grad_()
        y = module(inputs)
        y.square().sum().backward()
        assert inputs.grad is not None
        return {"y": y.detach(), "x": inputs.grad}

    found, wanted = run(compiled), run(plain)
    assert all(distance(found[name], value) < 1e-5 for name, value in wanted.items())
    assert all(
        distance(a, b) < 1e-5
        for a, b in zip(gradients(layer).values(), gradients(plain).values(), strict=True)
    )


def test_names_and_files_stay_those_of_peft(tmp_path: Path) -> None:
    model = adapted()
    folded = fold(model)
    assert list(folded.state_dict()) == list(model.state_dict())
    save_adapter(folded, tmp_path / "folded")
    save_adapter(model, tmp_path / "peft")
    weights, settings = "adapter_model.safetensors", "adapter_config.json"
    folders = [tmp_path / "folded", tmp_path / "peft"]
    mine, theirs = ((folder / weights).read_bytes() for folder in folders)
    assert mine == theirs
    reported = [json.loads((folder / settings).read_text()) for folder in folders]
    for one in reported:
        one["target_modules"].sort()  # a set, which peft writes in any order
    assert reported[0] == reported[1]
    strategy = strategy_in(Dtype.FP32)
    read = load_adapter(load_base(model_folder("llama"), strategy, CPU), tmp_path / "folded")
    with torch.no_grad():
        wanted = folded.eval()(input_ids=IDS).logits
        assert distance(read.eval()(input_ids=IDS).logits, wanted) < 1e-6


def test_a_copy_computes_with_its_own_weights() -> None:
    folded = fold(adapted())
    other = copy.deepcopy(folded)
    with torch.no_grad():
        before = other(input_ids=IDS).logits
        for name, parameter in folded.named_parameters():
            if "lora_" in name:
                parameter.zero_()
        assert torch.equal(other(input_ids=IDS).logits, before)
        assert not torch.equal(folded(input_ids=IDS).logits, before)


def test_no_rows_are_no_error() -> None:
    folded = fold(adapted()).base_model.model.model.layers[0].self_attn.q_proj
    x = torch.zeros(2, 0, 64, requires_grad=True)
    y = folded(x)
    y.sum().backward()
    assert y.shape == (2, 0, 64)
    assert x.grad is not None
    assert x.grad.shape == x.shape


# What is not folded


def _with_two(model: Any) -> Any:
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    return model


UNFOLDABLE: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": 0.1},
    "DoRA": {"use_dora": True},
    "a bias of B": {"lora_bias": True},
}


@pytest.mark.parametrize("settings", UNFOLDABLE.values(), ids=UNFOLDABLE)
def test_adapters_that_do_more_stay_as_they_are(settings: dict[str, Any]) -> None:
    config = LoraConfig(r=2, target_modules=["fc_in", "q_proj"], **settings)
    model: Any = get_peft_model(make_model("qwen2"), config)
    assert _lora_layers(model) > 0
    assert fuse_lora(model) == 0


def test_several_adapters_stay_as_they_are() -> None:
    model = _with_two(adapted(lora_targets=("q_proj", "k_proj")))
    assert fuse_lora(model) == _lora_layers(model) - 2 == 2


def test_trained_base_weights_stay_as_they_are() -> None:
    model = adapted(lora_targets=("q_proj", "k_proj"))
    model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.requires_grad_(True)
    assert fuse_lora(model) == 3


def test_other_packed_bases_stay_as_they_are() -> None:
    """LLM.int8 and an embedding's adapter, whose base has no such matrix."""
    from bitsandbytes.nn import Linear8bitLt

    packed: Any = nn.Sequential(Linear8bitLt(64, 64, bias=False, has_fp16_weights=False))
    packed.is_loaded_in_8bit = True
    model = get_peft_model(packed, LoraConfig(r=2, target_modules=["0"]))
    assert _lora_layers(model) == 1
    assert fuse_lora(model) == 0
    table: Any = get_peft_model(
        make_model("llama"), LoraConfig(r=2, target_modules=["embed_tokens"])
    )
    assert fuse_lora(table) == 0


def _lora_layers(model: nn.Module) -> int:
    return sum(hasattr(module, "lora_A") for module in model.modules())


def test_only_modules_of_peft_are_asked() -> None:
    assert not can_fuse_lora(nn.Linear(4, 4))


def _disabled(model: Any) -> Iterator[Tensor]:
    with model.disable_adapter():
        yield model(input_ids=IDS).logits


def _merged(model: Any) -> Iterator[Tensor]:
    model.merge_adapter()
    yield model(input_ids=IDS).logits
    model.unmerge_adapter()
    yield model(input_ids=IDS).logits


def _autocast(model: Any) -> Iterator[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield model(input_ids=IDS).logits


def _mixed(model: Any) -> Iterator[Tensor]:
    """fp32 adapters on 16-bit weights."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    yield model(input_ids=IDS).logits


@pytest.mark.parametrize("ask", [_disabled, _merged, _autocast, _mixed])
def test_calls_that_ask_for_more_get_the_forward_of_peft(ask: Any) -> None:
    model = adapted()
    with torch.no_grad():
        found, wanted = list(ask(fold(model))), list(ask(copy.deepcopy(model)))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert distance(one, other) < 1e-6
