"""Our FLOP counts against torch's own counter running real transformers models on the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy
from tightfit.estimation.flops import (
    count_forward_only_passes,
    estimate_adapter_flops,
    estimate_forward_flops,
    estimate_step_flops,
)
from tightfit.models.config import read_config
from tightfit.models.spec import ModelSpec

torch = pytest.importorskip("torch", reason="un-skip with: pip install 'tightfit[train]'")
transformers = pytest.importorskip("transformers", reason="un-skip: pip install 'tightfit[train]'")

# Warnings of the libraries under comparison are not ours to fix.
pytestmark = pytest.mark.filterwarnings("default")

BATCH, LENGTH = 2, 48
LLAMA_LIKE = {
    **{"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "vocab_size": 512},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA_LIKE, "tie_word_embeddings": False},
    "mistral": {**LLAMA_LIKE, "sliding_window": None},
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "head_dim": 32},
    "gemma2": {**LLAMA_LIKE, "query_pre_attn_scalar": 16, "sliding_window": 4096},
    "phi3": {**LLAMA_LIKE, "pad_token_id": 0},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 8, "vocab_size": 512, "n_positions": 64},
    "gpt_neox": {
        **{"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3},
        **{"num_attention_heads": 8, "vocab_size": 512},
    },
    "bloom": {"hidden_size": 128, "n_layer": 3, "n_head": 8, "vocab_size": 512},
    "falcon": {
        **{"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8},
        **{"vocab_size": 512, "multi_query": True, "bias": False},
    },
    "phi": {
        **{"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3},
        **{"num_attention_heads": 8, "vocab_size": 512},
    },
    "mixtral": {**LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **LLAMA_LIKE,
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    },
    "t5": {
        **{"d_model": 128, "d_ff": 256, "d_kv": 16, "num_heads": 8, "num_layers": 3},
        **{"vocab_size": 512, "decoder_start_token_id": 0},
    },
}
TOLERANCE = 0.01
"""Rotary angles are a product too, and the counter counts it."""


def build(model_type: str) -> tuple[Any, ModelSpec]:
    fields = CONFIGS[model_type]
    config = transformers.AutoConfig.for_model(model_type, **fields, use_cache=False)
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    # The counter does not know grouped matmuls, so experts run one by one.
    model = auto.from_config(config, attn_implementation="eager", experts_implementation="eager")
    spec = read_config({"model_type": model_type, **fields}, name=model_type, source="test")
    return model, spec


def draw_batch() -> dict[str, Any]:
    ids = torch.randint(1, 500, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids}


def count(model: Any, *, backward: bool) -> float:
    counter_class = importlib.import_module("torch.utils.flop_counter").FlopCounterMode
    with counter_class(display=False) as counter:
        loss = model(**draw_batch()).loss
        if backward:
            loss.backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_forward_flops_equal_torchs_count(model_type: str) -> None:
    model, spec = build(model_type)
    ours = estimate_forward_flops(
        spec, num_sequences=BATCH, seq_len=LENGTH, skip_masked=False
    ).total

    assert ours == pytest.approx(count(model, backward=False), rel=TOLERANCE)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "falcon", "t5"])
def test_full_tuning_costs_three_forward_passes(model_type: str) -> None:
    model, spec = build(model_type)
    forward = estimate_forward_flops(spec, num_sequences=BATCH, seq_len=LENGTH, skip_masked=False)

    assert 3 * forward.total == pytest.approx(count(model, backward=True), rel=TOLERANCE)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_step_flops_equal_torchs_count(checkpointing: bool) -> None:
    peft = pytest.importorskip("peft", reason="un-skip with: pip install 'tightfit[train]'")
    model, spec = build("llama")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    tuned.enable_input_require_grads()
    if checkpointing:
        tuned.gradient_checkpointing_enable({"use_reentrant": False})
    tuned.train()
    strategy = Strategy(
        method=Method.LORA, micro_batch=BATCH, seq_len=LENGTH, checkpointing=checkpointing
    )

    # The model under test computes masked pairs too, at three times the forward cost.
    counted = estimate_forward_flops(spec, num_sequences=BATCH, seq_len=LENGTH)
    square = estimate_forward_flops(spec, num_sequences=BATCH, seq_len=LENGTH, skip_masked=False)
    masked = (square.attention - counted.attention) * (4 if checkpointing else 3)
    step = estimate_step_flops(spec, strategy)
    ours = step.model + step.recomputed + masked

    assert estimate_adapter_flops(spec, strategy, tokens=BATCH * LENGTH) > 0
    assert ours == pytest.approx(count(tuned, backward=True), rel=TOLERANCE)


@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_preferences_cost_the_passes_that_they_make(objective: str) -> None:
    """The reference with its adapters off, KTO's divergence, logits computed once more."""
    peft = pytest.importorskip("peft", reason="un-skip with: pip install 'tightfit[train]'")
    from torch.utils.flop_counter import FlopCounterMode

    from tightfit.core.strategy import Training
    from tightfit.training.preference import build_objective
    from tightfit.training.step import measure_kl, with_kl
    from tightfit.training.tracing.job import TraceJob
    from tightfit.training.tracing.trace import make_real_batch

    model, spec = build("llama")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    tuned.enable_input_require_grads()
    tuned.train()
    strategy = Strategy(
        objective=objective, micro_batch=BATCH, seq_len=LENGTH, checkpointing=False, loss="fused"
    )
    training = Training(model_path=".", learning_rate=1e-4)
    module = build_objective(tuned, strategy, training)
    job = TraceJob(config={}, strategy=strategy, compute_capability=None)
    batch = make_real_batch(job, model.config)
    holder: Any = type("Holder", (), {"module": module})
    counter = FlopCounterMode(display=False)
    with counter:
        if strategy.objective.record.needs_kl:
            with torch.no_grad():
                batch = with_kl(batch, measure_kl(holder, [batch], num_examples=BATCH))
        module(**batch).backward()

    # Masked pairs are computed too, in forward-only passes as well; a row's first token is not
    # predicted.
    sequences = BATCH * strategy.objective.record.num_sequences
    passes = 3 + sum(count_forward_only_passes(strategy))
    counted, square = (
        estimate_forward_flops(spec, num_sequences=sequences, seq_len=LENGTH, skip_masked=skips)
        for skips in (True, False)
    )
    step = estimate_step_flops(spec, strategy)
    trained = int((batch["labels"][:, 1:] != -100).sum())
    unread = counted.head * (1 - trained / (sequences * LENGTH))
    ours = step.model + step.recomputed + passes * (square.attention - counted.attention - unread)
    assert ours == pytest.approx(counter.get_total_flops(), rel=TOLERANCE)
