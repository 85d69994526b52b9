"""Disk space: checkpoints kept, the one being written, and the result."""

from __future__ import annotations

from tightfit.core.strategy import Strategy, Training
from tightfit.estimation.host_and_disk import estimate_disk_components
from tightfit.estimation.weights import adapter_params
from tightfit.models.resolve import resolve_model

LLAMA = resolve_model("Llama-3.2-1B")


def test_full_tuning_in_fp32_writes_twelve_bytes_a_value_per_checkpoint() -> None:
    strategy = Strategy(method="full", weights="fp32", compute="bf16")
    parts = estimate_disk_components(LLAMA, strategy, num_checkpoints=2)
    assert parts["checkpoints"] == 3 * 12 * LLAMA.num_params
    assert parts["result"] == 2 * LLAMA.num_params, "saved as wide as the base is stored"


def test_full_tuning_in_bf16() -> None:
    strategy = Strategy(method="full", weights="bf16", compute="bf16")
    parts = estimate_disk_components(LLAMA, strategy, num_checkpoints=1)
    assert parts["checkpoints"] == 2 * 6 * LLAMA.num_params
    assert parts["result"] == 2 * LLAMA.num_params


def test_adapters_are_saved_as_trained() -> None:
    for dtype, width in (("bf16", 2), ("fp32", 4)):
        strategy = Strategy(adapter_dtype=dtype)
        parts = estimate_disk_components(LLAMA, strategy, num_checkpoints=4)
        assert parts["result"] == width * adapter_params(LLAMA, strategy)
        assert parts["checkpoints"] == 5 * 3 * parts["result"]


def test_retrained_embeddings_are_part_of_both() -> None:
    plain = estimate_disk_components(LLAMA, Strategy())
    more = estimate_disk_components(LLAMA, Strategy(train_embeddings=True))
    table = 2 * (LLAMA.embedding_params + LLAMA.lm_head_params)
    assert more["result"] - plain["result"] == table
    assert more["checkpoints"] - plain["checkpoints"] == 3 * 3 * table


def test_the_default_is_the_trainings() -> None:
    training = Training(model_path="x", learning_rate=1e-4)
    stated = estimate_disk_components(LLAMA, Strategy(), num_checkpoints=training.keep_checkpoints)
    assert estimate_disk_components(LLAMA, Strategy()) == stated


def test_loading_writes_nothing() -> None:
    assert estimate_disk_components(LLAMA, Strategy(method="load")).keys() == {"base_model"}
