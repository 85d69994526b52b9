"""FLOP counts against the formulas that papers print."""

from __future__ import annotations

import pytest

from tightfit.core.attention import Attention
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy
from tightfit.estimation.flops import (
    count_pairs,
    estimate_adapter_flops,
    estimate_forward_flops,
    estimate_step_flops,
    skips_masked_pairs,
    sum_workload,
)
from tightfit.models.config import read_config
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec


def gpt3_like(*, hidden: int, layers: int, heads: int, vocab: int) -> ModelSpec:
    config = {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads}
    return read_config({**config, "vocab_size": vocab, "n_positions": 2048}, name="g", source="t")


@pytest.mark.parametrize(
    ("hidden", "layers", "heads"), [(1536, 16, 16), (12288, 96, 96), (25600, 128, 160)]
)
def test_checkpointed_step_equals_megatrons_formula(hidden: int, layers: int, heads: int) -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) of arXiv:2104.04473, for the sizes in its table 1."""
    batch, length, vocab = 8, 2048, 51200
    spec = gpt3_like(hidden=hidden, layers=layers, heads=heads, vocab=vocab)
    forward = estimate_forward_flops(spec, num_sequences=batch, seq_len=length, skip_masked=False)
    ours = 4 * (forward.linear + forward.attention) + 3 * forward.head

    bracket = 1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
    assert ours == pytest.approx(96 * batch * length * layers * hidden**2 * bracket)


@pytest.mark.parametrize("name", ["Llama-2-7b", "Llama-3.1-70B", "Qwen2.5-0.5B", "pythia-1.4b"])
def test_full_step_equals_palms_formula(name: str) -> None:
    """6N + 12LHQT per token of arXiv:2204.02311, N without the embedding lookup."""
    spec = resolve_model(name)
    length = 2048
    forward = estimate_forward_flops(spec, num_sequences=1, seq_len=length, skip_masked=False)
    looked_up = 0 if spec.tie_embeddings else spec.embedding_params
    matmul_params = spec.num_params - looked_up
    attention = 12 * spec.num_layers * spec.num_heads * spec.head_dim * length

    # N of the formula holds norms and biases too: a few in ten thousand.
    assert 3 * forward.total / length == pytest.approx(6 * matmul_params + attention, rel=2e-3)


def test_causal_mask_halves_the_square_and_a_window_cuts_it_further() -> None:
    assert count_pairs(4, causal=False) == 16
    assert count_pairs(4, causal=True) == 10
    # Rows see 1, 2, 2, 2 positions.
    assert count_pairs(4, causal=True, window=2) == 7
    assert count_pairs(4, causal=True, window=4) == count_pairs(4, causal=True)


def test_only_chosen_experts_count() -> None:
    spec = resolve_model("Mixtral-8x7B-v0.1")
    work = sum_workload(spec)

    # 12.9B active of 46.7B, as the model's authors state.
    assert work.weights_used + 2 * work.head_weights == pytest.approx(12.9e9, rel=0.01)
    assert work.weights_held > 3.5 * work.weights_used


def test_encoder_decoder_counts_both_sides() -> None:
    spec = resolve_model("t5-base")
    forward = estimate_forward_flops(spec, num_sequences=1, seq_len=512)
    encoder = sum(b.num_params for b in spec.blocks if b.kind == "encoder")
    decoder = sum(b.num_params for b in spec.blocks if b.kind == "decoder")

    assert forward.linear == pytest.approx(2 * 512 * (encoder + decoder), rel=0.01)


def test_lora_saves_the_weight_gradients_only() -> None:
    spec = resolve_model("Llama-2-7b")
    shape = {"micro_batch": 1, "seq_len": 2048, "checkpointing": False}
    full = estimate_step_flops(spec, Strategy(method=Method.FULL, **shape))
    lora = estimate_step_flops(spec, Strategy(method=Method.LORA, lora_rank=8, **shape))
    forward = estimate_forward_flops(spec, num_sequences=1, seq_len=2048)

    saved = forward.linear + forward.head
    adapters = 3 * estimate_adapter_flops(spec, Strategy(lora_rank=8, **shape), tokens=2048)
    assert full.model - lora.model == pytest.approx(saved - adapters)


def test_recomputation_is_executed_but_not_model_work() -> None:
    spec = resolve_model("Llama-3.2-1B")
    plain = estimate_step_flops(spec, Strategy(method=Method.FULL, checkpointing=False))
    repeated = estimate_step_flops(spec, Strategy(method=Method.FULL, checkpointing=True))

    assert repeated.model == plain.model
    assert plain.recomputed == 0
    assert repeated.recomputed > 0.2 * plain.model


def test_step_counts_every_rank_and_micro_batch() -> None:
    spec = resolve_model("Llama-3.2-1B")
    one = estimate_step_flops(spec, Strategy(method=Method.FULL))
    many = estimate_step_flops(
        spec, Strategy(method=Method.FULL, grad_accum=3, num_nodes=2, gpus_per_node=4)
    )

    assert many.model == pytest.approx(24 * one.model)


def test_loading_costs_one_forward_pass() -> None:
    spec = resolve_model("Llama-3.2-1B")
    step = estimate_step_flops(spec, Strategy(method=Method.LOAD, seq_len=128))

    assert step.recomputed == 0
    assert step.model == estimate_forward_flops(spec, num_sequences=1, seq_len=128).total


@pytest.mark.parametrize(
    ("attention", "window", "skips"),
    [
        (Attention.EAGER, None, False),
        (Attention.SDPA, None, True),
        (Attention.SDPA, 512, False),
        (Attention.SDPA, 4096, False),
        (Attention.SDPA, 8192, True),
        (Attention.FLASH, 512, True),
    ],
)
def test_kernels_that_skip_masked_pairs(
    attention: Attention, window: int | None, skips: bool
) -> None:
    assert skips_masked_pairs(attention, window=window, seq_len=4096) is skips


def test_equal_looking_specs_do_not_share_sums() -> None:
    small = gpt3_like(hidden=64, layers=1, heads=2, vocab=100)
    large = gpt3_like(hidden=64, layers=2, heads=2, vocab=100)

    assert sum_workload(large).weights_used == 2 * sum_workload(small).weights_used
