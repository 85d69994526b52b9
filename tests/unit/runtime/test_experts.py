"""Experts as grouped products against transformers' own loop over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy, Training
from tightfit.runtime.adapters import add_adapters
from tightfit.runtime.kernels.experts import (
    EXPERTS,
    find_gating,
    sort_by_expert,
    use_grouped_experts,
)
from tiny_configs import TINY, tiny_config

VOCAB = 64


def make_model(model_type: str, experts: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    auto: Any = AutoConfig
    config = auto.for_model(**tiny_config(model_type))
    use_grouped_experts(config)
    config._experts_implementation = experts
    library: Any = AutoModelForCausalLM
    model: Any = library.from_config(config, dtype=dtype, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def list_experts(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


MIXTURES = [name for name in TINY if "moe" in name or "mix" in name or name in (
    "gpt_oss", "olmoe", "deepseek_v2", "deepseek_v3", "dots1", "minimax_m2", "qwen3_next", "jamba",
)]  # fmt: skip


UNGROUPED = ("llama4_text", "nemotron_h")


def run(model: Any) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (2, 20))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("model_type", MIXTURES)
def test_loss_and_gradients_are_those_of_the_loop(model_type: str) -> None:
    ours, theirs = (make_model(model_type, name, torch.float32) for name in (EXPERTS, "eager"))
    if not list_experts(ours):
        assert not list_experts(theirs)  # experts of its own, as Llama 4's: nothing is replaced
    (loss, gradients), (right, exact) = run(ours), run(theirs)

    assert loss == pytest.approx(right, rel=1e-6)
    assert gradients.keys() == exact.keys()
    for name, wanted in exact.items():
        assert (gradients[name] - wanted).abs().max() <= 1e-5 * wanted.abs().max() + 1e-7, name


def test_known_families_run_here() -> None:
    """Without it the test above would compare transformers with itself."""
    for model_type in ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3", "olmoe"):
        [first, *_] = list_experts(make_model(model_type, EXPERTS, torch.float32))
        assert find_gating(first) is not None, model_type


def test_frozen_experts_keep_the_first_product_alone() -> None:
    model = make_model("qwen3_moe", EXPERTS, torch.bfloat16)
    [first, *_] = list_experts(model)
    first.requires_grad_(False)
    tokens, chosen = 32, torch.rand(32, first.num_experts).topk(2).indices
    hidden = torch.randn(tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(tokens, 2, dtype=torch.bfloat16)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        first(hidden, chosen, weights)
    for tensor in (hidden, weights, *first.parameters()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    width = first.gate_up_proj.shape[1]
    assert sum(kept.values()) == tokens * 2 * width * 2


def test_routing_puts_each_pair_where_its_expert_is() -> None:
    chosen = torch.tensor([[2, 0], [2, 1], [0, 2]])
    found = sort_by_expert(chosen, 4)

    assert found.experts.tolist() == [0, 0, 1, 2, 2, 2]
    assert found.ends.tolist() == [2, 3, 6, 6]
    assert found.tokens.tolist() == [0, 2, 1, 0, 1, 2]
    assert torch.equal(found.experts[found.places], chosen)


@pytest.mark.parametrize("model_type", [name for name in MIXTURES if name not in UNGROUPED])
def test_adapters_of_experts_are_as_pefts_own(model_type: str) -> None:
    """Beside peft's forward, which adds each product to the weights."""
    strategy = Strategy(
        method=Method.LORA,
        weights=Dtype.FP32,
        compute=Dtype.FP32,
        adapter_dtype=Dtype.FP32,
        lora_rank=4,
        lora_targets=("all-linear", "experts"),
    )
    training = Training(model_path="unused", learning_rate=1e-3)
    adapted: Any = add_adapters(make_model(model_type, EXPERTS, torch.float32), strategy, training)
    torch.manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    wrappers = [m for m in adapted.modules() if vars(m).get("forward") is not None]
    assert {wrapper.parameter_name for wrapper in wrappers} == {"gate_up_proj", "down_proj"}

    loss, gradients = run(adapted)
    adapted.zero_grad()
    for module in adapted.modules():
        vars(module).pop("forward", None)
        vars(module).pop("adapters_of_experts", None)
    right, exact = run(adapted)

    assert loss == pytest.approx(right, rel=1e-6)
    assert gradients.keys() == exact.keys()
    for name, wanted in exact.items():
        assert (gradients[name] - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-7, name
