"""Joined projections of a model that only answers."""

from __future__ import annotations

import torch
from test_fused_lora import IDS
from tiny_models import make_model

from tightfit.runtime.decoding import join_projections


@torch.inference_mode()
def test_joined_projections_give_the_same_logits() -> None:
    """Qwen 2 has biases on queries, keys and values; weights stay those of the model's layers."""
    model = make_model("qwen2").eval()
    expected = model(IDS).logits
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        join_projections([attention.q_proj, attention.k_proj, attention.v_proj])
        join_projections([mlp.gate_proj, mlp.up_proj])

    torch.testing.assert_close(model(IDS).logits, expected)
    assert attention.q_proj.weight.untyped_storage().data_ptr() == (
        attention.v_proj.weight.untyped_storage().data_ptr()
    )
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name
