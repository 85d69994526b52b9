"""A plan as the configuration of another trainer: one function each, named by its record.

Each writes what decides memory, time and result, and leaves everything else to the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.objectives import Objective
from tightfit.core.settings import ALL_LINEAR, Loss, Method, Offload, Sharding
from tightfit.core.strategy import DEFAULT_ALPHA_PER_RANK, Strategy, default_learning_rate
from tightfit.core.trainers import find_trainer
from tightfit.planning.plan import Plan

_Keys = dict[str, Any]
_TORCH_NAMES = {Dtype.BF16: "bfloat16", Dtype.FP16: "float16", Dtype.FP32: "float32"}
_EMBEDDINGS = ["embed_tokens", "lm_head"]


def write_configs(plan: Plan, stem: str) -> dict[str, str]:
    """Files by name, the trainer's own first; none where its record names no function.

    `stem` is what the names begin with.
    """
    if not plan.strategy.trainer:
        return {}
    trainer = find_trainer(plan.strategy.trainer).trainer
    if not trainer.config:
        return {}
    module, _, function = trainer.config.partition(":")
    files: dict[str, str] = getattr(import_module(module), function)(plan, stem)
    return files


def write_trl(plan: Plan, stem: str) -> dict[str, str]:
    """For `trl sft --config`, or `trl dpo`; sharding is in the file for `--accelerate_config`."""
    s = plan.strategy
    is_sft = s.objective is Objective.SFT
    keys: _Keys = {
        "model_name_or_path": _name_model(plan),
        "dtype": _TORCH_NAMES[s.compute if s.weights.is_quantized else s.weights],
        **_mixed_precision(s),
        "attn_implementation": s.attention.record.implementation,
        **_batch(plan),
        "max_length": s.seq_len,
        **({"packing": s.packing} if is_sft else _describe_preference(plan)),
        "gradient_checkpointing": s.checkpointing,
        "optim": s.optimizer.record.transformers_name,
    }
    if s.fused_kernels:
        keys["use_liger_kernel"] = True
    if s.method is Method.LORA:
        keys |= {
            "use_peft": True,
            **_lora(plan, rank="lora_r"),
            "lora_target_modules": _targets(s),
            "use_dora": s.dora,
        }
        if s.train_embeddings:
            keys["lora_modules_to_save"] = _EMBEDDINGS
    if s.weights is Dtype.NF4:
        keys |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "use_bnb_nested_quant": s.double_quant,
        }
        if s.sharding.shards_weights:
            keys["bnb_4bit_quant_storage"] = _TORCH_NAMES[s.compute]
    keys |= {"load_in_8bit": True} if s.weights is Dtype.INT8 else {}
    main, accelerate = f"{stem}.trl.yaml", f"{stem}.accelerate.yaml"
    script = "dpo" if s.objective is Objective.IPO else s.objective.value
    command = f"trl {script} --config {main}"
    files = {}
    if s.sharding is not Sharding.SINGLE:
        command += f" --accelerate_config {accelerate}"
        files[accelerate] = _render(_describe_accelerate(s, has_inline_zero=True), plan)
    head = (command, "Say which data, here or behind the command: dataset_name: NAME")
    return {main: _render(keys, plan, *head), **files}


def _describe_preference(plan: Plan) -> _Keys:
    """As trl's DPOConfig and KTOConfig have it."""
    s, learning = plan.strategy, plan.training
    keys: _Keys = {"beta": s.objective.record.beta}
    if s.objective is not Objective.KTO:
        keys["loss_type"] = ["ipo" if s.objective is Objective.IPO else "sigmoid"]
    if learning is not None:
        keys["beta"] = learning.beta_of(s.objective)
        for name in sorted(s.objective.record.settings - {"beta"}):
            keys[name] = getattr(learning, name)
    return {**keys, "precompute_ref_log_probs": s.precompute_reference}


def write_axolotl(plan: Plan, stem: str) -> dict[str, str]:
    """For `axolotl train`: sharding is in the same file."""
    s = plan.strategy
    keys: _Keys = {
        "base_model": _name_model(plan),
        "sequence_len": s.seq_len,
        "sample_packing": s.packing,
        "pad_to_sequence_len": s.packing,
        "micro_batch_size": s.micro_batch,
        "gradient_accumulation_steps": s.grad_accum,
        "num_epochs": plan.num_epochs,
        "learning_rate": _learning_rate(plan),
        "optimizer": s.optimizer.record.transformers_name,
        "gradient_checkpointing": s.checkpointing,
        "attn_implementation": s.attention.record.implementation,
        "bf16": s.compute is Dtype.BF16,
        "fp16": s.compute is Dtype.FP16,
    }
    if s.checkpointing:
        keys["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if s.method is Method.LORA:
        is_all = ALL_LINEAR in s.lora_targets
        keys |= {
            "adapter": "qlora" if s.weights is Dtype.NF4 else "lora",
            **_lora(plan, rank="lora_r"),
            **(
                {"lora_target_linear": True}
                if is_all
                else {"lora_target_modules": list(s.lora_targets)}
            ),
            "load_in_4bit": s.weights is Dtype.NF4,
            "load_in_8bit": s.weights is Dtype.INT8,
        }
        keys |= {"peft_use_dora": True} if s.dora else {}
        keys |= {"lora_modules_to_save": _EMBEDDINGS} if s.train_embeddings else {}
        if s.weights is Dtype.NF4 and not s.double_quant:
            keys["bnb_config_kwargs"] = {"bnb_4bit_use_double_quant": False}
    if s.fused_kernels or s.loss is Loss.FUSED:
        keys["plugins"] = ["axolotl.integrations.liger.LigerPlugin"]
        keys["liger_fused_linear_cross_entropy"] = s.loss is Loss.FUSED
        for name in ("rope", "rms_norm", "layer_norm", "glu_activation"):
            keys[f"liger_{name}"] = s.fused_kernels
    if s.sharding.is_zero:
        keys["deepspeed"] = _describe_zero(s)
    elif s.sharding.is_fsdp:
        keys["fsdp_version"] = 2
        keys["fsdp_config"] = {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
            "offload_params": s.offload is Offload.ALL,
            "reshard_after_forward": s.sharding is not Sharding.FSDP_GRAD_OP,
            "state_dict_type": "FULL_STATE_DICT",
        }
    main = f"{stem}.axolotl.yaml"
    head = (
        f"axolotl train {main}",
        "Say which data: datasets: [{path: NAME, type: chat_template}]",
    )
    return {main: _render(keys | {"output_dir": f"./{stem}"}, plan, *head)}


def write_llama_factory(plan: Plan, stem: str) -> dict[str, str]:
    """For `llamafactory-cli train`; ZeRO has a file of DeepSpeed's, FSDP one of accelerate's."""
    s = plan.strategy
    attention = {Attention.SDPA: "sdpa", Attention.FLASH: "fa2"}.get(s.attention, "disabled")
    keys: _Keys = {
        "model_name_or_path": _name_model(plan),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": s.method.value,
        "cutoff_len": s.seq_len,
        **_batch(plan),
        **_mixed_precision(s),
        "optim": s.optimizer.record.transformers_name,
        "flash_attn": attention,
        "disable_gradient_checkpointing": not s.checkpointing,
        "enable_liger_kernel": s.fused_kernels or s.loss is Loss.FUSED,
    }
    if s.packing:
        keys |= {"packing": True, "neat_packing": True}
    if s.method is Method.FULL and s.weights is Dtype.BF16 and not s.sharding.is_zero:
        keys |= {"bf16": False, "pure_bf16": True}
    if s.method is Method.LORA:
        target = "all" if ALL_LINEAR in s.lora_targets else ",".join(s.lora_targets)
        keys |= {**_lora(plan, rank="lora_rank"), "lora_target": target}
        keys |= {"use_dora": True} if s.dora else {}
        keys |= {"additional_target": ",".join(_EMBEDDINGS)} if s.train_embeddings else {}
    if s.weights in (Dtype.NF4, Dtype.INT8):
        keys |= {
            "quantization_bit": 4 if s.weights is Dtype.NF4 else 8,
            "quantization_method": "bnb",
            "double_quantization": s.double_quant,
        }
    main, zero = f"{stem}.llama-factory.yaml", f"{stem}.deepspeed.json"
    accelerate = f"{stem}.accelerate.yaml"
    command, files = f"llamafactory-cli train {main}", {}
    if s.sharding.is_zero:
        keys["deepspeed"] = zero
        files[zero] = json.dumps(_describe_zero(s), indent=2) + "\n"
    elif s.sharding.is_fsdp:
        command = f"accelerate launch --config_file {accelerate} src/train.py {main}"
        files[accelerate] = _render(_describe_accelerate(s, has_inline_zero=False), plan)
    head = (command, "Say which data: dataset: NAME, and template: NAME")
    return {main: _render(keys | {"output_dir": stem}, plan, *head), **files}


def write_deepspeed(plan: Plan, stem: str) -> dict[str, str]:
    """For `deepspeed.initialize(config=...)` in a loop of one's own: nothing is left to `auto`."""
    s = plan.strategy
    keys = _describe_zero(s)
    del keys["train_batch_size"]  # which DeepSpeed multiplies from the two below
    keys |= {
        "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": s.grad_accum,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": _learning_rate(plan)},
        },
    }
    return {f"{stem}.deepspeed.json": json.dumps(keys, indent=2) + "\n"}


# Parts that several have in common


def _name_model(plan: Plan) -> str:
    """The model's folder, where it was planned from one; else its name."""
    source = Path(plan.model.source)
    return str(source.parent) if source.name == "config.json" else plan.model.name


def _mixed_precision(s: Strategy) -> _Keys:
    """transformers' switches, which autocast also over 16-bit weights."""
    is_mixed = s.autocast or s.sharding.is_zero or s.weights is Dtype.FP32
    return {
        "bf16": is_mixed and s.compute is Dtype.BF16,
        "fp16": is_mixed and s.compute is Dtype.FP16,
    }


def _batch(plan: Plan) -> _Keys:
    """transformers' names for batch, length of the run and learning rate."""
    return {
        "per_device_train_batch_size": plan.strategy.micro_batch,
        "gradient_accumulation_steps": plan.strategy.grad_accum,
        "num_train_epochs": plan.num_epochs,
        "learning_rate": _learning_rate(plan),
    }


def _learning_rate(plan: Plan) -> float:
    """As stated, else the objective's or the optimizer's own."""
    s = plan.strategy
    if plan.training is not None:
        return plan.training.learning_rate
    return default_learning_rate(s.method, s.optimizer, s.objective)


def _lora(plan: Plan, *, rank: str) -> _Keys:
    s, learning = plan.strategy, plan.training
    own = DEFAULT_ALPHA_PER_RANK * s.lora_rank
    alpha = own if learning is None else learning.scale_alpha(s.lora_rank)
    return {
        rank: s.lora_rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": s.lora_dropout,
    }


def _targets(s: Strategy) -> str | list[str]:
    return ALL_LINEAR if ALL_LINEAR in s.lora_targets else list(s.lora_targets)


def _describe_accelerate(s: Strategy, *, has_inline_zero: bool) -> _Keys:
    """As `accelerate config` writes it."""
    mixed = _mixed_precision(s)
    keys: _Keys = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "mixed_precision": next((name for name, is_on in mixed.items() if is_on), "no"),
        "num_machines": s.num_nodes,
        "machine_rank": 0,
        "num_processes": s.world_size,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if s.sharding.is_fsdp:
        keys["distributed_type"] = "FSDP"
        keys["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": s.offload is Offload.ALL,
            "fsdp_reshard_after_forward": s.sharding is not Sharding.FSDP_GRAD_OP,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        }
    elif s.sharding.is_zero and has_inline_zero:
        keys["distributed_type"] = "DEEPSPEED"
        keys["deepspeed_config"] = {
            "zero_stage": _stage(s),
            "offload_optimizer_device": "cpu" if s.offload.moves_optimizer else "none",
            "offload_param_device": "cpu" if s.offload.moves_params else "none",
            "gradient_accumulation_steps": s.grad_accum,
            "zero3_init_flag": s.sharding is Sharding.ZERO3,
            "zero3_save_16bit_model": s.sharding is Sharding.ZERO3,
        }
    return keys


def _describe_zero(s: Strategy) -> _Keys:
    """As DeepSpeed reads it; `auto` is filled in by transformers."""
    zero: _Keys = {"stage": _stage(s), "contiguous_gradients": True, "overlap_comm": True}
    if s.offload.moves_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if s.offload.moves_params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if s.sharding is Sharding.ZERO3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": s.compute is Dtype.BF16},
        "fp16": {"enabled": s.compute is Dtype.FP16},
        "zero_optimization": zero,
    }


def _stage(s: Strategy) -> int:
    return int(s.sharding.value.removeprefix("zero")) if s.sharding.is_zero else 0


def _render(keys: Mapping[str, Any], plan: Plan, *head: str) -> str:
    trainer = find_trainer(plan.strategy.trainer)
    lines = [f"Written for {trainer.title} by tightfit {plan.tightfit_version}.", *head]
    if trainer.version != trainer.trainer.latest:
        lines.insert(1, f"The names of its fields are those of {trainer.trainer.latest}.")
    comment = "".join(f"# {line}\n" for line in lines)
    return comment + yaml.safe_dump(dict(keys), sort_keys=False, allow_unicode=True)
