"""Flex attention, and the attention of Falcon, BLOOM and MPT through our kernels, against eager.

On a CPU flex attention runs uncompiled and without a backward pass; `tests/gpu` has its gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from tightfit.core.attention import Attention
from tightfit.runtime import flex_attention
from tightfit.runtime.attention import CAUSAL, CAUSAL_REPEAT, REPEAT, register_attention
from tightfit.runtime.own_attention import accept_kernels, use_own_attention
from tightfit.runtime.packed_masks import hand_positions_to_masks
from tiny_configs import tiny_config

FLEX = Attention.FLEX.implementation_name
FALCON_SHAPES: dict[str, dict[str, Any]] = {
    "7b": {"multi_query": True, "new_decoder_architecture": False},
    "40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "rw": {
        "multi_query": False,
        "num_kv_heads": 4,
        "new_decoder_architecture": False,
        "alibi": True,
    },
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),  # it is slow, it says
]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = (flex_attention._attend, flex_attention._scale_by_sinks)
    monkeypatch.setattr(flex_attention, "_compiled", lambda: functions)

    def make_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
        return create_block_mask(*args, **kwargs)

    monkeypatch.setattr(masking_utils, "create_block_mask", make_mask)
    register_attention()


def make_model(model_type: str, attention: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    auto: Any = AutoConfig
    config = auto.for_model(**(tiny_config(model_type) | fields))
    config._attn_implementation = attention
    accept_kernels(config)
    library: Any = AutoModelForCausalLM
    model: Any = library.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    if attention.startswith("tightfit_"):
        use_own_attention(model)
    return model.eval()


def logits(model: Any, **inputs: Tensor) -> Tensor:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 40))
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    return found


@pytest.mark.parametrize("attention", [CAUSAL, REPEAT])
@pytest.mark.parametrize("shape", ["7b", "40b"])
def test_falcon_needs_no_mask(shape: str, attention: str) -> None:
    fields = FALCON_SHAPES[shape]
    ours = logits(make_model("falcon", attention, **fields))
    torch.testing.assert_close(ours, logits(make_model("falcon", "eager", **fields)))


def test_falcon_with_alibi() -> None:
    """Beside SDPA: transformers 5.22 adds the bias twice in eager attention."""
    fields = FALCON_SHAPES["rw"]
    ours = logits(make_model("falcon", CAUSAL, **fields))
    torch.testing.assert_close(ours, logits(make_model("falcon", "sdpa", **fields)))


@pytest.mark.parametrize(("model_type", "heads"), [("bloom", "n_head"), ("mpt", "n_heads")])
@pytest.mark.parametrize("num_heads", [4, 6])
def test_alibi_of_any_number_of_heads(model_type: str, heads: str, num_heads: int) -> None:
    fields: dict[str, Any] = {heads: num_heads}
    ours = logits(make_model(model_type, CAUSAL, **fields))
    torch.testing.assert_close(ours, logits(make_model(model_type, "eager", **fields)))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gpt_oss", "mistral"])
def test_flex_attention_is_eager_attention(model_type: str, is_packed: bool) -> None:
    """Softcaps, windows and sinks, and packed documents."""
    positions = torch.cat([torch.arange(length) for length in (25, 15)]).expand(2, -1)
    inputs = {"position_ids": positions} if is_packed else {}
    models = [make_model(model_type, name) for name in (FLEX, "eager")]
    for model in models:
        hand_positions_to_masks(model)
    ours, eager = (logits(model, **inputs) for model in models)
    torch.testing.assert_close(ours, eager)


PACKED_MODELS = [
    *(("falcon", name, FALCON_SHAPES["7b"]) for name in (CAUSAL, CAUSAL_REPEAT, "eager")),
    ("falcon", CAUSAL_REPEAT, FALCON_SHAPES["40b"]),
    *(("falcon", name, FALCON_SHAPES["rw"]) for name in (CAUSAL, "sdpa")),
    *((family, name, {}) for family in ("bloom", "mpt") for name in (CAUSAL, "eager")),
    *((family, name, {}) for family in ("gpt_oss", "opt") for name in ("eager", FLEX)),
]


@pytest.mark.parametrize(("model_type", "attention", "fields"), PACKED_MODELS)
def test_packed_documents_are_answered_as_alone(
    model_type: str, attention: str, fields: dict[str, Any]
) -> None:
    """Rows of several documents, in families whose own code makes masks without positions: their
    answers, and where there is a backward pass on a CPU their gradients."""
    model = make_model(model_type, attention, **fields)
    hand_positions_to_masks(model)
    generator = torch.Generator().manual_seed(2)
    rows = [
        [torch.randint(3, 64, (size,), generator=generator) for size in sizes]
        for sizes in ((11, 1, 14), (20, 6), (26,))
    ]
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(len(d)) for d in row]) for row in rows])
    has_gradients = attention not in (FLEX, CAUSAL) or fields is FALCON_SHAPES["7b"]
    with torch.set_grad_enabled(has_gradients):
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [model(input_ids=d[None], use_cache=False).logits[0] for row in rows for d in row]
    torch.testing.assert_close(packed.flatten(0, 1), torch.cat(alone), atol=1e-4, rtol=1e-4)
    mixed = logits_of(model, ids)
    assert float((mixed - packed.detach()).abs().max()) > 1e-2
    if has_gradients:
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        targets = torch.rand(packed.shape, generator=generator)
        of_packed = torch.autograd.grad((packed * targets).sum(), weights, allow_unused=True)
        of_alone = torch.autograd.grad(
            (torch.cat(alone) * targets.flatten(0, 1)).sum(), weights, allow_unused=True
        )
        for ours, theirs in zip(of_packed, of_alone, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found
