"""Unsloth's `FastLanguageModel` under trl's trainer, which it patches: it alone reads files.

Unsloth prepares a model only as it loads it, so the drawn weights go through a folder first.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from _throughput_clock import Clock
from _throughput_contestants import Switches
from _throughput_jobs import LORA_ALPHA, LORA_RANK, NUM_WARM_UP, SEED, Job

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def run_unsloth(
    job: Job,
    switches: Switches,
    *,
    rows: list[list[int]],
    folder: Path,
    device: str,
    num_steps: int,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        os.environ["UNSLOTH_COMPILE_LOCATION"] = str(scratch / "compiled")
        os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"  # it would ask the network
        os.environ["UNSLOTH_DISABLE_CPU_FALLBACK"] = "1"  # no silent run without the card
        fast_model = import_module("unsloth").FastLanguageModel  # before trl, which it patches
        from trl import SFTConfig

        from _throughput_trl import make_arguments, make_data, train_and_time

        written = scratch / "weights"
        _write_weights(job, folder, written, device)
        model, tokenizer = _load(fast_model, job, switches, written)
        shutil.rmtree(written)
        arguments = make_arguments(
            job, switches, device=device, num_steps=num_steps, folder=str(scratch / "out")
        )
        return train_and_time(
            SFTConfig(**arguments),
            model=model,
            peft_config=None,
            tokenizer=tokenizer,
            data=make_data(job, rows),
            clock=Clock(device=device, num_warm_up=NUM_WARM_UP, num_steps=num_steps),
        )


def _write_weights(job: Job, folder: Path, written: Path, device: str) -> None:
    """In bf16 for every method; Unsloth quantizes as it loads."""
    import torch

    from _throughput_model import draw_base

    method = "full" if job.method == "full" else "lora"
    model = draw_base(replace(job, method=method), folder, device=device, attention="sdpa")
    model.save_pretrained(written)
    for path in folder.glob("tokenizer*"):
        shutil.copy(path, written)
    del model
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _load(fast_model: Any, job: Job, switches: Switches, written: Path) -> tuple[Any, Any]:
    import torch

    checkpointing = "unsloth" if switches.checkpointing else False
    model, tokenizer = fast_model.from_pretrained(
        model_name=str(written),
        max_seq_length=job.seq_len,
        dtype=torch.bfloat16,
        load_in_4bit=job.method == "qlora",
        full_finetuning=job.method == "full",
        use_gradient_checkpointing=checkpointing,
    )
    if job.has_adapters:
        model = fast_model.get_peft_model(
            model,
            r=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0,
            bias="none",
            target_modules=list(LINEARS),
            use_gradient_checkpointing=checkpointing,
            random_state=SEED,
        )
    return model, tokenizer
