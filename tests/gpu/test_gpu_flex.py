"""Flex attention on a GPU: losses and gradients of eager attention, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.core.attention import Attention
from tightfit.runtime.attention import CAUSAL, register_attention
from tightfit.runtime.own_attention import accept_kernels, use_own_attention

FLEX = Attention.FLEX.implementation_name
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 64,
    "vocab_size": 128,
}
_MPT = {"d_model": 192, "n_layers": 2, "n_heads": 6, "vocab_size": 128, "max_seq_len": 512}
_FALCON = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "softcap": ("gemma2", FLEX, _SIZES),
    "window": ("mistral", FLEX, _SIZES),
    "sinks": ("gpt_oss", FLEX, _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "bloom": ("bloom", CAUSAL, {"hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 128}),
    "mpt": ("mpt", CAUSAL, _MPT),
    "falcon": ("falcon", CAUSAL, _FALCON),
}


def run_step(model_type: str, attention: str, fields: dict[str, Any]) -> Any:
    """The loss, and the gradients by name."""
    auto: Any = AutoConfig
    config = auto.for_model(model_type, **fields)
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    accept_kernels(config)
    torch.manual_seed(0)
    library: Any = AutoModelForCausalLM
    model = library.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model = model.cuda()
    if attention != "eager":
        use_own_attention(model)
    ids = torch.randint(0, 128, (2, 300)).cuda()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    named = model.named_parameters()
    return float(loss.detach()), {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_eager_attention(case: str) -> None:
    model_type, attention, fields = CASES[case]
    torch.backends.cuda.matmul.allow_tf32 = False
    register_attention()
    loss, gradients = run_step(model_type, attention, fields)
    right, exact = run_step(model_type, "eager", fields)

    assert loss == pytest.approx(right, rel=1e-6)
    for name, wanted in exact.items():
        # Gradients of biases that change nothing are noise.
        assert (gradients[name] - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-7, name
