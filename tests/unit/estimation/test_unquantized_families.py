"""Families whose layers nf4 and int8 loading does not pack: weights stay as they are."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.strategy import Strategy
from tightfit.estimation.job import estimate_job
from tightfit.estimation.memory import estimate_moments, peak_moment
from tightfit.estimation.result import Estimate
from tightfit.estimation.weights import as_loaded
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model

FALCON = resolve_model("falcon-7b")


def estimate(weights: str, **fields: Any) -> Estimate:
    strategy = Strategy.model_validate({"weights": weights, **fields})
    return estimate_job(
        spec=FALCON, strategy=strategy, node=resolve_hardware("A100-80GB").groups[0].node
    )


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_memory_and_time_are_those_of_16_bit_weights(weights: str) -> None:
    packed, plain = estimate(weights), estimate("bf16")

    assert packed.gpu == plain.gpu
    assert packed.time == plain.time
    assert packed.phases == plain.phases
    said = set(packed.assumptions) - set(plain.assumptions)
    assert said == {f"transformers packs none of falcon's layers: {weights} weights stay bf16"}


def test_raised_ones_stay_in_fp32() -> None:
    raised = estimate("nf4", upcast_unquantized=True)
    assert raised.gpu.components["weights"] == 4 * FALCON.num_params


def test_others_and_gptq_files_are_packed() -> None:
    llama = resolve_model("Llama-2-7b")
    for spec, weights in ((llama, "nf4"), (llama, "int8"), (FALCON, "gptq4"), (FALCON, "bf16")):
        strategy = Strategy.model_validate({"weights": weights})
        assert as_loaded(spec, strategy) is strategy


def test_older_software_packed_them() -> None:
    old = Strategy.model_validate({"weights": "nf4", "quirks": {"packs_subclasses": True}})
    assert as_loaded(FALCON, old) is old


def test_a_traced_job_agrees() -> None:
    """fp16 weights instead of nf4, which the planner refuses, need 19.78 GiB by trace."""
    strategy = Strategy.model_validate(
        {
            "weights": "nf4", "compute": "fp16", "autocast": True, "adapter_dtype": "fp32",
            "lora_rank": 8, "recomputed_layers": 12, "repeat_keys": True, "loss": "chunked",
        }
    )  # fmt: skip
    peak = peak_moment(estimate_moments(FALCON, strategy))
    assert peak.allocated_bytes == pytest.approx(21_243_635_200, rel=0.015)


@pytest.mark.parametrize(
    ("family", "is_packed"),
    [("falcon", False), ("gpt_neox", True)],
)
def test_transformers_takes_linear_itself_and_no_subclass(family: str, is_packed: bool) -> None:
    torch = pytest.importorskip("torch", reason="pip install 'tightfit[train]'")
    pytest.importorskip("bitsandbytes", reason="pip install 'tightfit[bits]'")
    transformers: Any = pytest.importorskip("transformers", reason="pip install 'tightfit[train]'")
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        settings = transformers.BitsAndBytesConfig(load_in_4bit=True)
        replaced = replace_with_bnb_linear(
            model, modules_to_not_convert=["lm_head", "embed_out"], quantization_config=settings
        )
    kinds = {type(part).__name__ for part in replaced.modules()}
    assert ("Linear4bit" in kinds) is is_packed
