"""Recomputed layers: exactly those the plan names, with the same losses and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shard_cases import Trainer, lone_place, make_model, make_plan, make_store
from tightfit.runtime.layers import decoder_layers
from tightfit.training.recompute import recompute_layers

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16},
    "phi": {},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "falcon": {},
    "bloom": {},
    "t5": {"num_decoder_layers": 3, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0},
}
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _build(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(family, **(_SIZES | FAMILIES[family]))
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    return auto.from_config(config, dtype=torch.float32).train()


def _gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)  # several families have dropout, which must be drawn alike again
    ids = torch.arange(3, 19).reshape(2, 8)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    made = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), made


def _count_calls(layers: list[nn.Module]) -> list[int]:
    """How often the first module with weights of its own runs in each layer."""
    calls = [0] * len(layers)
    for index, layer in enumerate(layers):

        def count(*_: Any, index: int = index) -> None:
            calls[index] += 1

        leaves = (part for part in layer.modules() if not list(part.children()))
        next(leaf for leaf in leaves if list(leaf.parameters())).register_forward_pre_hook(count)
    return calls


@pytest.mark.parametrize(
    ("family", "is_offloaded"),
    [*((family, False) for family in FAMILIES), ("gpt2", True), ("opt", True), ("t5", True)],
)
def test_every_family_recomputes_the_same_numbers(family: str, is_offloaded: bool) -> None:
    model = _build(family)
    layers = decoder_layers(model)
    assert len(layers) == (6 if family == "t5" else 3)
    loss, gradients = _gradients(model)

    calls = _count_calls(layers)
    if is_offloaded:
        recompute_layers(layers[:2], num_offloaded=1, num_tokens=16)
    else:
        recompute_layers(layers[:2])
    again_loss, again = _gradients(model)

    assert calls == [2, 2, *[1] * (len(layers) - 2)]
    assert again_loss == loss
    assert again.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name], gradient, msg=name)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"checkpointing": False}, [1, 1, 1, 1]),
        ({"checkpointing": True}, [2, 2, 2, 2]),
        ({"checkpointing": True, "recomputed_layers": 3}, [2, 2, 2, 1]),
        ({"checkpointing": True, "offloaded_inputs": 3}, [2, 2, 2, 2]),
        ({"checkpointing": True, "recomputed_layers": 1}, [2, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_plan_names_how_many(
    tmp_path: Path, method: str, changes: dict[str, Any], expected: list[int]
) -> None:
    plan = make_plan(make_model(tmp_path / "model"), method=method, micro_batch=4, **changes)
    trainer = Trainer(plan, make_store(tmp_path / "store"), lone_place())
    calls = _count_calls(decoder_layers(trainer.engine.module))

    trainer.train(0, 1)

    assert calls == expected


def test_host_copies_serve_every_step_and_longer_rows() -> None:
    """Of one model, rows of two lengths twice over: the longer ones get larger buffers."""
    plain, offloaded = _build("llama"), _build("llama")
    recompute_layers(decoder_layers(offloaded), num_offloaded=2, num_tokens=8)
    for length in (8, 16, 8, 16):
        ids = torch.arange(3, 3 + length)[None]
        for model in (plain, offloaded):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (name, ours), theirs in zip(offloaded.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)

    offloaded(input_ids=ids, use_cache=False)
    with pytest.raises(RuntimeError, match="second forward pass"):
        offloaded(input_ids=ids, use_cache=False)


def test_evaluation_recomputes_nothing(tmp_path: Path) -> None:
    plan = make_plan(make_model(tmp_path / "model"), checkpointing=True)
    trainer = Trainer(plan, make_store(tmp_path / "store"), lone_place())
    calls = _count_calls(decoder_layers(trainer.engine.module))
    batches, _ = trainer.batches(0)

    with torch.no_grad():
        trainer.engine.module(**batches[0])

    assert calls == [1, 1, 1, 1]
