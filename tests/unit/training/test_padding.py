"""Padding on the right without a mask: loss and gradients are those with one, family by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_stores import make_store
from tiny_sizes import SIZES, VOCAB
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from tightfit.core.settings import Loss
from tightfit.data.token_store import EncodedRow
from tightfit.models.families.registry import FAMILIES as RECORDS
from tightfit.runtime.attention import REPEAT, needs_padding_mask, register_attention
from tightfit.training.batches import choose_collate, collate_padded
from tightfit.training.model import Objective

WINDOW = {"sliding_window": 4}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),
    "codegen": ("codegen", GPT | {"rotary_dim": 4}),
    "falcon": ("falcon", {"multi_query": True}),
    "falcon with alibi": ("falcon", {"alibi": True, "multi_query": False}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", WINDOW | {"attn_logit_softcapping": 2.0}),
    "gemma3_text": ("gemma3_text", WINDOW),
    "gpt2": ("gpt2", GPT),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_oss": ("gpt_oss", WINDOW | EXPERTS),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}),
    "granite": ("granite", {"logits_scaling": 4.0}),
    "granitemoe": ("granitemoe", EXPERTS),
    "llama": ("llama", {}),
    "llama, eager": ("llama", {"attn_implementation": "eager"}),
    "llama, repeated keys": ("llama", {"attn_implementation": REPEAT}),
    "mamba": ("mamba", {"state_size": 8}),
    "mistral": ("mistral", WINDOW),
    "mixtral": ("mixtral", EXPERTS),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("phi", {}),
    "phi3": ("phi3", WINDOW),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16}),
    "smollm3": ("smollm3", {}),
    "stablelm": ("stablelm", {}),
}
BOTH_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "gemma3 both ways": ("gemma3_text", WINDOW | {"use_bidirectional_attention": True}),
    "llama both ways": ("llama", {"is_causal": False}),
}
NEEDS_IMAGES = {"gemma3"}
"""Gemma 3 with its eyes: the decoder inside is `gemma3_text`."""


def make_model(family: tuple[str, dict[str, Any]]) -> Any:
    register_attention()
    torch.manual_seed(0)
    name, settings = family
    known = AutoConfig.for_model(name).to_dict()
    sizes = {field: size for field, size in SIZES.items() if field in known}
    config = AutoConfig.for_model(name, **(sizes | settings))
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config).float().eval()


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


def test_every_decoder_that_we_read_was_looked_at() -> None:
    known = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    seen = {name for name, _ in FAMILIES.values()}

    readable = {name for name, family in RECORDS.items() if family.read}
    assert (known & readable) - NEEDS_IMAGES <= seen
    assert len(seen) >= 25


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
