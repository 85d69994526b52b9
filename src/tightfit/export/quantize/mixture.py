"""Which type each tensor of a GGUF file gets, by the rules of llama.cpp's own quantizer.

Source: `llama_tensor_get_type_impl`, `tensor_allows_quantization` and `tensor_type_fallback` in
github.com/ggml-org/llama.cpp, src/llama-quant.cpp, commit b21e4de (August 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tightfit.export.quantize.targets import Target

KINDS = {
    Target.Q8_0: "Q8_0",
    Target.Q6_K: "Q6_K",
    Target.Q5_K_M: "Q5_K",
    Target.Q4_K_M: "Q4_K",
    Target.Q3_K_M: "Q3_K",
    Target.Q2_K: "Q2_K",
}
"""What most tensors of a file get."""
BLOCK_WIDTHS = {"Q8_0": 32, "Q4_0": 32, "Q5_0": 32, "Q5_1": 32, "F16": 1}
K_WIDTH = 256
NARROWER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""In place of a K type, for rows that are no multiple of 256 wide."""
_KEPT = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel",
    "per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight",
    "indexer.q_proj.weight", "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight",
    "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight",
    "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", ".rel_pos",
    ".patch_embd", ".patch_merger",
)  # fmt: skip
_KEPT_WHOLE = ("position_embd.weight", "token_types.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")
_SEVENTY_LAYERS = {"llama": 80, "qwen2": 80, "olmo": 80, "deci": 80, "jais2": 68}
"""Layers by which llama.cpp takes a model for its 70B type."""


class Role(Enum):
    """What a tensor does, as far as the rules ask."""

    OUTPUT = "output"
    EMBEDDING = "embedding"
    VALUE = "value"
    KEY = "key"
    ATTENTION_OUTPUT = "attention output"
    DOWN = "down"
    OTHER = "other"


_ROLES = (
    ("attn_qkv.weight", Role.VALUE),
    ("attn_kv_b.weight", Role.VALUE),
    ("attn_v.weight", Role.VALUE),
    ("attn_k.weight", Role.KEY),
    ("attn_output.weight", Role.ATTENTION_OUTPUT),
    ("ffn_down", Role.DOWN),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """A tensor of the file to quantize."""

    name: str
    shape: tuple[int, ...]
    """As numpy has it: rows first, the width of a row last."""

    @property
    def width(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the rules ask of a model."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 0

    @property
    def is_seventy(self) -> bool:
        if self.num_layers != _SEVENTY_LAYERS.get(self.architecture):
            return False
        return self.architecture != "llama" or self.num_heads != self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A type for each tensor that is quantized."""

    types: Mapping[str, str]
    """By tensor; what is missing stays as it is."""
    fallen: Mapping[str, str]
    """Tensors whose width refused the wanted type, and that type."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """How far the file has been walked through."""

    num_values: int
    values_done: int = 0
    downs_done: int = 0


def choose_mixture(tensors: Sequence[TensorShape], model: ModelFacts, target: Target) -> Mixture:
    """llama.cpp's type for each tensor of a file of this kind."""
    is_tied = all(tensor.name != "output.weight" for tensor in tensors)
    place = _Place(num_values=sum(role_of(t.name) is Role.VALUE for t in tensors))
    types: dict[str, str] = {}
    fallen: dict[str, str] = {}
    # The rules count layers as they come in the order of llama.cpp's own map.
    for tensor in sorted(tensors, key=lambda t: (_layer(t.name), t.name)):
        if not is_quantized(tensor):
            continue
        wanted = _choose(tensor, model, target, place, is_tied=is_tied)
        types[tensor.name] = fit_width(wanted, tensor.width)
        if types[tensor.name] != wanted:
            fallen[tensor.name] = wanted
    return Mixture(types=types, fallen=fallen)


def is_quantized(tensor: TensorShape) -> bool:
    """Matrices but norms, routers, positions and a few small ones."""
    if sum(size > 1 for size in tensor.shape[:-1]) < 1 or not tensor.name.endswith("weight"):
        return False
    is_kept = tensor.name in _KEPT_WHOLE or any(part in tensor.name for part in _KEPT)
    return not is_kept


def fit_width(kind: str, width: int) -> str:
    """The type itself where a row divides into its blocks, else the next one that fits."""
    if width % BLOCK_WIDTHS.get(kind, K_WIDTH) == 0:
        return kind
    narrower = NARROWER.get(kind, "F16")
    return narrower if width % BLOCK_WIDTHS[narrower] == 0 else "F16"


def role_of(name: str) -> Role:
    if name == "output.weight":
        return Role.OUTPUT
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return Role.EMBEDDING
    return next((role for part, role in _ROLES if part in name), Role.OTHER)


def _choose(
    tensor: TensorShape, model: ModelFacts, target: Target, place: _Place, *, is_tied: bool
) -> str:
    kind, role = KINDS[target], role_of(tensor.name)
    if role is Role.OUTPUT or (is_tied and role is Role.EMBEDDING):
        is_odd = tensor.width % BLOCK_WIDTHS.get(kind, K_WIDTH) != 0
        is_wide = model.architecture == "falcon" or is_odd or kind == "Q8_0"
        return "Q8_0" if is_wide else "Q6_K"
    if role is Role.VALUE:
        place.values_done += 1
        return _value_type(kind, model, target, place)
    if role is Role.KEY:
        return "Q8_0" if model.num_experts == 8 else kind
    if role is Role.DOWN:
        layer = _layer(tensor.name) if model.num_experts > 1 else place.downs_done
        place.downs_done += 1
        return _down_type(kind, model, target, layer)
    if role is Role.ATTENTION_OUTPUT and model.architecture != "falcon":
        return _attention_output_type(kind, model, target)
    return kind


def _value_type(kind: str, model: ModelFacts, target: Target, place: _Place) -> str:
    number = place.values_done - 1
    if target is Target.Q2_K:
        kind = "Q4_K" if model.heads_per_kv_head >= 4 else "Q3_K"
    elif target is Target.Q3_K_M:
        kind = "Q5_K" if number < 2 else "Q4_K"
    elif target in (Target.Q4_K_M, Target.Q5_K_M) and _is_sensitive(number, place.num_values):
        kind = "Q6_K"
    if model.is_seventy and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if model.num_experts == 8 else kind


def _down_type(kind: str, model: ModelFacts, target: Target, layer: int) -> str:
    count = model.num_layers
    is_falcon, is_sensitive = model.architecture == "falcon", _is_sensitive(layer, count)
    if target is Target.Q2_K:
        return "Q3_K"
    if target is Target.Q3_K_M:
        usual = "Q4_K" if not is_falcon or is_sensitive else "Q3_K"
        return "Q5_K" if layer < count // 16 else usual
    if target is Target.Q4_K_M and is_falcon:
        usual = "Q5_K" if is_sensitive else "Q4_K"
        return "Q6_K" if layer < count // 16 else usual
    is_raised = target in (Target.Q4_K_M, Target.Q5_K_M) and is_sensitive
    return "Q6_K" if is_raised else kind


def _attention_output_type(kind: str, model: ModelFacts, target: Target) -> str:
    if model.num_experts == 8:
        is_small = target in (Target.Q2_K, Target.Q3_K_M, Target.Q4_K_M)
        return "Q5_K" if is_small else kind
    return {Target.Q2_K: "Q3_K", Target.Q3_K_M: "Q4_K"}.get(target, kind)


def _is_sensitive(layer: int, count: int) -> bool:
    """The first and last eighth of the layers, and every third between them."""
    eighth = count // 8
    return layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found.group(1)) if found else -1
