"""trl's `SFTTrainer` on drawn weights and ready tokens, with the switches of one attempt."""

from __future__ import annotations

import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from _throughput_clock import Clock
from _throughput_contestants import Switches
from _throughput_jobs import (
    LEARNING_RATES,
    LORA_ALPHA,
    LORA_RANK,
    MAX_GRAD_NORM,
    NUM_WARM_UP,
    SEED,
    Job,
    make_pairs,
)
from _throughput_model import cast_adapters, draw_base


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def make_arguments(
    job: Job, switches: Switches, *, device: str, num_steps: int, folder: str
) -> dict[str, Any]:
    """Settings common to all variants: learning rate, order, steps and log; nothing is saved."""
    wanted: dict[str, Any] = {
        "output_dir": folder,
        "bf16": True,
        "use_cpu": device == "cpu",
        "max_length": job.seq_len,
        "per_device_train_batch_size": switches.micro_batch,
        "gradient_accumulation_steps": job.num_rows // switches.micro_batch,
        "max_steps": NUM_WARM_UP + num_steps,
        "learning_rate": LEARNING_RATES[job.method],
        "lr_scheduler_type": "constant",
        "max_grad_norm": MAX_GRAD_NORM,
        "seed": SEED,
        "train_sampling_strategy": "group_by_length" if switches.grouped else "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    # What equals trl's default is not set, so that its default stays its own.
    if not switches.checkpointing:
        wanted["gradient_checkpointing"] = False
    if switches.liger:
        wanted["use_liger_kernel"] = True
    if switches.compile:
        wanted["torch_compile"] = True
    if switches.precompute:
        wanted["precompute_ref_log_probs"] = True
    if switches.packing:
        wanted |= {"packing": True, "packing_strategy": "bfd"}
    return wanted


def run_trl(
    job: Job,
    switches: Switches,
    *,
    rows: list[list[int]],
    folder: Path,
    device: str,
    num_steps: int,
) -> dict[str, Any]:
    from transformers import AutoTokenizer
    from trl import DPOConfig, SFTConfig

    model = draw_base(job, folder, device=device, attention=switches.attention)
    adapters = lora_config() if job.has_adapters else None
    if adapters is not None and switches.bf16_adapters:
        from peft import get_peft_model

        model = cast_adapters(get_peft_model(model, adapters, autocast_adapter_dtype=False))
        adapters = None
    with tempfile.TemporaryDirectory() as scratch:
        wanted = make_arguments(job, switches, device=device, num_steps=num_steps, folder=scratch)
        return train_and_time(
            DPOConfig(**wanted) if job.objective == "dpo" else SFTConfig(**wanted),
            model=model,
            peft_config=adapters,
            tokenizer=AutoTokenizer.from_pretrained(folder),
            data=make_data(job, rows),
            clock=Clock(device=device, num_warm_up=NUM_WARM_UP, num_steps=num_steps),
        )


def make_data(job: Job, rows: list[list[int]]) -> Any:
    from datasets import Dataset

    if job.objective == "dpo":
        return Dataset.from_list(make_pairs(rows))
    return Dataset.from_dict({"input_ids": rows})


def train_and_time(
    arguments: Any, *, model: Any, peft_config: Any, tokenizer: Any, data: Any, clock: Clock
) -> dict[str, Any]:
    """One `train()`, watched by a callback and a count of the tokens that carry loss."""
    from transformers import TrainerCallback
    from trl import DPOTrainer, SFTTrainer

    counts: list[Any] = []
    is_dpo = "chosen" in data.column_names
    trainer_class: Any = DPOTrainer if is_dpo else SFTTrainer

    class Counting(trainer_class):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            learnt = inputs["completion_mask"] if is_dpo else inputs["labels"][:, 1:] != -100
            counts.append(learnt.sum())  # read at the end: no wait here
            return super().training_step(model, inputs, *more, **named)

    class Ticking(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

        def on_log(self, *_: Any, **named: Any) -> None:
            if "loss" in named["logs"]:
                clock.losses.append(float(named["logs"]["loss"]))

    if is_dpo:
        templates = files("tightfit.catalogue") / "templates"
        tokenizer.chat_template = (templates / "plain.jinja").read_text()
    trainer = Counting(
        model=model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[Ticking()],
    )
    clock.start()
    trainer.train()
    accumulation = arguments.gradient_accumulation_steps
    batches = [int(count) for count in counts]
    steps = range(0, len(batches), accumulation)
    return clock.report([sum(batches[start : start + accumulation]) for start in steps])
