"""Padding on the right without a mask: loss and gradients are those with one, family by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_stores import make_store
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.core.settings import Loss
from tightfit.data.token_store import EncodedRow
from tightfit.runtime.attention import REPEAT, needs_padding_mask, register_attention
from tightfit.training.batches import choose_collate, collate_padded
from tightfit.training.model import Objective
from tiny_configs import TINY, VOCAB, tiny_config

FAMILIES: dict[str, dict[str, Any]] = {
    name: tiny_config(name) for name in TINY if name not in ("t5", "mt5")
} | {
    "falcon with alibi": tiny_config("falcon")
    | {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4},
    "llama, eager": tiny_config("llama") | {"attn_implementation": "eager"},
    "llama, repeated keys": tiny_config("llama") | {"attn_implementation": REPEAT},
}
BOTH_WAYS: dict[str, dict[str, Any]] = {
    "bert": TINY["llama"] | {"model_type": "bert"},
    "gemma3 both ways": tiny_config("gemma3_text") | {"use_bidirectional_attention": True},
    "llama both ways": tiny_config("llama") | {"is_causal": False},
}


def make_model(settings: dict[str, Any]) -> Any:
    register_attention()
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(AutoConfig.for_model(**settings)).float().eval()


def make_batch(*, has_mask: bool) -> dict[str, Tensor]:
    """Rows of 12, 9 and 5 tokens; the first of each are a prompt."""
    draw = np.random.default_rng(0)
    rows = [
        [EncodedRow(draw.integers(3, VOCAB, size, dtype=np.int32), np.arange(size) >= 2, "")]
        for size in (12, 9, 5)
    ]
    return collate_padded(rows, pad_token_id=0, has_mask=has_mask)


def learn(model: Any, *, has_mask: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = Objective(model, Loss.PLAIN)(**make_batch(has_mask=has_mask))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def find_difference(model: Any) -> float:
    """Largest over loss and gradients, each beside the largest value of its kind."""
    (loss, gradients), (bare_loss, bare) = (learn(model, has_mask=has) for has in (True, False))
    assert gradients.keys() == bare.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    apart = max(float((gradients[name] - bare[name]).abs().max()) for name in bare)
    return max(apart / largest, float((loss - bare_loss).abs() / loss))


# gpt_bigcode's file scripts two functions when it is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_mask_changes_neither_loss_nor_gradients(name: str) -> None:
    model = make_model(FAMILIES[name])

    assert not needs_padding_mask(model.config)
    assert find_difference(model) < 1e-6


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_models_that_look_ahead_keep_their_mask(name: str) -> None:
    """And need it: what was shown above for others is not so for them."""
    model = make_model(BOTH_WAYS[name])

    assert needs_padding_mask(model.config)
    assert find_difference(model) > 1e-5


def test_an_encoder_decoder_keeps_its_mask() -> None:
    assert needs_padding_mask(AutoConfig.for_model("t5"))


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_mask_comes_where_it_is_asked_for(tmp_path: Path, has_mask: bool) -> None:
    store = make_store(tmp_path, [(range(3, 8), [True] * 5), (range(3, 6), [True] * 3)])
    collate = choose_collate(store.description, is_packed=False, has_mask=has_mask)
    batch = collate([[store.row(0)], [store.row(1)]])

    assert ("attention_mask" in batch) is has_mask
    if has_mask:
        assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
