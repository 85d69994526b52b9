"""`python -m tightfit.runtime.module_tree`: the ModelSpec of a config, read from the modules that
transformers makes of it on the meta device; one JSON line each in and out."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tightfit.core.attention import AttentionFeature
from tightfit.core.child_process import (
    Message,
    end_with_parent,
    limit_data_bytes,
    open_output,
    read_messages,
)
from tightfit.core.units import GIB
from tightfit.models.attention import read_attention_extras
from tightfit.models.families.parts import ACTIVATIONS, KV_HEADS
from tightfit.models.families.registry import find_family
from tightfit.models.spec import Block, Linear, ModelSpec, Role
from tightfit.runtime.kernels.experts import find_gating
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.libraries import fast_imports

MEMORY_LIMIT_BYTES = 4 * GIB
"""Of data: modules without values take a few hundred MiB."""
_NOT_OF_THE_TREE = ("auto_map", "quantization_config")
"""Code from the hub is never run; packed weights have the shapes of unpacked ones."""


class CannotBuildError(Exception):
    """transformers makes no language model of this config."""


def main() -> None:
    """Write the answer to standard output for each config on standard input.

    The argument is the pid of the process to end with.
    """
    if len(sys.argv) > 1:
        end_with_parent(int(sys.argv[1]))
    limit_data_bytes(MEMORY_LIMIT_BYTES)
    send = open_output()
    warnings.simplefilter("ignore")
    for message in read_messages():
        send(answer(message["config"]))
    os._exit(0)  # skips torch's slow teardown


def answer(config: Mapping[str, Any]) -> Message:
    """The spec as JSON, or the problem, and whether transformers has the family."""
    with fast_imports([]):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    if config.get("model_type") not in CONFIG_MAPPING:
        return {"problem": "transformers has no such family", "is_known": False}
    try:
        return {"spec": read_tree(*build(config)).model_dump(mode="json")}
    except Exception as error:  # whatever a config makes a library raise
        what = " ".join(str(error).split())[:300].rstrip(" .") or type(error).__name__
        return {"problem": what, "is_known": True}


def build(values: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """The model without memory behind it, and its config."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kept = {key: value for key, value in values.items() if key not in _NOT_OF_THE_TREE}
    config = CONFIG_MAPPING[kept["model_type"]].from_dict(kept)
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in kind._model_mapping:
        kind = AutoModelForCausalLM
    if type(config) not in kind._model_mapping:
        raise CannotBuildError(f"it has no language model for `{config.model_type}`")
    with torch.device("meta"):
        model: nn.Module = kind.from_config(config)
    return model, config


def read_tree(model: nn.Module, config: Any) -> ModelSpec:
    """The spec of a built model. Every parameter is counted once, so the count is exact."""
    text = config.get_text_config(decoder=True)
    modules: Any = model
    embedding = modules.get_input_embeddings().weight
    head = modules.get_output_embeddings()
    vocab_size, width = embedding.shape
    hidden = _read_size(text, "hidden_size") or width
    outside = _Outside.read(model, embedding, head)
    layers = _read_layers(model, hidden, text)
    blocks = _group(layers)
    inside = sum(block.num_params for block in blocks)
    total = sum(parameter.numel() for parameter in model.parameters())
    heads = _read_size(text, "num_attention_heads") or 1
    head_dim = _read_head_dim(model, text, hidden, heads)
    counted = outside.embedding + outside.head + outside.positions + inside
    inner, is_gated = _read_mlp(blocks, hidden)
    is_rms_norm = all(layer.is_rms_norm for layer in layers)
    num_sliding = sum(kind == "sliding_attention" for kind in _layer_types(text))
    window = _read_size(text, "sliding_window")
    if num_sliding == 0 and window and not _layer_types(text):
        num_sliding = sum(block.num_layers for block in blocks)
    return ModelSpec(
        name="",
        source="",
        model_type=config.model_type,
        warnings=tuple(_list_warnings(config, layers, blocks, total)),
        hidden_size=hidden,
        vocab_size=vocab_size,
        num_heads=heads,
        num_kv_heads=_read_kv_heads(blocks, text, heads, head_dim),
        head_dim=head_dim,
        intermediate_size=inner,
        blocks=blocks,
        is_rms_norm=is_rms_norm,
        is_gated_mlp=is_gated,
        activation=_read_activation(text, is_rms_norm=is_rms_norm),
        is_parallel_residual=_is_parallel(blocks, text),
        tie_embeddings=outside.is_tied,
        lm_head_bias=outside.has_head_bias,
        embedding_width=None if width == hidden else width,
        position_params=outside.positions,
        outer_params=total - counted,
        max_positions=_read_size(text, "max_position_embeddings"),
        sliding_window=window,
        num_sliding_layers=num_sliding,
        has_logit_softcap=bool(getattr(text, "final_logit_softcapping", None)),
        has_attention_softcap=bool(getattr(text, "attn_logit_softcapping", None)),
        attention_extras=tuple(sorted(_read_features(model, text, layers))),
    )


# Outside the layers.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outside:
    """Values of the embedding, of a head with a matrix of its own, and of positions."""

    embedding: int
    head: int
    is_tied: bool
    has_head_bias: bool
    positions: int

    @classmethod
    def read(cls, model: nn.Module, embedding: nn.Parameter, head: Any) -> _Outside:
        """A head of another shape than the embedding stays among the other parameters."""
        weight = getattr(head, "weight", None)
        is_like = weight is not None and weight.shape == embedding.shape
        is_own = is_like and weight is not embedding
        bias = getattr(head, "bias", None)
        has_bias = is_like and bias is not None and bias.numel() == embedding.shape[0]
        learned = [
            module.weight
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding) and _POSITION.search(path)
        ]
        positions = {id(one): one.numel() for one in learned if one is not embedding}
        return cls(
            embedding=embedding.numel(),
            head=is_own * embedding.numel() + has_bias * embedding.shape[0],
            is_tied=not is_own,
            has_head_bias=has_bias,
            positions=sum(positions.values()),
        )


_POSITION = re.compile(r"(^|[._])(wpe|pos|positions?)([._]|$)|position_embed")

# Inside a layer.

_ATTENTION = re.compile(r"att(n|ention)?([._]|$|\d)|attention|attn", re.IGNORECASE)
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
_LISTED_EXPERT = re.compile(r"(.*experts?)\.\d+\.(.+)", re.IGNORECASE)
_SHARED = re.compile(r"shared", re.IGNORECASE)
_ROUTER = re.compile(r"(^|\.)(\w*router\w*|gate|gate_network|wg)(\.|$)", re.IGNORECASE)
_OUTPUT = re.compile(r"(^|[._])(o|out|output|dense|wo|c_proj)([._]|$)|out_?proj", re.IGNORECASE)
_RECURRENT = re.compile(r"mamba|recurren|rglru|deltanet|lstm|rwkv|kimidelta", re.IGNORECASE)
_LEADS_BACK = re.compile(r"down|out|w2", re.IGNORECASE)
_CONVERTED = {
    "mixtral": frozenset({"w1", "w2", "w3"}),
    "qwen2_moe": frozenset({"gate_proj", "up_proj", "down_proj"}),
}
_RANK_FACTORS = {"gate_up_proj": 2, "down_proj": 1}
_EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "top_k", "num_experts_per_token", "experts_per_token", "moe_topk"),
    *("moe_top_k", "top_k_experts", "num_selected_experts", "moe_k"),
)


@dataclass(slots=True, kw_only=True)
class _Layer:
    """One layer as it was found."""

    kind: str
    linears: list[Linear] = field(default_factory=list)
    norm_widths: list[int] = field(default_factory=list)
    norm_biases: list[bool] = field(default_factory=list)
    head_norm_params: int = 0
    num_params: int = 0
    is_rms_norm: bool = True
    has_sinks: bool = False
    has_recurrence: bool = False
    is_shared: bool = False
    """Some of its parameters are those of a layer before it."""
    lacks_experts_per_token: bool = False

    def to_block(self) -> Block:
        """What is neither matrix nor norm is among the extra parameters."""
        block = Block(
            kind=self.kind,
            num_layers=1,
            linears=tuple(self.linears),
            norm_widths=tuple(self.norm_widths),
            norm_bias=bool(self.norm_biases) and all(self.norm_biases),
            head_norm_params=self.head_norm_params,
        )
        return block.model_copy(update={"extra_params": self.num_params - block.layer_params})


def _read_layers(model: nn.Module, hidden: int, text: Any) -> list[_Layer]:
    paths = {id(module): path for path, module in model.named_modules()}
    seen: set[int] = set()
    layers = []
    for module in _list_layers(model):
        is_encoder = "encoder" in paths[id(module)].split(".")
        kind = "encoder" if is_encoder and text.is_encoder_decoder else "decoder"
        layers.append(_read_layer(module, kind, hidden, text, seen))
    return layers


def _list_layers(model: Any) -> list[nn.Module]:
    """Those of the language model, where images or sound have layers beside it."""
    everywhere = decoder_layers(model)
    decoder = model.get_decoder()
    if model.config.is_encoder_decoder or not isinstance(decoder, nn.Module):
        return everywhere
    of_decoder = decoder_layers(decoder)
    return of_decoder if 2 * _count(of_decoder) > _count(everywhere) else everywhere


def _count(layers: list[nn.Module]) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def _read_layer(module: nn.Module, kind: str, hidden: int, text: Any, seen: set[int]) -> _Layer:
    layer = _Layer(kind=kind)
    own = {id(parameter): parameter.numel() for parameter in module.parameters()}
    layer.is_shared = bool(own.keys() & seen)
    layer.num_params = sum(count for key, count in own.items() if key not in seen)
    num_experts: dict[tuple[str, Linear], int] = {}
    converted = _find_converted(text.model_type)
    for path, part in module.named_modules():
        weight = getattr(part, "weight", None)
        if any(id(parameter) in seen for parameter in part.parameters(recurse=False)):
            continue
        if _RECURRENT.search(type(part).__name__):
            layer.has_recurrence = True
        if _is_linear(part):
            linear = _read_linear(path, part)
            listed = _LISTED_EXPERT.fullmatch(path)
            if linear.role is Role.EXPERT and listed:
                key = (f"{listed[1]} {listed[2]}", linear)
                num_experts[key] = num_experts.get(key, 0) + 1
            else:
                layer.linears.append(linear)
        elif isinstance(weight, nn.Parameter) and _is_norm(part):
            _add_norm(layer, part, hidden)
        else:
            has_sinks = isinstance(getattr(part, "sinks", None), nn.Parameter)
            layer.has_sinks = layer.has_sinks or has_sinks
            layer.linears += _read_bare(path, part, hidden, is_adapted=bool(converted))
    layer.linears += [
        linear.model_copy(update={"copies": count}) for (_, linear), count in num_experts.items()
    ]
    if any(linear.role is Role.EXPERT for linear in layer.linears):
        per_token = _read_experts_per_token(module, text)
        layer.lacks_experts_per_token = per_token is None
        layer.linears = [_with_choice(linear, per_token) for linear in layer.linears]
    layer.linears = [
        linear.model_copy(update={"lora_rank_factor": 0})
        if linear.is_module and linear.name in converted
        else linear
        for linear in layer.linears
    ]
    # The closed forms take the last matrix of a role as the one that leads back.
    layer.linears.sort(key=lambda linear: _rank(linear, hidden))
    seen.update(own)
    return layer


def _with_choice(linear: Linear, per_token: int | None) -> Linear:
    if linear.role is not Role.EXPERT:
        return linear
    chosen = min(per_token or linear.copies, linear.copies)
    return linear.model_copy(update={"copies_per_token": chosen})


def _rank(linear: Linear, hidden: int) -> tuple[int, bool, int]:
    leads_back = linear.out_features == hidden and (
        linear.in_features != hidden or bool(_OUTPUT.search(linear.name))
    )
    is_inner = linear.role in (Role.MLP, Role.EXPERT)
    return (
        list(Role).index(linear.role),
        leads_back,
        linear.in_features if leads_back and is_inner else 0,
    )


def _is_linear(part: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(part, (nn.Linear, Conv1D)) and part.weight.dim() == 2


def _read_linear(path: str, part: Any) -> Linear:
    outs, ins = part.weight.shape if isinstance(part, nn.Linear) else part.weight.shape[::-1]
    return Linear(
        name=path.rpartition(".")[2],
        in_features=ins,
        out_features=outs,
        bias=part.bias is not None,
        role=_find_role(path),
    )


def _find_role(path: str) -> Role:
    if _LISTED_EXPERT.fullmatch(path) and not _SHARED.search(path):
        return Role.EXPERT
    if _ATTENTION.search(path):
        return Role.CROSS_ATTENTION if _CROSS.search(path) else Role.ATTENTION
    if _ROUTER.search(path) and not _SHARED.search(path):
        return Role.ROUTER
    return Role.MLP


def _read_bare(path: str, part: Any, hidden: int, *, is_adapted: bool) -> Iterator[Linear]:
    """Experts and routers as transformers 5 keeps them: parameters, not modules."""
    if type(part).__module__.startswith("torch.nn."):
        return
    own = dict(part.named_parameters(recurse=False))
    where = f"{path} {type(part).__name__}".lower()
    for key, parameter in own.items():
        name = path.rpartition(".")[2] if key == "weight" else key
        if parameter.dim() == 3 and "expert" in where:
            copies, first, second = parameter.shape
            is_transposed = getattr(part, "is_transposed", None)
            if is_transposed is None:  # by the side that is as wide as the hidden stream
                is_transposed = hidden == (second if _LEADS_BACK.search(name) else first)
            ins, outs = (first, second) if is_transposed else (second, first)
            bias = own.get(f"{key}_bias", own.get("bias") if key == "weight" else None)
            is_grouped = hasattr(part, "has_gate") and find_gating(part) is not None
            yield Linear(
                name=name,
                in_features=ins,
                out_features=outs,
                bias=bias is not None and tuple(bias.shape) == (copies, outs),
                role=Role.EXPERT,
                copies=copies,
                is_module=False,
                is_grouped=is_grouped,
                lora_rank_factor=_RANK_FACTORS.get(name, 0) if is_adapted else int(is_grouped),
            )
        elif parameter.dim() == 2 and ("router" in where or _ROUTER.search(path)):
            outs, ins = parameter.shape
            bias = own.get("bias") if key == "weight" else None
            yield Linear(
                name=name,
                in_features=ins,
                out_features=outs,
                bias=bias is not None and tuple(bias.shape) == (outs,),
                role=Role.ROUTER,
                is_module=False,
                lora_rank_factor=int(is_adapted),
            )


def _find_converted(model_type: str) -> frozenset[str]:
    """Module names that peft's `all-linear` takes for bare experts, in families whose weights
    transformers converts as Mixtral's or Qwen2-MoE's; none elsewhere.

    It then adapts the experts and their router, and no module of these names: neither dense
    layers nor shared experts. Source: peft 0.21, utils/transformers_weight_conversion.py.
    """
    try:
        from transformers import conversion_mapping
    except ImportError:
        return frozenset()
    patterns = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    pattern = model_type if model_type == "mixtral" else patterns.get(model_type)
    return _CONVERTED.get(str(pattern), frozenset())


def _is_norm(part: Any) -> bool:
    return "norm" in type(part).__name__.lower() and part.weight.dim() == 1


def _add_norm(layer: _Layer, part: Any, hidden: int) -> None:
    has_bias = getattr(part, "bias", None) is not None
    if part.weight.numel() == hidden:
        layer.norm_widths.append(hidden)
        layer.norm_biases.append(has_bias)
        is_layer_norm = isinstance(part, nn.LayerNorm) or (
            has_bias and "rms" not in type(part).__name__.lower()
        )
        layer.is_rms_norm = layer.is_rms_norm and not is_layer_norm
    else:
        layer.head_norm_params += part.weight.numel() + (part.bias.numel() if has_bias else 0)


def _read_experts_per_token(module: nn.Module, text: Any) -> int | None:
    for part in module.modules():
        if value := _read_size(part, "top_k"):
            return value
    found = (_read_size(text, key) for key in _EXPERTS_PER_TOKEN)
    return next((value for value in found if value), None)


def _group(layers: list[_Layer]) -> tuple[Block, ...]:
    """Equal layers together, wherever they stand, in the order in which each kind comes first."""
    counts: dict[Block, int] = {}
    for layer in layers:
        block = layer.to_block()
        counts[block] = counts.get(block, 0) + 1
    return tuple(block.model_copy(update={"num_layers": count}) for block, count in counts.items())


# What sizes mean.


def _read_size(place: Any, key: str) -> int | None:
    value = getattr(place, key, None)
    return value if type(value) is int and value > 0 else None


def _layer_types(text: Any) -> list[str]:
    kinds = getattr(text, "layer_types", None)
    return [str(kind) for kind in kinds] if isinstance(kinds, (list, tuple)) else []


def _read_head_dim(model: nn.Module, text: Any, hidden: int, heads: int) -> int:
    """The attention's own figure; with latent attention that of queries and keys."""
    for key in ("qk_head_dim", "head_dim"):
        sizes = [_read_size(part, key) for part in model.modules()]
        if found := [size for size in sizes if size]:
            return max(found)
    return _read_size(text, "head_dim") or max(1, hidden // heads)


def _read_kv_heads(blocks: tuple[Block, ...], text: Any, heads: int, head_dim: int) -> int:
    widths = {
        part.out_features for block in blocks for part in block.linears if part.name == "k_proj"
    }
    stated = (_read_size(text, key) for key in KV_HEADS)
    found = max(widths, default=0) // head_dim or next(filter(None, stated), heads)
    return found if found <= heads and heads % found == 0 else heads


def _read_mlp(blocks: tuple[Block, ...], hidden: int) -> tuple[int, bool]:
    """Width inside the MLP, of one expert where there are experts; and whether it has a gate."""
    for role in (Role.EXPERT, Role.MLP, Role.ATTENTION):
        for block in blocks:
            parts = [part for part in block.linears if part.role is role]
            if parts and parts[-1].out_features == hidden:
                inner = parts[-1].in_features
                entries = sum(part.out_features for part in parts if part.in_features == hidden)
                return inner, role is not Role.ATTENTION and entries >= 2 * inner
    return hidden, False


def _is_parallel(blocks: tuple[Block, ...], text: Any) -> bool:
    """One norm before attention and MLP, or a config that says so."""
    for key in ("use_parallel_residual", "parallel_attn", "parallel_attention"):
        if isinstance(value := getattr(text, key, None), bool):
            return value
    roles = {part.role for part in blocks[0].linears} if blocks else set()
    has_both = Role.ATTENTION in roles and bool(roles & {Role.MLP, Role.EXPERT})
    return has_both and len(blocks[0].norm_widths) == 1


def _read_activation(text: Any, *, is_rms_norm: bool) -> str:
    for key in ACTIVATIONS:
        value = getattr(text, key, None)
        if isinstance(value, str) and value.isprintable():
            return value[:100]
    return "silu" if is_rms_norm else "gelu"


def _read_features(model: nn.Module, text: Any, layers: list[_Layer]) -> set[AttentionFeature]:
    found = read_attention_extras(text.to_dict(), find_family(text.model_type))
    if any(layer.has_sinks for layer in layers):
        found.add(AttentionFeature.SINKS)
    if not getattr(model, "_supports_sdpa", True):
        found.add(AttentionFeature.OWN)
    return found


MOST_UNNAMED_FRACTION = 0.02
"""Of a model's values, that are neither in matrices nor in norms, before it is worth a warning."""


def _list_warnings(
    config: Any, layers: list[_Layer], blocks: tuple[Block, ...], total: int
) -> Iterator[str]:
    """What stays assumed."""
    yield (
        f"`{config.model_type}` has no config reader here: counts and module names are those of "
        "transformers' own modules; activations and speed are estimated as of Llama-like layers."
    )
    if any(layer.has_recurrence for layer in layers):
        yield (
            "Some layers are recurrent (state space or linear attention); their activations and "
            "speed are estimated as of attention and an MLP of the same widths."
        )
    if any("kv_a_proj" in part.name for block in blocks for part in block.linears):
        yield "Attention is latent (MLA); cache and activations are estimated as of plain heads."
    if any(layer.is_shared for layer in layers):
        yield "Some layers share weights, which are counted once; their computing is understated."
    if any(layer.lacks_experts_per_token for layer in layers):
        yield "How many experts a token passes through is not stated; all are assumed."
    unnamed = sum(block.num_layers * block.extra_params for block in blocks)
    if unnamed > MOST_UNNAMED_FRACTION * total:
        yield (
            f"{unnamed / total:.0%} of the parameters are no matrices that LoRA or quantization "
            "knows; they are counted as they are."
        )


if __name__ == "__main__":
    main()
