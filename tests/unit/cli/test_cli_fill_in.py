"""What `estimate` chooses where the user said nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.api.estimate import choose_strategy
from tightfit.api.options.training import EstimateOptions
from tightfit.core.errors import UsageError
from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model


def choose(on: str, model: str = "Llama-2-7b", **stated: object) -> Strategy:
    flags = replace(EstimateOptions(), **stated)  # type: ignore[arg-type]
    group = resolve_hardware(on).groups[0]
    return choose_strategy(flags, spec=resolve_model(model), group=group)


@pytest.mark.parametrize(
    ("on", "method", "dtypes"),
    [
        ("A100-40GB", "full", ("bf16", "bf16")),
        ("A100-40GB", "lora", ("bf16", "bf16", "bf16")),
        ("A100-40GB", "qlora", ("nf4", "bf16", "bf16")),
        ("V100-32GB", "full", ("fp32", "fp16")),
        ("V100-32GB", "lora", ("fp16", "fp16", "fp32")),
        ("T4", "qlora", ("nf4", "fp16", "fp32")),
        ("T4", "load", ("fp16", "fp16")),
    ],
)
def test_number_formats_follow_the_card(on: str, method: str, dtypes: tuple[str, ...]) -> None:
    strategy = choose(on, method=method)
    found = (strategy.weights.value, strategy.compute.value, strategy.adapter_dtype.value)
    assert found[: len(dtypes)] == dtypes


@pytest.mark.parametrize(
    ("on", "weights", "compute"),
    [
        ("A100-40GB", "fp32", "fp32"),
        ("A100-40GB", "fp16", "fp16"),
        ("A100-40GB", "int8", "bf16"),
        ("T4", "nf4", "fp16"),
    ],
)
def test_arithmetic_follows_stated_weights(on: str, weights: str, compute: str) -> None:
    assert choose(on, weights=weights).compute.value == compute


def test_a_model_that_overflows_in_fp16_is_computed_in_fp32_on_old_cards() -> None:
    assert choose("V100-32GB", "gemma-3-4b-it").compute.value == "fp32"
    assert choose("A100-40GB", "gemma-3-4b-it").compute.value == "bf16"


def test_stated_formats_win() -> None:
    strategy = choose("A100-40GB", weights="fp32", compute="bf16", adapter_dtype="fp32")
    assert (strategy.weights.value, strategy.compute.value) == ("fp32", "bf16")
    assert strategy.adapter_dtype.value == "fp32"


def test_qlora_is_lora_over_nf4() -> None:
    assert choose("T4", method="qlora") == choose("T4", method="lora", weights="nf4")
    assert choose("T4", method="qlora").method is Method.LORA


def test_sharding_follows_the_number_of_gpus() -> None:
    assert choose("T4").sharding is Sharding.SINGLE
    many = choose("2n x 4xA100-40GB")
    assert (many.sharding, many.num_nodes, many.gpus_per_node) == (Sharding.FSDP, 2, 4)
    one = choose("4xA100-40GB", sharding="single")
    assert one.world_size == 1


def test_everything_stated_arrives() -> None:
    strategy = choose(
        "4xA100-40GB",
        optimizer="adafactor",
        lora_rank=64,
        lora_targets="q_proj, v_proj",
        micro_batch=3,
        seq_len=77,
        grad_accum=5,
        checkpointing=False,
        attention="eager",
        loss="chunked",
        fused_kernels=True,
        fused_lora=True,
        dequantized_base=True,
        sharding="zero2",
        offload="optimizer",
        double_quant=False,
        train_embeddings=True,
        settings=["packing=yes", "compile=true"],
    )
    expected = {
        "optimizer": "adafactor",
        "lora_rank": 64,
        "lora_targets": ["q_proj", "v_proj"],
        "micro_batch": 3,
        "seq_len": 77,
        "grad_accum": 5,
        "checkpointing": False,
        "attention": "eager",
        "loss": "chunked",
        "fused_kernels": True,
        "fused_lora": True,
        "dequantized_base": True,
        "sharding": "zero2",
        "offload": "optimizer",
        "double_quant": False,
        "train_embeddings": True,
        "packing": True,
        "compile": True,
    }
    assert strategy.model_dump(mode="json").items() >= expected.items()


@pytest.mark.parametrize(
    ("method", "settings", "is_folded"),
    [
        ("lora", ["fp8=true"], True),
        ("lora", ["fp8=true", "fused_lora=false"], False),
        ("lora", ["fp8=false"], False),
        ("full", ["fp8=true"], False),
        ("qlora", ["fp8=true"], True),
    ],
)
def test_fp8_folds_the_adapters_it_needs_folded(
    method: str, settings: list[str], is_folded: bool
) -> None:
    assert choose("H100-SXM", method=method, settings=settings).fused_lora is is_folded


@pytest.mark.parametrize(
    ("method", "settings", "is_unpacked"),
    [
        ("qlora", ["fp8=true"], True),
        ("qlora", ["fp8=true", "dequantized_base=false"], False),
        ("qlora", ["fp8=false"], False),
        ("lora", ["fp8=true"], False),
        ("lora", ["fp8=true", "weights=nf4"], True),
    ],
)
def test_fp8_unpacks_the_base_it_needs_unpacked(
    method: str, settings: list[str], is_unpacked: bool
) -> None:
    assert choose("H100-SXM", method=method, settings=settings).dequantized_base is is_unpacked


def test_qlora_refuses_other_weights() -> None:
    with pytest.raises(UsageError, match="nf4"):
        choose("T4", method="qlora", weights="int8")
