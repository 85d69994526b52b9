"""From a GGUF header to a ModelSpec, by way of the config that transformers would have."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.models.config import read_config
from tightfit.models.gguf import GgufHeader, LongArray, MetadataValue, read_gguf_header
from tightfit.models.spec import ModelSpec

_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gptneox": "gpt_neox",
    "gpt-oss": "gpt_oss",
    "phi2": "phi",
    "qwen3moe": "qwen3_moe",
    "starcoder": "gpt_bigcode",
}
"""Where llama.cpp's name of an architecture differs from transformers' `model_type`."""

_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "use_parallel_residual": "use_parallel_residual",
}
_NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_UNPACKED = {0: Dtype.FP32, 1: Dtype.FP16, 30: Dtype.BF16}


def read_gguf_model(path: Path) -> ModelSpec:
    """Read a GGUF file's architecture. The tensors in the file decide the parameter count."""
    header = read_gguf_header(path)
    spec = read_config(_as_config(header, path), name=path.stem, source=str(path))
    spec, warnings = _with_counted_tensors(spec, header)
    dtype, dtype_warnings = _stored_dtype(header)
    return spec.model_copy(
        update={
            "warnings": (*spec.warnings, *warnings, *dtype_warnings),
            "stored_dtype": dtype,
            "file_bytes": header.file_bytes,
        }
    )


def _as_config(header: GgufHeader, path: Path) -> dict[str, object]:
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise InvalidInputError(
            f"{path} does not say `general.architecture`.", remedy="convert the file again"
        )
    config: dict[str, object] = {}
    for key, name in _KEYS.items():
        value = header.metadata.get(f"{architecture}.{key}")
        if value is not None:
            config[name] = _one_number(value, key, path)
    config["model_type"] = _MODEL_TYPES.get(architecture, architecture)
    for name in ("num_experts", "sliding_window"):  # llama.cpp writes 0 for none
        if config.get(name) == 0:
            del config[name]
    if architecture == "llama" and "num_experts" in config:
        config["model_type"] = "mixtral"
    names = {tensor.name for tensor in header.tensors}
    config["vocab_size"] = _vocab_size(header, architecture)
    config["tie_word_embeddings"] = "output.weight" not in names
    _add_family_flags(config, names)
    return config


def _add_family_flags(config: dict[str, object], names: set[str]) -> None:
    """What transformers keeps as flags shows in a GGUF as tensors that are there or not."""
    kind = config["model_type"]
    has_bias = bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & names)
    if kind == "falcon":
        grouped = "blk.0.attn_norm_2.weight" in names
        config["new_decoder_architecture"] = grouped
        config["multi_query"] = grouped or config.get("num_key_value_heads") == 1
        config["num_kv_heads"] = config.get("num_key_value_heads")
        config["parallel_attn"] = "blk.0.ffn_norm.weight" not in names
        config["bias"] = has_bias
    elif kind == "stablelm":
        config["use_qkv_bias"] = has_bias
        config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in names
    elif kind == "gpt_bigcode":
        config["multi_query"] = config.get("num_key_value_heads", 1) == 1
    elif kind == "qwen":
        config["intermediate_size"] = _doubled(config.get("intermediate_size"))
    elif kind == "chatglm":
        config["multi_query_attention"] = True
        config["multi_query_group_num"] = config.get("num_key_value_heads")
        config["add_qkv_bias"] = has_bias
    else:
        config["attention_bias"] = has_bias


def _doubled(value: object) -> object:
    return value * 2 if isinstance(value, int) else value


def _one_number(value: MetadataValue, key: str, path: Path) -> object:
    """Some files give a number per layer; layers that differ are beyond a run of equal blocks."""
    if not isinstance(value, tuple):
        return value
    if len(set(value)) == 1:
        return value[0]
    raise InvalidInputError(
        f"{path}: `{key}` differs from layer to layer, which cannot be planned yet.",
        remedy="name the model's config.json, or another model",
    )


def _vocab_size(header: GgufHeader, architecture: str) -> object:
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[1]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, LongArray):
        return tokens.length
    return header.metadata.get(f"{architecture}.vocab_size")


def _with_counted_tensors(spec: ModelSpec, header: GgufHeader) -> tuple[ModelSpec, list[str]]:
    """Make the spec's count that of the file, and say so where the two differ."""
    split = header.metadata.get("split.count", 1)
    if not header.tensors or (isinstance(split, int) and split > 1):
        return spec, ["The file holds a part of the tensors; the count is that of its metadata."]
    counted = sum(t.num_elements for t in header.tensors if t.name not in _NOT_PARAMETERS)
    difference = counted - spec.num_params
    if difference == 0:
        return spec, []
    warning = (
        f"The file's tensors hold {counted:,} parameters; its metadata lead to {spec.num_params:,}."
    )
    outer = max(0, spec.outer_params + difference)
    return spec.model_copy(update={"outer_params": outer}), [warning]


def _stored_dtype(header: GgufHeader) -> tuple[Dtype | None, list[str]]:
    """The format most matrix elements are in."""
    elements: Counter[int] = Counter()
    for tensor in header.tensors:
        if len(tensor.shape) > 1:
            elements[tensor.type_id] += tensor.num_elements
    if not elements:
        return None, []
    most_common = elements.most_common(1)[0][0]
    if most_common in _UNPACKED:
        return _UNPACKED[most_common], []
    return None, ["The file's weights are quantized; the counts are those of the unpacked weights."]
