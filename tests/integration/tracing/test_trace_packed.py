"""Tracing packed weights and 8-bit optimizers: everything stored is as bitsandbytes stores it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from small_models import make_family, make_llama
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError
from tightfit.core.settings import Sharding
from tightfit.core.strategy import Strategy
from tightfit.runtime.load import load_base, load_meta, materialize_empty
from tightfit.trace.recording import OPTIMIZER, WEIGHTS, Recording
from tightfit.training.model import Objective, build_optimizer, prepare_model
from tightfit.training.tracing.engine import FAKE_DEVICE, build_meta_module, make_training
from tightfit.training.tracing.fake_kernels import (
    _wrap_fake,
    is_quantized_parameter,
    list_quantization_state,
    quantize_meta_fake,
    without_kernels,
)
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import record_job

CARD = (9, 0)


def place_quantized(model: Any, device: torch.device) -> None:
    """Put codes and their scales from the meta device on `device`. Inside the fake mode."""

    def copy(tensor: Any) -> Any:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or not weight.is_meta or not is_quantized_parameter(weight):
            continue
        placed = _wrap_fake(copy(weight), weight)
        if type(weight).__name__ == "Int8Params":
            placed.CB, placed.SCB = placed.data, copy(weight.SCB)
        state = getattr(weight, "quant_state", None)
        while state is not None:
            for name in ("absmax", "code", "offset"):
                if getattr(state, name) is not None:
                    setattr(state, name, copy(getattr(state, name)))
            state = state.state2
        module._parameters["weight"] = placed


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that no block of 64 or 256 divides, and matrices with an odd number of values."""
    folder = tmp_path_factory.mktemp("odd")
    widths = {"hidden_size": 35, "intermediate_size": 127, "head_dim": 8}
    return make_llama(
        folder, num_attention_heads=5, num_key_value_heads=1, attention_bias=True, **widths
    )


def _strategy(**fields: Any) -> Strategy:
    return Strategy.model_validate({"method": "lora", "micro_batch": 2, "seq_len": 32} | fields)


def _make_fake(folder: Path, strategy: Strategy) -> Objective:
    with without_kernels(strategy, FAKE_DEVICE, CARD):
        training = make_training(strategy, folder)
        module = build_meta_module(folder, strategy, training, has_varlen=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            place_quantized(module, FAKE_DEVICE)
            materialize_empty(module, FAKE_DEVICE)
    return module


def _make_real(folder: Path, strategy: Strategy) -> Objective:
    model = load_base(folder, strategy, torch.device("cpu"))
    return Objective.from_strategy(
        prepare_model(model, strategy, make_training(strategy, folder)), strategy
    )


def _describe(module: nn.Module) -> dict[str, Any]:
    named: dict[str, Any] = {
        name: (type(parameter).__name__, parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if is_quantized_parameter(parameter)
    }
    tensors = [*module.named_parameters(), *module.named_buffers()]
    named |= {f"{name}:": (tuple(t.shape), t.dtype) for name, t in tensors}
    named["beside"] = [(tuple(t.shape), t.dtype) for t in list_quantization_state(module)]
    named["classes"] = {f"{type(m).__module__}.{type(m).__name__}" for m in module.modules()}
    return named


CASES = [
    {"weights": "nf4"},
    {"weights": "nf4", "double_quant": False},
    {"weights": "nf4", "upcast_unquantized": True},
    {"weights": "nf4", "compute": "fp16"},
    {"weights": "nf4", "dora": True},
    {"weights": "int8"},
    {"weights": "int8", "dora": True},
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_stored_as_loaded(odd: Path, fields: dict[str, Any]) -> None:
    strategy = _strategy(**fields)
    real, fake = _describe(_make_real(odd, strategy)), _describe(_make_fake(odd, strategy))
    assert real["beside"]
    assert fake == real


@pytest.mark.parametrize("fields", [{}, {"compute": "fp16"}, {"dora": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_an_unpacked_base_is_plain(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    strategy = _strategy(weights="nf4", dequantized_base=True, attention="eager", **fields)
    folder = make_llama(tmp_path) if family == "llama" else make_family(tmp_path, family)
    real, fake = _describe(_make_real(folder, strategy)), _describe(_make_fake(folder, strategy))
    assert real["beside"] == []
    assert not any(name.startswith("bitsandbytes") for name in real["classes"])
    assert fake == real


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "falcon"])
def test_stored_as_loaded_in_other_families(tmp_path: Path, family: str) -> None:
    strategy = _strategy(weights="nf4", attention="eager")
    folder = make_family(tmp_path, family)
    assert _describe(_make_fake(folder, strategy)) == _describe(_make_real(folder, strategy))


def test_codes_stored_as_another_dtype(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    strategy = Strategy(weights=Dtype.NF4, compute=Dtype.BF16, sharding=Sharding.ZERO3)
    real = load_base(folder, strategy, torch.device("cpu"))
    with without_kernels(_strategy(weights="nf4"), FAKE_DEVICE, CARD):
        fake = load_meta(folder, strategy)
        quantize_meta_fake(fake, strategy)
    assert _describe(fake) == _describe(real)


def test_sharded_codes_find_their_statistics(odd: Path) -> None:
    """Sharding replaces parameters by its own, which know nothing of scales."""
    strategy = _strategy(weights="nf4")
    module = _make_fake(odd, strategy)
    before = list_quantization_state(module)
    packed: Any = module.model.get_submodule(
        "base_model.model.model.layers.0.mlp.up_proj.base_layer"
    )
    with without_kernels(strategy, FAKE_DEVICE, CARD), packed.weight.fake_mode:
        packed.weight = nn.Parameter(torch.empty_like(packed.weight), requires_grad=False)
        assert packed(torch.empty(3, 35, dtype=torch.bfloat16)).shape == (3, 127)
    assert [id(t) for t in list_quantization_state(module)] == [id(t) for t in before]


def _trace(folder: Path, **fields: Any) -> Recording:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    strategy = _strategy(**fields)
    job = TraceJob(config=config, strategy=strategy, compute_capability=CARD, stages=())
    return record_job(job.model_copy(update={"config": config}))


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    "fields",
    [{"weights": "nf4"}, {"weights": "int8"}, {"weights": "nf4", "dequantized_base": True}],
    ids=str,
)
def test_traced_weights_are_the_bytes_of_the_loaded_model(
    odd: Path, fields: dict[str, Any]
) -> None:
    recording = _trace(odd, **fields)
    real = _make_real(odd, _strategy(**fields))
    stored = [*real.parameters(), *real.buffers(), *list_quantization_state(real)]
    begun = [recording.allocations[event - 1] for event in recording.events if event > 0]
    standing = sum(a.num_bytes for a in begun if a.category == WEIGHTS)
    assert standing == _count_bytes(stored)


def test_card_kernels_are_called(odd: Path) -> None:
    nf4 = {allocation.op for allocation in _trace(odd, weights="nf4").allocations}
    assert {"bitsandbytes.gemm_4bit.default", "bitsandbytes.dequantize_4bit.default"} <= nf4
    unpacked = [a for a in _trace(odd, weights="nf4", dequantized_base=True).allocations if a.op]
    steps = {a.op for a in unpacked if a.stage != "load"}
    assert "aten.mm.default" in steps
    assert not any(op.startswith("bitsandbytes") for op in steps)
    int8 = {allocation.op for allocation in _trace(odd, weights="int8").allocations}
    assert "bitsandbytes.int8_mixed_scaled_mm.default" in int8


def test_int8_keeps_inputs_of_recomputed_layers(odd: Path) -> None:
    """bitsandbytes holds them in its own hands, where checkpointing cannot see them."""
    tokens = 2 * 32
    allocations = _trace(odd, weights="int8", lora_targets=("q_proj",)).allocations
    wide = [
        a for a in allocations if a.shape[-1:] == (127,) and a.step == 2 and a.stage == "forward"
    ]
    kept = [a for a in wide if a.category == "activations" and a.num_bytes == tokens * 127 * 2]
    assert len(kept) == 2  # down_proj's input, in each layer


def _states(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {
            name: (tuple(value.shape), value.dtype)
            for name, value in optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _step(module: nn.Module, strategy: Strategy, folder: Path) -> Any:
    training = make_training(strategy, folder)
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_8bit_state_is_what_the_optimizer_makes(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, hidden_size=72, intermediate_size=131)
    strategy = _strategy(method="full", optimizer="adamw-8bit")
    real = _states(_step(_make_real(folder, strategy), strategy, folder))
    with without_kernels(strategy, FAKE_DEVICE, CARD):
        training = make_training(strategy, folder)
        module = build_meta_module(folder, strategy, training, has_varlen=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            materialize_empty(module, FAKE_DEVICE)
            fake = _states(_step(module, strategy, folder))
    assert fake == real
    kinds = {state["state1"][1] for state in fake}
    assert kinds == {torch.uint8, torch.float32}  # small ones stay whole


def test_paged_state_is_not_on_the_card(tmp_path: Path) -> None:
    """bitsandbytes pages the state of what has a hundred thousand values or more."""
    folder = make_llama(tmp_path, intermediate_size=2048)
    recording = _trace(folder, method="full", optimizer="adamw-paged-8bit")
    whole = _trace(folder, method="full", optimizer="adamw-8bit")
    missing = _sum_state(whole) - _sum_state(recording)
    num_layers, width = 2, 64 * 2048
    assert missing == num_layers * 3 * 2 * width  # gate, up and down, two bytes a value


def _sum_state(recording: Recording) -> int:
    return sum(a.num_bytes for a in recording.allocations if a.category == OPTIMIZER)


def test_bitsandbytes_is_itself_again(odd: Path) -> None:
    import bitsandbytes

    functional: Any = bitsandbytes.functional
    before = (bitsandbytes.matmul, functional.create_dynamic_map, dict(functional.name2qmap))
    _trace(odd, weights="nf4", optimizer="adamw-8bit")
    assert (bitsandbytes.matmul, functional.create_dynamic_map) == before[:2]
    assert functional.name2qmap.keys() == before[2].keys()
    values = torch.randn(64, 64)
    codes, state = functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    error = (functional.dequantize_4bit(codes, state) - values).abs().max()
    assert error < 0.6  # of values up to 4, in steps of a sixth


def test_fused_loss_takes_less_than_whole_logits(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    shapes = {
        loss: {a.shape for a in _trace(folder, loss=loss, fused_kernels=True).allocations}
        for loss in ("fused", "kernel")
    }
    config = json.loads((folder / "config.json").read_text("utf-8"))
    num_trained, vocab = 2 * 31 - 1, config["vocab_size"]  # one token of padding
    assert (num_trained, vocab) in shapes["kernel"]
    assert (num_trained, vocab) not in shapes["fused"]
    # Liger: as many slices as the vocabulary is times wider than the model, in powers of two.
    slices = -(-vocab // 64)
    size = 1 << (-(-num_trained // slices) - 1).bit_length()
    assert (size, vocab) in shapes["fused"]


@pytest.mark.parametrize("fields", [{"weights": "nf4"}, {"optimizer": "adamw-8bit"}], ids=str)
def test_without_bitsandbytes(
    odd: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(SetupError, match="bitsandbytes") as caught:
        _trace(odd, **fields)
    assert "pip install" in caught.value.remedy
