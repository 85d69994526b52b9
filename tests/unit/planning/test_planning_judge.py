"""Rules first, numbers still there: the known verdicts of the field."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.strategy import Strategy
from tightfit.estimation.result import Estimate, Verdict
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.models.resolve import resolve_model
from tightfit.planning.filter import judge_strategy


def _judge(model: str, gpu: str, **fields: Any) -> Estimate:
    defaults: dict[str, Any] = {"seq_len": 1024, "attention": "eager", "adapter_dtype": "fp32"}
    return judge_strategy(
        spec=resolve_model(model),
        strategy=Strategy(**(defaults | fields)),
        node=Node(gpu=find_gpu(gpu), num_gpus=4),
    )


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_full_tuning_of_4bit_weights_is_illegal_but_measured(compute: str) -> None:
    found = _judge("Llama-2-7b", "V100-32GB", method="full", weights="nf4", compute=compute)
    assert found.verdict is Verdict.ILLEGAL
    assert "nf4 weights take no gradient" in found.reason
    assert found.gpu.peak_reserved_bytes > 0


def test_every_reason_is_told() -> None:
    found = _judge("Llama-2-7b", "T4", method="full", weights="int8", compute="bf16")
    assert "bf16 needs" in found.reason
    assert "take no gradient" in found.reason


def test_legal_job_keeps_the_estimate() -> None:
    found = _judge(
        "Llama-2-7b", "V100-32GB", method="lora", weights="nf4", compute="fp16", lora_rank=8
    )
    assert found.verdict is Verdict.FITS
    assert any("CUDA 12.6" in line for line in found.assumptions)
