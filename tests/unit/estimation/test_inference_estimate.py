"""Memory and speed of answering, against transformers' own tensors and published speeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy
from tightfit.estimation.inference import InferenceJob, estimate_inference, kv_row_bytes
from tightfit.estimation.job import kv_cache_bytes
from tightfit.estimation.weights import estimate_weight_bytes
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.config import read_config
from tightfit.models.resolve import resolve_model

H100 = resolve_hardware("H100-SXM").groups[0].node.gpu
LLAMA = resolve_model("Llama-2-7b")
JOB = InferenceJob(
    weight_bytes=estimate_weight_bytes(LLAMA, Strategy(weights=Dtype.BF16)).total,
    compute=Dtype.BF16,
    num_slots=1,
    num_columns=2048,
    prompt_tokens=128,
    new_tokens=512,
    pass_tokens=128,
)


def test_the_cache_is_as_large_as_the_one_that_transformers_builds() -> None:
    torch = pytest.importorskip("torch", reason="pip install 'tightfit[train]'")
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        cache = model(torch.zeros((1, 11), dtype=torch.long), use_cache=True).past_key_values
    held = sum(
        part.numel() * part.element_size()
        for layer in cache.layers
        for part in (layer.keys, layer.values)
    )

    spec = read_config(config.to_dict(), name="tiny", source="test")
    assert kv_row_bytes(spec, 11) == held


def test_llama_2_7b_keeps_half_a_mebibyte_for_each_token() -> None:
    """2 x 32 layers x 4096 x 2 bytes, the figure of the vLLM paper's kind (arXiv:2309.06180)."""
    assert kv_row_bytes(LLAMA, 1) == 524_288
    strategy = Strategy(seq_len=100, micro_batch=3)
    assert kv_cache_bytes(LLAMA, strategy) == 300 * 524_288


def test_one_answer_at_a_time_is_bound_by_reading_the_weights() -> None:
    """gpt-fast's README has 104.9 tokens/s for Llama-2-7B in bf16 on one A100 80 GB, at 1.4e12
    bytes/s; 13.2e9 bytes at 85% of the card's 2.0e12 give 130."""
    a100 = resolve_hardware("A100-80GB").groups[0].node.gpu

    found = estimate_inference(LLAMA, JOB, a100)

    assert found.bound == "memory bandwidth"
    assert found.new_tokens_per_second == pytest.approx(104.9, rel=0.3)


def test_many_answers_share_the_reading_until_arithmetic_binds() -> None:
    one, many, most = (
        estimate_inference(LLAMA, replace(JOB, num_slots=n, num_columns=640), H100)
        for n in (1, 32, 1024)
    )
    assert 15 < many.new_tokens_per_second / one.new_tokens_per_second <= 32
    assert one.bound == many.bound == "memory bandwidth"
    assert most.new_tokens_per_second > many.new_tokens_per_second
    small = replace(JOB, num_slots=4096, prompt_tokens=1, new_tokens=8, num_columns=9)
    assert estimate_inference(LLAMA, small, H100).bound == "compute"


def test_starting_kernels_from_python_bounds_a_fast_card() -> None:
    found = estimate_inference(LLAMA, replace(JOB, drives_from_python=True), H100)
    assert found.bound == "host"
    # PyTorch's "Accelerating Generative AI II" begins at 25.5 with eager Python on an A100.
    assert 20 < found.new_tokens_per_second < 60


def test_parts_sum_up_and_grow_with_what_they_stand_for() -> None:
    base = estimate_inference(LLAMA, JOB, H100)
    assert base.peak_bytes == sum(base.components.values())
    assert base.components["weights"] == 2 * LLAMA.num_params
    assert base.components["kv_cache"] == 2048 * 524_288
    packed = replace(JOB, weight_bytes=4 * 10**9, is_quantized=True)
    assert estimate_inference(LLAMA, packed, H100).components["dequantized"] == 2 * 4096 * 11008
    joined = estimate_inference(LLAMA, replace(JOB, joining_tokens=128), H100)
    assert joined.components["kv_cache"] == (2048 + 128) * 524_288
    shared = resolve_model("Llama-3.1-8B")
    wide = estimate_inference(shared, replace(JOB, expands_heads=True), H100)
    assert wide.components["repeated_heads"] == 2048 * 2 * 32 * 128 * 2
