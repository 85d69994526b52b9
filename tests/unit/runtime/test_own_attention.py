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
from tightfit.runtime.attention import CAUSAL, REPEAT, register_attention
from tightfit.runtime.own_attention import accept_kernels, use_own_attention
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


@pytest.mark.parametrize(
    ("model_type", "is_packed"),
    [
        *((name, False) for name in ("gemma2", "gemma3_text", "gpt_oss", "mistral")),
        # The mask of gpt-oss does not read positions, so the planner refuses to pack its rows.
        *((name, True) for name in ("gemma2", "gemma3_text", "mistral")),
    ],
)
def test_flex_attention_is_eager_attention(model_type: str, is_packed: bool) -> None:
    """Softcaps, windows and sinks; packed documents where the family's mask knows them."""
    positions = torch.cat([torch.arange(length) for length in (25, 15)]).expand(2, -1)
    inputs = {"position_ids": positions} if is_packed else {}
    ours = logits(make_model(model_type, FLEX), **inputs)
    torch.testing.assert_close(ours, logits(make_model(model_type, "eager"), **inputs))
