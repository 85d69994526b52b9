"""GGUF metadata to and from a transformers config, including rotary embeddings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError
from tightfit.runtime.gguf.families import FAMILIES
from tightfit.runtime.gguf.file import GgufFile

if TYPE_CHECKING:
    from torch import Tensor


# Rotary positions in GGUF: base, scaling, and the tensors of frequency factors.


def read_rope(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    """The rotary settings of one kind of layer, as transformers 5 has them."""
    stated = getattr(config, "rope_parameters", None) or {}
    found = stated.get(layers, stated)
    return dict(found) if isinstance(found, dict) else {}


def add_rope(writer: Any, config: Any) -> list[str]:
    """Write base and scaling; returns warnings for the user."""
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
    """The tensors for scaling that differs by frequency."""
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
    """The factor by which each pair's frequency is divided."""
    return [_llama3_factor(rope, head_dim, pair) for pair in range(head_dim // 2)]


def _llama3_factor(rope: dict[str, Any], head_dim: int, pair: int) -> float:
    """1, `factor`, or a value in between.

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


_MODEL_TYPES = {
    family.architecture: model_type
    for model_type, family in FAMILIES.items()
    if model_type != "mistral"  # its files say llama, and compute alike
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "falcon": "FalconForCausalLM",
    "bloom": "BloomForCausalLM",
}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


def is_known(file: GgufFile) -> bool:
    """Whether `read_config` understands this architecture."""
    return file.architecture in _MODEL_TYPES and not file.get("expert_count")


def read_config(file: GgufFile, special_ids: dict[str, int]) -> tuple[str, Any]:
    """The family and a transformers config."""
    from transformers import AutoConfig

    model_type = _MODEL_TYPES.get(file.architecture)
    if model_type is None or not is_known(file):
        kind = f"{file.architecture} with experts" if model_type else file.architecture
        raise InvalidInputError(
            f"{file.path} is of the architecture {kind or 'unnamed'}, which cannot be converted.",
            remedy=f"name a file of one of: {', '.join(sorted(_MODEL_TYPES))}",
        )
    if model_type in ("gpt2", "bloom"):
        settings = _old_settings(model_type, file)
    elif model_type == "falcon":
        settings = _falcon_settings(file)
    else:
        settings = _usual_settings(model_type, file)
    settings |= {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "architectures": [_CLASSES[model_type]],
        **{f"{name}_token_id": special_ids.get(name) for name in ("bos", "eos", "pad")},
    }
    return model_type, AutoConfig.for_model(model_type, **settings)


def _round(value: float) -> float:
    """1e-05 again from 9.999999747e-06, which 32 bits made of it."""
    return float(f"{float(value):.6g}")


def _usual_settings(model_type: str, file: GgufFile) -> dict[str, Any]:
    heads = int(file.get("attention.head_count"))
    hidden = int(file.get("embedding_length"))
    settings: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": int(file.get("feed_forward_length")),
        "num_hidden_layers": int(file.get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.get("attention.head_count_kv", heads)),
        "max_position_embeddings": int(file.get("context_length")),
        "rms_norm_eps": _round(file.get("attention.layer_norm_rms_epsilon")),
    }
    head_dim = int(file.get("attention.key_length", hidden // heads))
    if model_type != "phi3":
        settings["head_dim"] = head_dim
    if model_type == "llama":
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        settings["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if model_type == "qwen3":
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if model_type.startswith("gemma"):
        settings |= _gemma_settings(model_type, file, hidden // heads, head_dim)
    rope = _read_rope(model_type, file, head_dim)
    if model_type == "phi3":
        window = int(file.get("attention.sliding_window", 0))
        settings["sliding_window"] = window or None
        settings["original_max_position_embeddings"] = rope.get(
            "original_max_position_embeddings", settings["max_position_embeddings"]
        )
    settings["rope_parameters"] = rope
    if model_type == "gemma3_text":
        local = float(file.get("rope.freq_base_swa", 10_000.0))
        sliding = {"rope_type": "default", "rope_theta": local}
        settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
    return settings


def _gemma_settings(
    model_type: str, file: GgufFile, usual_dim: int, head_dim: int
) -> dict[str, Any]:
    if model_type == "gemma":
        return {}
    num_layers = int(file.get("block_count"))
    is_27b = num_layers == _LAYERS_OF_27B[model_type]
    final = file.get("final_logit_softcapping")
    settings: dict[str, Any] = {
        "query_pre_attn_scalar": usual_dim if is_27b else head_dim,
        "final_logit_softcapping": float(final) if final else None,
    }
    period = 2
    if model_type == "gemma2":
        cap = file.get("attn_logit_softcapping")
        settings["attn_logit_softcapping"] = float(cap) if cap else None
    else:
        period = int(file.get("attention.sliding_window_pattern", 6))
    window = file.get("attention.sliding_window")
    kinds = ("sliding_attention", "full_attention")
    settings["layer_types"] = [
        kinds[1] if not window or at % period == period - 1 else kinds[0]
        for at in range(num_layers)
    ]
    return settings | ({"sliding_window": int(window)} if window else {})


def _old_settings(model_type: str, file: GgufFile) -> dict[str, Any]:
    width, depth = int(file.get("embedding_length")), int(file.get("block_count"))
    heads = int(file.get("attention.head_count"))
    settings: dict[str, Any] = {
        "n_layer": depth,
        "n_head": heads,
        "layer_norm_epsilon": _round(file.get("attention.layer_norm_epsilon")),
    }
    if model_type == "bloom":
        return settings | {"hidden_size": width, "seq_length": int(file.get("context_length"))}
    inner = int(file.get("feed_forward_length"))
    return settings | {
        "n_embd": width,
        "n_positions": int(file.get("context_length")),
        "n_inner": None if inner == 4 * width else inner,
    }


def _falcon_settings(file: GgufFile) -> dict[str, Any]:
    heads, hidden = int(file.get("attention.head_count")), int(file.get("embedding_length"))
    num_kv_heads = int(file.get("attention.head_count_kv", 1))
    has_two_norms = "blk.0.attn_norm_2.weight" in file.tensors
    is_grouped = has_two_norms or 1 < num_kv_heads < heads
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": int(file.get("feed_forward_length")),
        "num_hidden_layers": int(file.get("block_count")),
        "num_attention_heads": heads,
        "num_kv_heads": num_kv_heads,
        "new_decoder_architecture": is_grouped,
        "num_ln_in_parallel_attn": (2 if has_two_norms else 1) if is_grouped else None,
        "multi_query": num_kv_heads == 1,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "layer_norm_epsilon": _round(file.get("attention.layer_norm_epsilon")),
        "max_position_embeddings": int(file.get("context_length")),
        "rope_parameters": _read_rope("falcon", file, hidden // heads),
    }


def _read_rope(model_type: str, file: GgufFile, head_dim: int) -> dict[str, Any]:
    usual = 1_000_000.0 if model_type == "gemma3_text" else 10_000.0
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(file.get("rope.freq_base", usual)),
    }
    width = int(file.get("rope.dimension_count", head_dim))
    if width != head_dim:
        rope["partial_rotary_factor"] = width / head_dim
    if "rope_freqs.weight" in file.tensors:
        return rope | _read_llama3(file, rope["rope_theta"], head_dim)
    if "rope_factors_long.weight" in file.tensors:
        return rope | _read_longrope(file)
    kind = str(file.get("rope.scaling.type", "none"))
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(file.get("rope.scaling.factor", 1.0))}
    if kind == "yarn":
        rope |= _read_yarn(file, rope["factor"])
    return rope


def _read_yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    context = file.get("rope.scaling.original_context_length")
    if context:
        found["original_max_position_embeddings"] = int(context)
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = file.get(f"rope.scaling.{theirs}")
        if value is not None:
            found[ours] = float(value)
    scale = file.get("rope.scaling.attn_factor")
    if scale is not None:
        found["attention_factor"] = float(scale) * (1 + 0.1 * math.log(max(factor, 1.0)))
    return found


def _read_longrope(file: GgufFile) -> dict[str, Any]:
    stated = file.get("rope.scaling.attn_factor")
    return {
        "rope_type": "longrope",
        "long_factor": file.read("rope_factors_long.weight").tolist(),
        "short_factor": file.read("rope_factors_short.weight").tolist(),
        "original_max_position_embeddings": int(file.get("rope.scaling.original_context_length")),
        **({"attention_factor": float(stated)} if stated is not None else {}),
    }


def _read_llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The rope settings with these factors: Meta's bounds, with its context or another."""
    import torch

    stored = file.read("rope_freqs.weight").float()
    largest = round(float(stored.max()), 4)
    for power in (13, *range(5, 20)):
        settings = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": largest,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2**power,
        }
        computed = torch.tensor(llama3_factors(settings, head_dim))
        if computed.shape == stored.shape and torch.allclose(computed, stored, rtol=1e-4):
            return settings
    raise InvalidInputError(
        f"The rotary factors in {file.path} are not those of a Llama 3, and no config can express "
        "them.",
        remedy="name the model's own folder instead",
    )
