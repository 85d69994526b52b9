"""A model with drawn weights, the same for every peer: values from one seed, made on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _throughput_jobs import SEED, Job
from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy
from tightfit.runtime.load import load_base


def draw_base(job: Job, folder: Path, *, device: str, attention: str) -> Any:
    """bf16, or nf4 with double quantization and bf16 arithmetic. Nothing is read but the config."""
    import torch

    torch.manual_seed(SEED)
    weights = Dtype.NF4 if job.method == "qlora" else Dtype.BF16
    strategy = Strategy(weights=weights, compute=Dtype.BF16)
    model: Any = load_base(
        folder, strategy, torch.device(device), random_weights=True, attention=attention
    )
    if job.method == "qlora":
        from transformers.quantizers.auto import AutoHfQuantizer

        # Loading from files leaves it there; transformers' Trainer asks it whether it can train.
        model.hf_quantizer = AutoHfQuantizer.from_config(model.config.quantization_config)
    return model


def cast_adapters(model: Any) -> Any:
    """Trained values to bf16; peft leaves those of a quantized base in fp32."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model
