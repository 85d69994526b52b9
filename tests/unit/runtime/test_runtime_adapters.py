"""Adapters: as many values as the estimate says, in the dtype asked for, and back from disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import model_folder
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.core.strategy import Strategy, Training
from tightfit.estimation.weights import num_trainable
from tightfit.models.config import read_config
from tightfit.models.families.registry import find_family
from tightfit.models.resolve import resolve_model
from tightfit.runtime.adapters import add_adapters, load_adapter, save_adapter
from tightfit.runtime.embedding_adapters import head_weight
from tightfit.runtime.kernels.experts import use_grouped_experts
from tightfit.runtime.load import load_base
from tiny_configs import TINY, tiny_config

CPU = torch.device("cpu")
IDS = torch.arange(3, 19)[None]
TRAINING = Training(model_path="model", learning_rate=1e-4)


def count_trained(model: Any) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def load(folder: Path, strategy: Strategy) -> Any:
    return load_base(folder, strategy, CPU)


def eager(family: str) -> dict[str, Any]:
    """gemma2 caps its logits, which sdpa cannot."""
    return {"attention": Attention.EAGER} if family == "gemma2" else {}


def fp32(**fields: Any) -> Strategy:
    defaults = {"weights": Dtype.FP32, "compute": Dtype.FP32, "adapter_dtype": Dtype.FP32}
    return Strategy(**(defaults | fields))


def answer(model: Any) -> torch.Tensor:
    extra = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS, **extra).logits
    return logits


WITH_EMBEDDINGS = ("all-linear", "embeddings")
FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3")
FIELDS: list[dict[str, Any]] = [
    *({}, {"train_embeddings": True}, {"lora_rank": 3}),
    {"lora_targets": WITH_EMBEDDINGS},
]
COUNTED = [(family, fields) for family in FAMILIES for fields in FIELDS]
COUNTED += [("gpt2", {}), ("t5", {}), ("t5", {"lora_rank": 3})]


@pytest.mark.parametrize(("family", "fields"), COUNTED)
def test_as_many_trained_values_as_estimated(family: str, fields: dict[str, Any]) -> None:
    folder = model_folder(family)
    strategy = fp32(**fields, **eager(family))
    model = add_adapters(load(folder, strategy), strategy, TRAINING)

    assert count_trained(model) == num_trainable(resolve_model(str(folder)), strategy)


def make_tiny(model_type: str) -> Any:
    auto: Any = AutoConfig
    config = auto.for_model(model_type, **TINY[model_type])
    use_grouped_experts(config)
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_type", TINY)
def test_every_family_has_as_many_adapters_as_estimated(model_type: str) -> None:
    strategy = fp32(lora_rank=3)
    model = add_adapters(make_tiny(model_type), strategy, TRAINING)
    spec = read_config(tiny_config(model_type), name="", source="")
    assert count_trained(model) == num_trainable(spec, strategy)

    if spec.grouped_params:
        strategy = fp32(lora_rank=3, lora_targets=("all-linear", "experts"))
        before, model = (
            count_trained(model),
            add_adapters(make_tiny(model_type), strategy, TRAINING),
        )
        assert count_trained(model) == num_trainable(spec, strategy) > before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_type", TINY)
def test_every_adapter_has_a_gradient(model_type: str) -> None:
    """Each is called; where the record says that one is not, peft was told to leave it out."""
    strategy = fp32(lora_rank=3)
    model: Any = add_adapters(make_tiny(model_type), strategy, TRAINING).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    model(input_ids=IDS.repeat(3, 1), labels=IDS.repeat(3, 1)).loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    assert not [name for name, grad in trained.items() if grad is None or not grad.any()]


@pytest.mark.parametrize("model_type", [n for n in TINY if find_family(n).lora_excludes])
def test_a_module_that_takes_no_adapter_is_refused(model_type: str) -> None:
    name = find_family(model_type).lora_excludes[-1]
    strategy = fp32(lora_targets=(name,))
    with pytest.raises(UsageError, match=f"takes no adapter on {name}"):
        add_adapters(make_tiny(model_type), strategy, TRAINING)


def test_named_targets_alone() -> None:
    folder = model_folder("llama")
    strategy = fp32(lora_targets=("q_proj", "down_proj"))
    model = add_adapters(load(folder, strategy), strategy, TRAINING)
    trained = {n.split(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}

    assert len(trained) == 4
    assert {name.rpartition(".")[2] for name in trained} == {"q_proj", "down_proj"}
    assert count_trained(model) == num_trainable(resolve_model(str(folder)), strategy)


def test_a_target_that_does_not_exist() -> None:
    strategy = fp32(lora_targets=("q_proj", "w_proj"))
    with pytest.raises(UsageError, match="no module `w_proj`"):
        add_adapters(load(model_folder("llama"), strategy), strategy, TRAINING)


@pytest.mark.parametrize("base", [Dtype.BF16, Dtype.NF4])
@pytest.mark.parametrize(
    ("dtype", "expected"), [(Dtype.FP32, torch.float32), (Dtype.BF16, torch.bfloat16)]
)
def test_adapters_have_the_asked_dtype(base: Dtype, dtype: Dtype, expected: torch.dtype) -> None:
    strategy = Strategy(
        weights=base, adapter_dtype=dtype, train_embeddings=base is Dtype.BF16, dora=True
    )
    model = add_adapters(load(model_folder("llama"), strategy), strategy, TRAINING)

    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert {dtype for name, dtype in trained.items() if "lora_" in name} == {expected}
    others = {dtype for name, dtype in trained.items() if "lora_" not in name}
    assert others == ({torch.bfloat16} if base is Dtype.BF16 else set())
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16} | ({torch.uint8} if base is Dtype.NF4 else set())


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "t5"])
def test_fresh_adapters_change_no_answer(family: str) -> None:
    strategy = fp32(train_embeddings=family.startswith("llama"), dora=family != "gpt2")
    base = load(model_folder(family), strategy)
    before = answer(base)

    assert torch.allclose(answer(add_adapters(base, strategy, TRAINING)), before, atol=1e-5)


@pytest.mark.parametrize("rslora", [False, True])
def test_scale_of_the_update(rslora: bool) -> None:
    strategy = fp32(lora_rank=4)
    training = TRAINING.model_copy(update={"lora_alpha": 6.0, "rslora": rslora})
    model: Any = add_adapters(load(model_folder("llama"), strategy), strategy, training)
    layer = model.base_model.model.model.layers[0].mlp.up_proj

    assert layer.scaling["default"] == pytest.approx(6.0 / (math.sqrt(4) if rslora else 4))


def train_a_little(model: Any) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"dora": True}),
        ("llama", {"train_embeddings": True}),
        ("llama-tied", {"train_embeddings": True}),
        ("llama", {"lora_targets": WITH_EMBEDDINGS}),
        ("llama-tied", {"lora_targets": WITH_EMBEDDINGS}),
        ("gemma3", {"lora_targets": ("q_proj", "embeddings")}),
        ("gpt2", {}),
        ("t5", {}),
        ("llama", {"weights": Dtype.NF4}),
    ],
)
def test_saved_and_loaded_again(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    strategy = fp32(**fields)
    folder = model_folder(family)
    model = add_adapters(load(folder, strategy), strategy, TRAINING)
    before = answer(model)
    train_a_little(model)
    save_adapter(model, tmp_path / "adapter")
    again = load_adapter(load(folder, strategy), tmp_path / "adapter")

    assert not torch.allclose(answer(model), before, atol=1e-2)
    assert torch.allclose(answer(again), answer(model), atol=1e-5)
    assert count_trained(again) == 0


def test_gathered_values_name_a_tied_matrix_once(tmp_path: Path) -> None:
    """As a run saves them; peft asks for the matrix by the name of each module that uses it."""
    strategy = fp32(train_embeddings=True)
    folder = model_folder("llama-tied")
    model = add_adapters(load(folder, strategy), strategy, TRAINING)
    train_a_little(model)
    gathered = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    save_adapter(model, tmp_path / "adapter", gathered)
    again = load_adapter(load(folder, strategy), tmp_path / "adapter")

    assert torch.allclose(answer(again), answer(model), atol=1e-5)


def test_tied_embeddings_stay_tied() -> None:
    strategy = fp32(train_embeddings=True)
    model: Any = add_adapters(load(model_folder("llama-tied"), strategy), strategy, TRAINING)
    train_a_little(model)

    embedding = model.get_input_embeddings().weight
    head = model.base_model.model.get_output_embeddings().weight
    assert embedding is head


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_adapters_on_embeddings_have_the_gradients_of_the_whole_matrices(family: str) -> None:
    """Of a model without adapters whose matrices are `W + scaling B A`: where embeddings and head
    are one matrix, its gradient is that of both uses."""
    strategy = fp32(lora_targets=("q_proj", "embeddings"), lora_rank=3)
    model: Any = add_adapters(load(model_folder(family), strategy), strategy, TRAINING)
    train_a_little(model)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    a, b = embeddings.lora_embedding_A["default"], embeddings.lora_embedding_B["default"]
    scaling = embeddings.scaling["default"]
    model(input_ids=IDS, labels=IDS).loss.backward()

    plain = load(model_folder(family), strategy)
    changed = plain.get_input_embeddings().weight
    plain.get_output_embeddings().weight.data = head_weight(head).detach()
    changed.data = (embeddings.base_layer.weight + scaling * (b @ a).T).detach()
    query = plain.model.layers[0].self_attn.q_proj
    for layer, own in zip(plain.model.layers, model.base_model.model.model.layers, strict=True):
        query, adapted = layer.self_attn.q_proj, own.self_attn.q_proj
        query.weight.data = query.weight.data + adapted.get_delta_weight("default")
    plain.requires_grad_(True)
    plain(input_ids=IDS, labels=IDS).loss.backward()

    g = changed.grad
    assert torch.allclose(a.grad, scaling * b.T @ g.T, rtol=1e-4, atol=1e-4)
    assert torch.allclose(b.grad, scaling * g.T @ a.T, rtol=1e-4, atol=1e-4)
    hidden = torch.randn(2, head.base_layer.in_features)
    assert torch.allclose(head(hidden), hidden @ head_weight(head).T, atol=1e-5)
    if family == "llama-tied":
        assert head.base_layer.weight is embeddings.base_layer.weight
        assert torch.allclose(head_weight(head), changed, atol=1e-6)


@pytest.mark.parametrize("fields", [{"train_embeddings": True}, {"lora_targets": WITH_EMBEDDINGS}])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_embeddings_that_peft_cannot_tie(family: str, fields: dict[str, Any]) -> None:
    strategy = fp32(**fields)
    with pytest.raises(UsageError, match=f"{family} uses one matrix in several places"):
        add_adapters(load(model_folder(family), strategy), strategy, TRAINING)


def test_adapter_errors(tmp_path: Path) -> None:
    strategy = fp32()
    folder = tmp_path / "adapter"
    base = load(model_folder("llama"), strategy)
    with pytest.raises(NotFoundError, match="no adapter_config"):
        load_adapter(base, folder)

    save_adapter(add_adapters(base, strategy, TRAINING), folder)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-40])
    with pytest.raises(InvalidInputError, match="cut short"):
        load_adapter(load(model_folder("llama"), strategy), folder)
    weights.write_bytes(whole)
    with pytest.raises(InvalidInputError, match="does not fit"):
        load_adapter(load(model_folder("gpt2"), strategy), folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model_folder("llama"))
