"""Rotary positions in GGUF: base, scaling, and the tensors of frequency factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor


def read_rope(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    """The rotary settings of one kind of layer, in the form transformers 5 gives them."""
    stated = getattr(config, "rope_parameters", None) or {}
    found = stated.get(layers, stated)
    return dict(found) if isinstance(found, dict) else {}


def add_rope(writer: Any, config: Any) -> list[str]:
    """Write base and scaling; returns what a user should know."""
    import gguf

    rope = read_rope(config)
    base = rope.get("rope_theta")
    if base is not None:
        writer.add_rope_freq_base(float(base))
    kind = str(rope.get("rope_type", rope.get("type", "default"))).lower()
    if kind in ("default", "llama3"):  # llama3: see `make_rope_tensors`
        return []
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        return []
    if kind == "yarn":
        _add_yarn(writer, rope, config)
        return []
    if kind in ("longrope", "su"):
        _add_longrope(writer, rope, config)
        return []
    if kind == "dynamic":
        return [
            "Its rotary positions change with the length (dynamic), which llama.cpp does not do: "
            f"answers differ beyond {config.max_position_embeddings:,} tokens."
        ]
    raise InvalidInputError(
        f"Rotary positions of the kind {kind} cannot be written as GGUF.",
        remedy="use the model with --engine transformers",
    )


def make_rope_tensors(config: Any, head_dim: int) -> dict[str, Tensor]:
    """Tensors that stand for scaling that differs by frequency."""
    import torch

    rope = read_rope(config)
    kind = str(rope.get("rope_type", "default")).lower()
    if kind == "llama3":
        factors = llama3_factors(rope, head_dim)
        return {"rope_freqs.weight": torch.tensor(factors, dtype=torch.float32)}
    if kind in ("longrope", "su"):
        return {
            f"rope_factors_{length}.weight": torch.tensor(
                rope[f"{length}_factor"], dtype=torch.float32
            )
            for length in ("long", "short")
        }
    return {}


def llama3_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """By how much each pair's frequency is lowered."""
    return [_llama3_factor(rope, head_dim, pair) for pair in range(head_dim // 2)]


def _llama3_factor(rope: dict[str, Any], head_dim: int, pair: int) -> float:
    """Not at all, by `factor`, or in between.

    Source: `apply_scaling` in Meta's llama-models (llama3/reference_impl/model.py).
    """
    base, factor = float(rope["rope_theta"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    context = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi * math.pow(base, 2 * pair / head_dim)
    if wavelength < context / high:
        return 1.0
    if wavelength > context / low:
        return factor
    smooth = (context / wavelength - low) / (high - low)
    return 1.0 / ((1 - smooth) / factor + smooth)


def _original_context(rope: dict[str, Any], config: Any) -> int:
    stated = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(stated or config.max_position_embeddings)


def _add_yarn(writer: Any, rope: dict[str, Any], config: Any) -> None:
    import gguf

    factor = float(rope["factor"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(_original_context(rope, config))
    if rope.get("beta_fast") is not None:
        writer.add_rope_scaling_yarn_beta_fast(float(rope["beta_fast"]))
    if rope.get("beta_slow") is not None:
        writer.add_rope_scaling_yarn_beta_slow(float(rope["beta_slow"]))
    if rope.get("attention_factor") is not None:
        # llama.cpp multiplies its own 1 + 0.1 ln(factor) by this.
        own = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
        writer.add_rope_scaling_attn_factors(float(rope["attention_factor"]) / own)


def _add_longrope(writer: Any, rope: dict[str, Any], config: Any) -> None:
    import gguf

    context = _original_context(rope, config)
    scale = config.max_position_embeddings / context
    stated = rope.get("attention_factor")
    usual = math.sqrt(1 + math.log(scale) / math.log(context)) if scale > 1 else 1.0
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(context)
    writer.add_rope_scaling_attn_factors(float(usual if stated is None else stated))
