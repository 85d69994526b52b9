"""torchtune's own model, LoRA, loss, compilation and mask, in the loop of `_throughput_torch`."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from _throughput_clock import Clock
from _throughput_contestants import Switches
from _throughput_jobs import LORA_ALPHA, LORA_RANK, NUM_WARM_UP, Job
from _throughput_model import draw_base
from _throughput_torch import UNTRAINED, Batch, make_batches, train

ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]


def run_torchtune(
    job: Job,
    switches: Switches,
    *,
    rows: list[list[int]],
    folder: Path,
    device: str,
    num_steps: int,
) -> dict[str, Any]:
    model = _build(job, folder, device)
    training = import_module("torchtune.training")
    if switches.checkpointing:
        layer = import_module("torchtune.modules").TransformerSelfAttentionLayer
        training.set_activation_checkpointing(model, auto_wrap_policy={layer})
    training.compile_model(model, verbose=False)
    return train(
        job,
        switches,
        batches=list(make_batches(rows, job, switches)),
        parameters=model.parameters(),
        measure_loss=TorchtuneLoss(model),
        clock=Clock(device=device, num_warm_up=NUM_WARM_UP, num_steps=num_steps),
    )


def _build(job: Job, folder: Path, device: str) -> Any:
    """The same random weights as every framework, in torchtune's layout."""
    import torch

    config = json.loads((folder / "config.json").read_text())
    drawn = draw_base(replace(job, method="full"), folder, device=device, attention="sdpa")
    convert = import_module("torchtune.models.convert_weights").hf_to_tune
    heads = config["num_attention_heads"], config.get("num_key_value_heads")
    values = convert(drawn.state_dict(), heads[0], heads[1] or heads[0], config["hidden_size"])
    del drawn
    precision = import_module("torchtune.training").set_default_dtype
    with precision(torch.bfloat16), torch.device(device):
        model = _make_model(job, config)
    if config["tie_word_embeddings"]:
        values.pop("output.weight", None)
    unread = model.load_state_dict(values, strict=False).unexpected_keys
    if unread:
        raise ValueError(f"torchtune's model has no place for {unread[:3]}")
    if job.has_adapters:
        peft = import_module("torchtune.modules.peft")
        peft.set_trainable_params(model, peft.get_adapter_params(model))
    return model.train()


def _make_model(job: Job, config: dict[str, Any]) -> Any:
    """Llama 3's builder fits Llama 2 as well, given its rotary base; 3.2 has scaled frequencies."""
    shape = {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "rope_base": config["rope_theta"],
    }
    adapters: dict[str, Any] = {}
    if job.has_adapters:
        adapters = {
            "lora_attn_modules": ATTENTION,
            "apply_lora_to_mlp": True,
            "lora_rank": LORA_RANK,
            "lora_alpha": LORA_ALPHA,
        }
    family = "llama3_2" if config["tie_word_embeddings"] else "llama3"
    name = f"lora_{family}" if job.has_adapters else family
    builders = import_module(f"torchtune.models.{family}._component_builders")
    return getattr(builders, name)(**shape, **adapters)


class TorchtuneLoss:
    """`CEWithChunkedOutputLoss` as the recipes use it, as a sum."""

    def __init__(self, model: Any) -> None:
        training = import_module("torchtune.training")
        loss = import_module("torchtune.modules.loss").CEWithChunkedOutputLoss()
        model.set_num_output_chunks(loss.num_output_chunks)
        self._model = model
        self._loss = training.compile_loss(loss, verbose=False)

    def __call__(self, batch: Batch) -> Any:
        labels = batch["labels"]
        more = {}
        if "position_ids" in batch:
            positions = batch["position_ids"]
            more = {"input_pos": positions, "mask": _mask(positions)}
        mean = self._loss(self._model(batch["input_ids"], **more), labels)
        return mean * (labels != UNTRAINED).sum()


def _mask(positions: Any) -> Any:
    """Documents are what lies between two places where positions restart."""
    import torch

    make = import_module("torchtune.modules.attention_utils").packed_block_causal_mask
    ends = torch.tensor([positions.shape[1]], device=positions.device)
    starts = [(row == 0).nonzero().flatten() for row in positions]
    return make([torch.cat((begin, ends)).diff() for begin in starts])
