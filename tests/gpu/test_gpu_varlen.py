"""Packed rows on a GPU: varlen attention against SDPA's block mask, in loss and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.runtime.attention import VARLEN, register_attention, resolve_attention

SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 128},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 64,
    },
}
NUM_ROWS, NUM_TOKENS, NUM_DOCUMENTS = 3, 2048, 10


def make_batch() -> dict[str, torch.Tensor]:
    """Rows of ten documents each, cut at random."""
    torch.manual_seed(0)
    rows = []
    for _ in range(NUM_ROWS):
        cuts = torch.randperm(NUM_TOKENS - 1)[: NUM_DOCUMENTS - 1].add(1).sort().values.tolist()
        bounds = [0, *cuts, NUM_TOKENS]
        rows.append(torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)]))
    ids = torch.randint(3, 1024, (NUM_ROWS, NUM_TOKENS))
    positions = torch.stack(rows)
    labels = ids.clone()
    labels[positions == 0] = -100  # a document's first token follows nothing
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: tensor.cuda() for name, tensor in batch.items()}


def run_step(family: str, attention: str, dtype: torch.dtype) -> tuple[float, torch.Tensor]:
    """The loss and the gradients of one step."""
    fields = SMALL | FAMILIES[family]
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    if attention == VARLEN:
        attention = resolve_attention(config, VARLEN)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    # Drawn in fp32 and cast: another dtype would draw other weights.
    model = auto.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model = model.to("cuda", dtype).train()
    loss = model(**make_batch()).loss
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_learn_what_a_block_mask_teaches(family: str) -> None:
    register_attention()
    exact_loss, exact = run_step(family, "sdpa", torch.float32)
    _, masked = run_step(family, "sdpa", torch.bfloat16)
    loss, gradients = run_step(family, VARLEN, torch.bfloat16)

    error = float((gradients - exact).norm() / exact.norm())
    assert loss == pytest.approx(exact_loss, rel=2e-3)
    # As near to fp32 as the same precision gets with a mask: sums in another order differ a little.
    assert error < 1.5 * float((masked - exact).norm() / exact.norm())
    assert error < 0.05
