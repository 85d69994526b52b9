"""A GGUF file's metadata and tensors, and how a family's tensors and rotary positions lie in it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import PLAIN_DTYPES
from tightfit.core.errors import InvalidInputError
from tightfit.models.families.registry import find_gguf_family
from tightfit.models.family import Family, GgufLayout, Rearrangement
from tightfit.models.gguf import GgufTensor, read_gguf_header

if TYPE_CHECKING:
    from torch import Tensor


PLAIN = {dtype.gguf_name.upper(): dtype.torch_name for dtype in PLAIN_DTYPES}
"""Unquantized formats and torch's names of them."""


class GgufFile:
    """Reads metadata at once, tensors on demand, one in memory at a time."""

    def __init__(self, path: Path) -> None:
        # gguf's own reader takes seconds for a vocabulary.
        header = read_gguf_header(path, keeps_arrays=True)
        self.path = path
        self.metadata: dict[str, Any] = {**header.metadata}
        self.tensors: dict[str, _Place] = {}
        for tensor in header.tensors:
            place = self.tensors[tensor.name] = _Place(tensor, path)
            if place.start + place.num_bytes > header.file_bytes:
                raise _damaged(path, f"{tensor.name} lies beyond its end")
        if int(self.metadata.get("split.count", 1)) > 1:
            raise InvalidInputError(
                f"{path} is one part of several.",
                remedy="put them together: llama-gguf-split --merge FIRST-PART OUT.gguf",
            )

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def family(self) -> Family | None:
        """The family, where we can convert it ourselves."""
        found = find_gguf_family(self.architecture)
        layout = None if found is None else found.gguf
        is_ours = layout is not None and layout.read_settings and not self.get("expert_count")
        return found if is_ours else None

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture, like `attention.head_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def read(self, name: str) -> Tensor:
        """The values: fp32, or 16-bit if stored so; quantized ones are dequantized."""
        import gguf
        import numpy as np
        import torch

        place = self.tensors[name]
        buffer = bytearray(place.num_bytes)
        with self.path.open("rb") as stream:
            stream.seek(place.start)
            if stream.readinto(buffer) != place.num_bytes:
                raise InvalidInputError(
                    f"{self.path} is cut short at {name}.", remedy="fetch or convert the file again"
                )
        if place.kind.name in PLAIN:
            dtype = getattr(torch, PLAIN[place.kind.name])
            return torch.frombuffer(buffer, dtype=dtype).reshape(place.shape)
        rows = np.frombuffer(buffer, dtype=np.uint8).reshape(*place.shape[:-1], -1)
        try:
            unpacked = gguf.quants.dequantize(rows, place.kind)
        except NotImplementedError as error:
            raise InvalidInputError(
                f"{self.path} holds {name} as {place.kind.name}, which cannot be unpacked here.",
                remedy="convert the model that it was made from",
            ) from error
        return torch.from_numpy(unpacked).reshape(place.shape)


class _Place:
    """The position and format of a tensor."""

    def __init__(self, tensor: GgufTensor, path: Path) -> None:
        import gguf

        try:
            self.kind = gguf.GGMLQuantizationType(tensor.type_id)
            block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        except (ValueError, KeyError) as error:
            raise _damaged(
                path, f"{tensor.name} is of the unknown type {tensor.type_id}"
            ) from error
        if math.prod(tensor.shape[:1]) % block:
            raise _damaged(path, f"the rows of {tensor.name} are no whole blocks")
        self.shape = tensor.shape[::-1]
        self.start = tensor.start
        self.num_bytes = tensor.num_elements // block * block_bytes


def _damaged(path: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"{path} is cut short or damaged: {why}.", remedy="fetch or convert the file again"
    )


# Tensor names and layouts: the writer and the reader ask the same functions.

_CONV_ENDINGS = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


def make_name_lookup(family: Family, num_layers: int) -> Callable[[str], str | None]:
    """From transformers' names of tensors to llama.cpp's, by gguf's own map."""
    import gguf

    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names: Any = gguf.get_tensor_name_map(known[family.architecture], num_layers)
    prefix = family.gguf.old_prefix if family.gguf is not None else ""

    def look_up(name: str) -> str | None:
        if prefix == "added" and not name.startswith(("transformer.", "lm_head.")):
            name = f"transformer.{name}"
        elif prefix == "removed":
            name = name.removeprefix("transformer.")
        name += ".weight" if name.endswith(".sinks") else ""
        # Of two names for the same part of a layer, the map has all forms of one alone.
        spellings = (name, name.replace(".block_sparse_moe.", ".mlp."))
        found = (names.get_name(spelt, try_suffixes=(".weight", ".bias")) for spelt in spellings)
        return next(filter(None, found), None)

    return look_up


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """A change of a tensor on its way from transformers to llama.cpp, and back."""

    apply: Callable[[Tensor], Tensor]
    undo: Callable[[Tensor], Tensor]


def changed_shape(change: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor after the change, found without values."""
    import torch

    return tuple(change(torch.empty(shape, device="meta")).shape)


def find_layout_change(layout: GgufLayout, name: str, config: Any) -> LayoutChange | None:
    """The change of the tensor that transformers calls `name`; None: unchanged.

    Gemma's norms lose their last bit in the round trip.
    """
    kind = layout.rearrangement
    if kind is Rearrangement.ROTARY and name.endswith((".q_proj.weight", ".q_proj.bias")):
        return _rotary(int(config.num_attention_heads))
    if kind is Rearrangement.ROTARY and name.endswith((".k_proj.weight", ".k_proj.bias")):
        return _rotary(int(config.num_key_value_heads))
    if kind is Rearrangement.NORM_PLUS_ONE and name.endswith("norm.weight"):
        return LayoutChange(_add_one, lambda x: x.float() - 1)
    if kind is Rearrangement.TRANSPOSED and name.endswith(_CONV_ENDINGS):

        def transpose(x: Tensor) -> Tensor:
            return x.t().contiguous()

        return LayoutChange(transpose, transpose)
    if kind is Rearrangement.GROUPED_QKV and ".query_key_value." in name:
        heads, kv_heads = int(config.num_attention_heads), layout.count_kv_heads(config)
        return LayoutChange(
            lambda x: _ungroup(x, heads, kv_heads), lambda x: _regroup(x, heads, kv_heads)
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """Where a stored tensor, or a part of it, goes."""

    name: str
    """As gguf's map knows it."""
    index: int | None = None
    """Its place in a stack, where the file has one tensor for all experts or heads."""
    take: Callable[[Tensor], Tensor] | None = None
    """The change on the way."""
    changes_columns: bool = False
    """It moves inputs, not outputs, which an adapter has in its other matrix."""
    takes_adapter: bool = True
    """llama.cpp adds an adapter's change to it."""


_STACKED = re.compile(r"(.+\.(?:experts|q_layernorm|k_layernorm))\.(?:norms\.)?(\d+)\.(.+)")
_DELTA_NET_PART = re.compile(
    r"\.linear_attn\.(in_proj_qkv|in_proj_z|in_proj_a|in_proj_b|A_log|dt_proj|conv1d|out_proj)\b"
)
_GATE_AND_UP = re.compile(r"(.+\.)(?:experts\.gate_up_proj|input_linear)(\.weight|_bias)?")
_SHARED_MLP = re.compile(r"(.+\.)shared_mlp\.input_linear\.weight")
_WITHOUT_ADAPTERS = (".q_a_proj.weight", ".q_b_proj.weight", ".kv_a_proj_with_mqa.weight")
"""Of latent attention: llama.cpp multiplies with them as they are."""
_CHOICE = "e_score_correction"
"""Of the bias by which experts are chosen and not weighted."""


def find_parts(layout: GgufLayout, name: str, config: Any) -> tuple[TensorPart, ...]:
    """Where the tensor goes that a checkpoint calls `name`: mostly to one tensor, as a whole."""
    kind = layout.rearrangement
    parts = _find_stacked(name, alternates=kind is Rearrangement.ALTERNATING_EXPERTS)
    parts = parts or _find_renamed(name)
    if kind is Rearrangement.STATE_SPACE:
        parts = parts or _find_state_space_part(name)
    if parts is not None:
        return parts
    if kind is Rearrangement.LATENT and name.endswith(".kv_b_proj.weight"):
        return _split_latent(name, config)
    if kind is Rearrangement.LATENT and name.endswith(_WITHOUT_ADAPTERS):
        return (TensorPart(name=name, takes_adapter=False),)
    if kind in (Rearrangement.DELTA_NET, Rearrangement.TILED_DELTA_NET):
        parts = _find_delta_net_parts(name, config)
        is_tiled = kind is Rearrangement.TILED_DELTA_NET
        return tuple(_tile(part, config) for part in parts) if is_tiled else parts
    change = find_layout_change(layout, name, config)
    return (TensorPart(name=name, take=None if change is None else change.apply),)


def _find_stacked(name: str, *, alternates: bool) -> tuple[TensorPart, ...] | None:
    """Of experts, which lie in one tensor of three dimensions per matrix.

    Checkpoints have them one by one, or stacked with gate and up in one tensor. Source:
    `modify_tensors` of Qwen2MoeModel, GptOssModel and GraniteMoeModel in ggml-org/llama.cpp,
    `conversion/`.
    """
    if found := _STACKED.fullmatch(name):
        return (TensorPart(name=f"{found[1]}.{found[3]}", index=int(found[2])),)
    if found := _SHARED_MLP.fullmatch(name):
        start = f"{found[1]}mlp.shared_mlp."
        return tuple(
            TensorPart(name=f"{start}{part}.weight", take=_half_of_rows(at))
            for at, part in enumerate(("gate_proj", "up_proj"))
        )
    if found := _GATE_AND_UP.fullmatch(name):
        ending = ".bias" if found[2] == "_bias" else ".weight"
        return tuple(
            TensorPart(
                name=f"{found[1]}experts.{part}{ending}",
                take=_alternating(at, ending) if alternates else _half(at),
            )
            for at, part in enumerate(("gate_proj", "up_proj"))
        )
    if name.endswith(".experts.down_proj"):
        take = _transposed if alternates else None
        return (TensorPart(name=f"{name}.weight", take=take),)
    return None


def _find_renamed(name: str) -> tuple[TensorPart, ...] | None:
    """Of tensors that gguf's map has by other names."""
    if name.endswith(".experts.down_proj_bias"):
        return (TensorPart(name=f"{name.removesuffix('_bias')}.bias"),)
    if name.endswith(".shared_mlp.output_linear.weight"):
        start = name.removesuffix("shared_mlp.output_linear.weight")
        return (TensorPart(name=f"{start}mlp.shared_mlp.down_proj.weight"),)
    if name.endswith(f".{_CHOICE}_bias"):
        return (TensorPart(name=f"{name.removesuffix('_bias')}.bias"),)
    if name.endswith(".conv.conv.weight"):
        return (TensorPart(name=name, take=_drop_channel),)
    return None


def _find_state_space_part(name: str) -> tuple[TensorPart, ...] | None:
    """Source: `modify_tensors` of Mamba2Model in ggml-org/llama.cpp, `conversion/mamba.py`."""
    changes = {
        ".A_log": lambda x: _decay(x)[:, None],
        ".D": lambda x: x[:, None],
        ".conv1d.weight": _drop_channel,
        ".mixer.norm.weight": lambda x: x[None],
        ".mamba.norm.weight": lambda x: x[None],
        ".dt_bias": None,
    }
    for ending, take in changes.items():
        if name.endswith(ending):
            return (TensorPart(name=name.replace(".dt_bias", ".dt_proj.bias"), take=take),)
    return None


def _find_delta_net_parts(name: str, config: Any) -> tuple[TensorPart, ...]:
    """Source: `modify_tensors` of Qwen3NextModel in ggml-org/llama.cpp, `conversion/qwen.py`."""
    if name.startswith("mtp."):
        return ()  # a head that predicts several tokens, which transformers leaves out too
    if name.endswith(".in_proj_qkvz.weight"):
        start = name.removesuffix("qkvz.weight")
        return (
            TensorPart(name=f"{start}qkv.weight", take=lambda x: _ungroup_delta(x, config)[0]),
            TensorPart(name=f"{start}z.weight", take=lambda x: _ungroup_delta(x, config)[1]),
        )
    take: Callable[[Tensor], Tensor] | None = None
    if name.endswith(".A_log"):
        take = _decay
    elif name.endswith(".conv1d.weight"):
        take = _drop_channel
    elif name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight"):
        take = _add_one
    return (TensorPart(name=name.replace(".dt_bias", ".dt_proj.bias"), take=take),)


def _tile(part: TensorPart, config: Any) -> TensorPart:
    """Source: `_LinearAttentionVReorderBase` in ggml-org/llama.cpp, `conversion/qwen.py`."""
    heads, all_heads = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
    width, before = int(config.linear_value_head_dim), 2 * heads * int(config.linear_key_head_dim)
    found = _DELTA_NET_PART.search(part.name)
    if found is None:
        return part
    kind = found[1]
    unit = width if kind in ("in_proj_qkv", "in_proj_z", "conv1d", "out_proj") else 1
    start = before if kind in ("in_proj_qkv", "conv1d") else 0

    def tile(values: Tensor) -> Tensor:
        import torch

        values = values if part.take is None else part.take(values)
        rows = values.t() if kind == "out_proj" else values
        grouped = rows[start:].reshape(heads, all_heads // heads, unit, *rows.shape[1:])
        moved = torch.cat((rows[:start], grouped.transpose(0, 1).reshape(rows[start:].shape)))
        return moved.t() if kind == "out_proj" else moved

    return replace(part, take=tile, changes_columns=kind == "out_proj")


def _decay(values: Tensor) -> Tensor:
    return -values.float().exp()


def _drop_channel(values: Tensor) -> Tensor:
    return values.squeeze(1)


def _add_one(values: Tensor) -> Tensor:
    return values.float() + 1


def _ungroup_delta(values: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """From query, key, values, gates per key head to all queries, keys and values; all gates."""
    import torch

    heads, width = int(config.linear_num_key_heads), int(config.linear_key_head_dim)
    wide = int(config.linear_num_value_heads) // heads * int(config.linear_value_head_dim)
    groups = values.reshape(heads, 2 * width + 2 * wide, *values.shape[1:])
    parts = torch.split(groups, [width, width, wide, wide], dim=1)
    *rest, gates = (part.reshape(-1, *values.shape[1:]) for part in parts)
    return torch.cat(rest), gates


def _split_latent(name: str, config: Any) -> tuple[TensorPart, ...]:
    """Source: `modify_tensors` of DeepseekV2Model in ggml-org/llama.cpp, `conversion/deepseek.py`.

    The matrix of the keys is transposed: llama.cpp multiplies the queries with it.
    """
    heads, width = int(config.num_attention_heads), int(config.qk_nope_head_dim)

    def take_keys(values: Tensor) -> Tensor:
        return _transposed(values.reshape(heads, -1, values.shape[-1])[:, :width])

    def take_values(values: Tensor) -> Tensor:
        return values.reshape(heads, -1, values.shape[-1])[:, width:]

    return tuple(
        TensorPart(name=name.replace(".kv_b_", f".{kind}_b_"), take=take, takes_adapter=False)
        for kind, take in (("k", take_keys), ("v", take_values))
    )


def _half_of_rows(at: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.chunk(2)[at]


def _half(at: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.chunk(2, dim=1)[at]


def _alternating(at: int, ending: str) -> Callable[[Tensor], Tensor]:
    if ending == ".bias":
        return lambda x: x[:, at::2]
    return lambda x: _transposed(x[:, :, at::2])


def _transposed(values: Tensor) -> Tensor:
    return values.transpose(-1, -2)


def _rotary(num_heads: int) -> LayoutChange:
    return LayoutChange(
        lambda x: interleave_rotary(x, num_heads), lambda x: split_rotary(x, num_heads)
    )


def interleave_rotary(values: Tensor, num_heads: int) -> Tensor:
    """From rotary pairs half a head apart (transformers) to neighbours (Meta, llama.cpp)."""
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, 2, half, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def split_rotary(values: Tensor, num_heads: int) -> Tensor:
    """From rotary pairs side by side (Meta, llama.cpp) to half a head apart (transformers)."""
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, half, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def _ungroup(values: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """From queries, key and value per group of heads (Bloom: one head) to one piece each."""
    import torch

    head_dim = values.shape[0] // (num_heads + 2 * num_kv_heads)
    per_group = num_heads // num_kv_heads + 2
    groups = values.reshape(num_kv_heads, per_group, head_dim, *values.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return torch.cat([part.reshape(-1, *values.shape[1:]) for part in parts])


def _regroup(values: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """The inverse of `_ungroup`."""
    import torch

    head_dim = values.shape[0] // (num_heads + 2 * num_kv_heads)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    parts = [
        part.reshape(num_kv_heads, -1, head_dim, *values.shape[1:])
        for part in torch.split(values, sizes)
    ]
    return torch.cat(parts, dim=1).reshape(values.shape)


# Rotary positions in GGUF: base, scaling, and the tensors of frequency factors.

_META_CONTEXT = 2**13


def get_rope(config: Any) -> dict[str, Any]:
    """The rotary settings of a transformers 5 config; of its full-attention layers."""
    stated = getattr(config, "rope_parameters", None) or {}
    found = stated.get("full_attention", stated)
    return dict(found) if isinstance(found, dict) else {}


def _kind(rope: dict[str, Any]) -> str:
    kind = str(rope.get("rope_type", rope.get("type", "default"))).lower()
    return "longrope" if kind == "su" else kind


def has_rope_factors(config: Any) -> bool:
    """Whether the file needs tensors for scaling that differs by frequency."""
    return _kind(get_rope(config)) in ("llama3", "longrope")


def write_rope(writer: Any, config: Any) -> list[str]:
    """Write base and scaling; returns warnings for the user."""
    import gguf

    rope = get_rope(config)
    kind = _kind(rope)
    if rope.get("rope_theta") is not None:
        writer.add_rope_freq_base(_find_theta(config, rope))
    if kind in ("default", "llama3"):  # llama3: see `make_rope_tensors`
        return []
    if kind == "dynamic" and rope.get("alpha"):
        return []
    if kind == "dynamic":
        return [
            "Its rotary positions change with the length (dynamic), which llama.cpp does not do: "
            f"answers differ beyond {config.max_position_embeddings:,} tokens."
        ]
    if kind not in ("linear", "yarn", "longrope"):
        raise InvalidInputError(
            f"Rotary positions of the kind {kind} cannot be written as GGUF.",
            remedy="use the model with --engine transformers",
        )
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    context = int(
        rope.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
    )
    scale = rope.get("attention_factor")
    if kind == "longrope":
        growth = config.max_position_embeddings / context
        usual = math.sqrt(1 + math.log(growth) / math.log(context)) if growth > 1 else 1.0
        writer.add_rope_scaling_orig_ctx_len(context)
        writer.add_rope_scaling_attn_factors(float(usual if scale is None else scale))
        return []
    factor = float(rope["factor"])
    writer.add_rope_scaling_factor(factor)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(context)
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(float(rope["beta_fast"]))
        if rope.get("beta_slow") is not None:
            writer.add_rope_scaling_yarn_beta_slow(float(rope["beta_slow"]))
        if scale is not None:
            writer.add_rope_scaling_attn_factors(float(scale) / _own_yarn_scale(factor))
        if not rope.get("truncate", True):
            return [
                "Its rotary positions go from one scaling to the other between fractions of a "
                "dimension (YaRN with truncate: false); llama.cpp rounds these bounds, so answers "
                "may differ a little."
            ]
    return []


def _find_theta(config: Any, rope: dict[str, Any]) -> float:
    """Hunyuan's `alpha` stretches it once, whatever the length."""
    theta, alpha = float(rope["rope_theta"]), rope.get("alpha")
    if _kind(rope) != "dynamic" or not alpha:
        return theta
    width = int(config.head_dim or config.hidden_size // config.num_attention_heads)
    return float(theta * float(alpha) ** (width / (width - 2)))


def _own_yarn_scale(factor: float) -> float:
    """llama.cpp multiplies the stored scale of attention by this."""
    return 1 + 0.1 * math.log(max(factor, 1.0))


def make_rope_tensors(config: Any, head_dim: int) -> dict[str, Tensor]:
    """The tensors for scaling that differs by frequency."""
    import torch

    rope = get_rope(config)
    found: dict[str, list[float]] = {}
    if _kind(rope) == "llama3":
        found = {"rope_freqs.weight": llama3_factors(rope, head_dim)}
    elif _kind(rope) == "longrope":
        found = {f"rope_factors_{at}.weight": rope[f"{at}_factor"] for at in ("long", "short")}
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in found.items()}


def llama3_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """The factor by which each pair's frequency is divided: 1, `factor`, or a value in between.

    Source: `apply_scaling` in Meta's llama-models (llama3/reference_impl/model.py).
    """
    base, factor = float(rope["rope_theta"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    context = float(rope["original_max_position_embeddings"])
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * math.pow(base, 2 * pair / head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return factors


def read_rope(file: GgufFile, head_dim: int, default_theta: float) -> dict[str, Any]:
    """transformers' rotary settings from a GGUF file."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(file.get("rope.freq_base", default_theta)),
    }
    width = int(file.get("rope.dimension_count", head_dim))
    if width != head_dim:
        rope["partial_rotary_factor"] = width / head_dim
    scale = file.get("rope.scaling.attn_factor")
    context = file.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in file.tensors:
        return rope | _read_llama3(file, rope["rope_theta"], head_dim)
    if "rope_factors_long.weight" in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": file.read("rope_factors_long.weight").tolist(),
            "short_factor": file.read("rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": int(context),
        }
        return rope if scale is None else rope | {"attention_factor": float(scale)}
    kind = str(file.get("rope.scaling.type", "none"))
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(file.get("rope.scaling.factor", 1.0))}
    if kind == "yarn":
        if context:
            rope["original_max_position_embeddings"] = int(context)
        for name in ("beta_fast", "beta_slow"):
            value = file.get(f"rope.scaling.yarn_{name}")
            if value is not None:
                rope[name] = float(value)
        if scale is not None:
            rope["attention_factor"] = float(scale) * _own_yarn_scale(rope["factor"])
    return rope


def _read_llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The rope settings with these factors: Meta's bounds, with its context or another."""
    import torch

    stored = file.read("rope_freqs.weight").float()
    for context in (_META_CONTEXT, *(2**power for power in range(5, 20))):
        settings = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": round(float(stored.max()), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        computed = torch.tensor(llama3_factors(settings, head_dim))
        if computed.shape == stored.shape and torch.allclose(computed, stored, rtol=1e-4):
            return settings
    raise InvalidInputError(
        f"The rotary factors in {file.path} are not those of a Llama 3, and no config can express "
        "them.",
        remedy="name the model's own folder instead",
    )
