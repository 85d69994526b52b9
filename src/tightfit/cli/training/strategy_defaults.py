"""Settings that `estimate` chooses where the user gave none: dtypes by GPU, sharding by count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tightfit.api.options import choices
from tightfit.cli.flags.training import EstimateFlags
from tightfit.cli.training.command_line import read_settings, refuse_twice
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.strategy import (
    Attention,
    Loss,
    Method,
    Offload,
    Optimizer,
    Sharding,
    Strategy,
)
from tightfit.hardware.types import NodeGroup
from tightfit.models.spec import ModelSpec
from tightfit.planning.space import choose_attention, choose_compute_dtype, must_repeat_keys

_BARE_SWITCHES = ("train_embeddings", "optimizer_in_backward")
"""Switches without an off side: False means that they were not given."""
DEFAULT_SEQ_LEN = int(Strategy.model_fields["seq_len"].default)


def choose_strategy(flags: EstimateFlags, *, spec: ModelSpec, group: NodeGroup) -> Strategy:
    """The strategy the flags state, completed for this model and this group's card."""
    settings = read_settings(flags.settings)
    flags = _take_in(flags, settings)
    method = choices.read_word(flags.method or "lora", choices.METHODS, option="--method")
    dtypes = _choose_dtypes(
        flags, method=method, card_half=choose_compute_dtype(spec, group.node.gpu)
    )
    attention = choose_attention(spec, group.node, compute=dtypes["compute"])
    is_fp8 = bool(settings.get("fp8"))
    given: dict[str, Any] = {
        **dtypes,
        "attention": attention,
        "repeat_keys": must_repeat_keys(
            spec, group.node, attention=attention, compute=dtypes["compute"]
        ),
        "seq_len": min(DEFAULT_SEQ_LEN, spec.max_positions or DEFAULT_SEQ_LEN),
        # fp8 is made of unpacked matrices, and keeps frozen ones in a form that folded adapters
        # alone can read.
        "unpacked_base": is_fp8 and dtypes["weights"] is Dtype.NF4,
        "folded_adapters": is_fp8 and method in ("lora", "qlora"),
        **_choose_layout(flags, group),
        **_stated(flags),
        "method": Method.LORA if method == "qlora" else Method(method),
        **settings,
    }
    return Strategy(**given)


def _take_in(flags: EstimateFlags, settings: dict[str, Any]) -> EstimateFlags:
    """The flags with what `--set` says of fields that others are chosen by."""
    stated = {name: getattr(flags, name) for name in Strategy.model_fields if hasattr(flags, name)}
    only_given = {
        name: None
        if (value is False and name in _BARE_SWITCHES) or name == "gpus_per_node"
        else value
        for name, value in stated.items()
    }
    refuse_twice(settings, only_given)
    leading = ("method", "weights", "compute", "adapter_dtype", "sharding")
    return replace(flags, **{name: settings[name].value for name in leading if name in settings})


def _choose_dtypes(flags: EstimateFlags, *, method: str, card_half: Dtype) -> dict[str, Any]:
    compute = _dtype(flags.compute, choices.COMPUTE, "--compute")
    weights = _dtype(flags.weights, choices.WEIGHTS, "--weights")
    if method == "qlora" and weights not in (None, Dtype.NF4):
        raise UsageError(
            f"`--method qlora` stores nf4 weights, not {flags.weights}.",
            remedy=f"--method lora --weights {flags.weights}",
        )
    if weights is None:
        weights = _default_weights(method, half=compute or card_half)
        compute = compute or card_half
    elif compute is None:
        compute = card_half if weights.is_quantized else weights
    # A gradient scaler cannot unscale fp16 gradients, so fp16 arithmetic keeps fp32 adapters.
    adapter = Dtype.BF16 if compute is Dtype.BF16 else Dtype.FP32
    return {
        "autocast": compute is Dtype.FP16 and weights is not Dtype.FP32,
        "weights": weights,
        "compute": compute,
        "adapter_dtype": _dtype(flags.adapter_dtype, choices.COMPUTE, "--adapter-dtype") or adapter,
    }


def _default_weights(method: str, *, half: Dtype) -> Dtype:
    """fp16 arithmetic on trained weights needs an fp32 copy to step; frozen ones do not."""
    if method == "qlora":
        return Dtype.NF4
    return Dtype.FP32 if method == "full" and half is Dtype.FP16 else half


def _dtype(text: str | None, known: tuple[str, ...], option: str) -> Dtype | None:
    return None if text is None else choices.read_choice(Dtype, text, known=known, option=option)


def _choose_layout(flags: EstimateFlags, group: NodeGroup) -> dict[str, Any]:
    num_gpus = group.num_nodes * group.node.num_gpus
    sharding = Sharding.SINGLE if num_gpus == 1 else Sharding.FSDP
    if flags.sharding is not None:
        sharding = choices.read_choice(
            Sharding, flags.sharding, known=choices.SHARDINGS, option="--sharding"
        )
    is_single = sharding is Sharding.SINGLE
    return {
        "sharding": sharding,
        "num_nodes": 1 if is_single else group.num_nodes,
        "gpus_per_node": 1 if is_single else group.node.num_gpus,
    }


def _stated(flags: EstimateFlags) -> dict[str, Any]:
    """Fields that go through as given; what was not given keeps the Strategy's own default."""
    words: tuple[tuple[str, type[Any], tuple[str, ...]], ...] = (
        ("optimizer", Optimizer, choices.OPTIMIZERS),
        ("attention", Attention, choices.ATTENTIONS),
        ("loss", Loss, choices.LOSSES),
        ("offload", Offload, choices.OFFLOADS),
    )
    plain = (
        *("lora_rank", "micro_batch", "seq_len", "grad_accum", "checkpointing"),
        *("fused_kernels", "folded_adapters", "unpacked_base", "double_quant", "train_embeddings"),
        "optimizer_in_backward",
    )
    stated = {name: getattr(flags, name) for name in plain}
    for name, kind, known in words:
        text = getattr(flags, name)
        if text is not None:
            stated[name] = choices.read_choice(kind, text, known=known, option=f"--{name}")
    if flags.lora_targets is not None:
        stated["lora_targets"] = _read_targets(flags.lora_targets)
    return {name: value for name, value in stated.items() if value is not None}


def _read_targets(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UsageError("`--lora-targets` names no module.", remedy="--lora-targets all-linear")
    return names
