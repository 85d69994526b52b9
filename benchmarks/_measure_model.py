"""Build what a case describes: model, adapters, shards, optimizer and batch."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _measure_case import Case

MODEL_FOLDER = Path(__file__).resolve().parents[1] / "src" / "tightfit" / "catalogue" / "models"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
# Sizes of a dry run without a GPU: every family keeps its structure at toy sizes.
REHEARSAL_SIZES = {
    **{"hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 128, "d_ff": 128},
    **{"head_dim": 16, "d_kv": 16, "rotary_dim": 8, "num_attention_heads": 4, "n_head": 4},
    **{"num_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 4, "vocab_size": 512},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 4, "pad_token_id": 0},
    **{"num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2},
}


def read_config(case: Case, *, dry_run: bool) -> Any:
    from transformers import AutoConfig

    (path,) = MODEL_FOLDER.glob(f"*--{case.model}.json")
    fields = json.loads(path.read_text())
    num_layers = 2 if dry_run and case.num_layers is None else case.num_layers
    if dry_run:
        fields |= {key: size for key, size in REHEARSAL_SIZES.items() if key in fields}
    if num_layers is not None:
        fields |= {key: num_layers for key in LAYER_KEYS if key in fields}
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:num_layers]
    fields["use_cache"] = case.task == "generate"
    if fields.get("is_encoder_decoder"):
        fields.setdefault("decoder_start_token_id", 0)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def build_base(case: Case, config: Any, device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    dtype = DTYPES.get(case.weights, torch.bfloat16)
    with torch.device("meta" if case.fsdp_ranks else device):
        model: nn.Module = auto.from_config(config, dtype=dtype, attn_implementation=case.attention)
    if case.weights not in DTYPES:
        quantize_linears(model, case.weights, device)
    return model


def quantize_linears(model: Any, weights: str, device: str) -> None:
    """Replace every linear layer but the head, as transformers does when it loads in 4 or 8 bit."""
    from bitsandbytes import nn as bnb

    head = model.get_output_embeddings()
    linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    for name, linear in linears:
        shape = (linear.in_features, linear.out_features, linear.bias is not None)
        data = linear.weight.data
        if weights == "int8":
            new = bnb.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0, device="meta")
            # Int8Params quantizes only on the way from the CPU.
            new.weight = bnb.Int8Params(data.cpu(), requires_grad=False).to(device)
        else:
            double = weights == "nf4-double"
            new = bnb.Linear4bit(
                *shape, torch.bfloat16, double, quant_type="nf4", device=torch.device("meta")
            )
            new.weight = bnb.Params4bit(
                data, False, compress_statistics=double, quant_type="nf4", module=new
            ).to(device)
        new.bias = linear.bias
        linear.register_parameter("weight", None)
        model.set_submodule(name, new)
    setattr(model, "is_loaded_in_8bit" if weights == "int8" else "is_loaded_in_4bit", True)
    gc.collect()


def attach_adapters(case: Case, model: Any) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if case.prepare_kbit:
        prepare: Any = prepare_model_for_kbit_training  # not annotated
        model = prepare(
            model,
            use_gradient_checkpointing=case.checkpointing != "off",
            gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing == "reentrant"},
        )
    targets = case.lora_targets
    config = LoraConfig(
        r=case.lora_rank,
        lora_alpha=2 * case.lora_rank,
        lora_dropout=case.lora_dropout,
        target_modules=targets if targets == "all-linear" else targets.split(","),
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[case.adapters])
    return model


def fuse_loss(case: Case, model: Any) -> None:
    from liger_kernel.transformers import monkey_patch

    patch = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    if case.loss == "liger":
        patch(model=model)
        return
    names = patch.__code__.co_varnames[: patch.__code__.co_argcount]
    off = {n: False for n in names if n not in ("model", "fused_linear_cross_entropy")}
    patch(model=model, fused_linear_cross_entropy=True, **off)


def build_model(case: Case, *, device: str, dry_run: bool) -> tuple[nn.Module, dict[str, int]]:
    """The model ready to train, and its parameter counts (taken before any packing to 4 bit)."""
    config = read_config(case, dry_run=dry_run)
    with torch.device("meta"):
        unpacked = build_base(dataclasses.replace(case, weights="bf16"), config, "meta")
    counts = {"total": sum(p.numel() for p in unpacked.parameters())}
    model: Any = build_base(case, config, device)
    if case.loss != "plain":
        fuse_loss(case, model)
    if case.method == "lora":
        model = attach_adapters(case, model)
        counts["total"] += sum(p.numel() for p in model.parameters() if p.requires_grad)
    if case.checkpointing != "off":
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
        if case.method == "lora":
            model.enable_input_require_grads()
    counts["trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if case.fsdp_ranks:
        shard_model(case, model, device)
    model.train()
    return model, counts


def shard_model(case: Case, model: Any, device: str) -> None:
    """Shard as rank 0 of a process group whose collectives do nothing: memory real, values not."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.fsdp_ranks)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (case.fsdp_ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu" if case.offload else device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0.0, 0.02)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = torch.zeros_like(buffer, device=device)


def build_optimizer(case: Case, parameters: list[nn.Parameter]) -> Any:
    if case.optimizer.startswith(("adamw-8bit", "paged")):
        from bitsandbytes import optim

        kinds = {
            "adamw-8bit": optim.AdamW8bit,
            "paged-adamw": optim.PagedAdamW,
            "paged-adamw-8bit": optim.PagedAdamW8bit,
        }
        return kinds[case.optimizer](parameters, lr=1e-5)
    if case.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        make_adafactor: Any = Adafactor  # not annotated
        return make_adafactor(parameters, lr=1e-5, scale_parameter=False, relative_step=False)
    if case.optimizer == "sgd-momentum":
        return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9, foreach=True)
    if case.optimizer == "adamw-foreach":
        return torch.optim.AdamW(parameters, lr=1e-5, foreach=True)
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def draw_batch(case: Case, model: Any, device: str) -> dict[str, torch.Tensor]:
    shape = (case.micro_batch, case.seq_len)
    ids = torch.randint(5, model.config.vocab_size, shape, device=device)
    batch = {"input_ids": ids, "labels": ids}
    if case.padding:
        keep = torch.linspace(0.5, 1.0, case.micro_batch, device=device) * case.seq_len
        mask = (torch.arange(case.seq_len, device=device) < keep[:, None]).long()
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return batch


def autocast_for(case: Case, device: str) -> Any:
    if case.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=DTYPES[case.autocast])
