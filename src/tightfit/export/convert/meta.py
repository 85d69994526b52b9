"""Meta's original Llama checkpoints as a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.units import MIB
from tightfit.export.convert.meta_tokenizer import is_tiktoken, write_tokenizer
from tightfit.export.convert.meta_weights import REOPEN_BYTES, MetaShape, MetaShards, list_names
from tightfit.runtime.finished_folder import check_room
from tightfit.runtime.shard_writer import DEFAULT_SHARD_BYTES, Output, write_shards
from tightfit.runtime.whole_output import whole_folder

if TYPE_CHECKING:
    import torch

TOKENIZER_BYTES = 400 * MIB
"""A vocabulary of 128k tokens and its merges while the tokenizer is built. Measured."""
_SCALED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What `use_scaled_rope` means. Source: `apply_scaling` in meta-llama/llama-models."""
_FACTOR, _FACTOR_OF_SMALL = 8.0, 32.0
"""Llama 3.1 and 3.3; Llama 3.2's 1B and 3B, the only ones with a tied head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaPlan:
    """A Meta folder understood, nothing written yet."""

    source: Path
    shards: MetaShards
    config: dict[str, Any]
    outputs: tuple[Output, ...]
    is_scaled: bool
    notes: tuple[str, ...]

    @property
    def disk_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs) + 32 * MIB

    @property
    def extra_bytes(self) -> int:
        """One tensor put together, rearranged and cast, and the mapped pages it came from."""
        largest = max(output.num_bytes for output in self.outputs)
        return 3 * largest + min(REOPEN_BYTES, self.shards.num_bytes) + TOKENIZER_BYTES


def is_meta_folder(folder: Path) -> bool:
    return (folder / "params.json").is_file() and any(folder.glob("consolidated.*.pth"))


def plan_meta(source: Path, dtype: torch.dtype | None = None) -> MetaPlan:
    """Read params.json, look at every shard's names and shapes, and refuse what does not agree."""
    params = _read_params(source)
    shape = _read_shape(params, source)
    if not (source / "tokenizer.model").is_file():
        raise NotFoundError(
            f"{source} has no tokenizer.model.",
            remedy="copy it there; Meta puts it beside the models' folders",
        )
    shards = MetaShards(source, shape)
    is_tied = _is_tied(shards)
    width, _ = shards.shape_of("layers.0.feed_forward.w1.weight")
    _check_width(params, shape, width)
    is_scaled = bool(params.get("use_scaled_rope", False))
    config, notes = _make_config(params, shape, source=source, is_tied=is_tied)
    vocab_size, _ = shards.shape_of("tok_embeddings.weight")
    stored = shards.dtype_of("layers.0.attention.wq.weight")
    config |= {"vocab_size": vocab_size, "intermediate_size": width}
    config["dtype"] = str(dtype or stored).removeprefix("torch.")
    return MetaPlan(
        source=source,
        shards=shards,
        config=config,
        outputs=tuple(_list_outputs(shards, shape, dtype or stored, is_tied=is_tied)),
        is_scaled=is_scaled,
        notes=tuple(notes),
    )


def write_meta(
    plan: MetaPlan,
    target: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    watch: Callable[[str, int, int], None] | None = None,
) -> None:
    """Fill the folder under another name, then give it its own."""
    check_room(target, plan.disk_bytes)
    meta_names = {ours: theirs for theirs, ours in list_names(_num_layers(plan)).items()}
    total, done = sum(output.num_bytes for output in plan.outputs), 0

    def produce(output: Output) -> torch.Tensor:
        values = plan.shards.read_as_transformers(meta_names[output.name])
        return values.to(output.dtype).contiguous()

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if watch is not None:
            watch("writing", done, total)

    with whole_folder(target) as work:
        stated = write_tokenizer(plan.source / "tokenizer.model", work, is_scaled=plan.is_scaled)
        marks = {name: number for name, number in stated.items() if number is not None}
        _write_json(work / "config.json", plan.config | marks)
        _write_json(work / "generation_config.json", marks)
        write_shards(work, plan.outputs, produce, max_shard_bytes=max_shard_bytes, report=count)


def _read_params(source: Path) -> dict[str, Any]:
    path = source / "params.json"
    try:
        params = json.loads(path.read_bytes())
        return dict(params)
    except (OSError, ValueError, TypeError) as fault:
        raise InvalidInputError(
            f"{path} cannot be read ({fault}).", remedy="fetch the file again"
        ) from fault


def _read_shape(params: dict[str, Any], source: Path) -> MetaShape:
    if "vision_chunk_size" in params or "moe_args" in params:
        raise InvalidInputError(
            f"{source} is a model with pictures or experts, which cannot be converted.",
            remedy="name a Llama 1, 2, 3, 3.1, 3.2 or 3.3 text model",
        )
    try:
        num_heads = int(params["n_heads"])
        return MetaShape(
            dim=int(params["dim"]),
            num_layers=int(params["n_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(params.get("n_kv_heads") or num_heads),
        )
    except (KeyError, TypeError, ValueError) as fault:
        raise InvalidInputError(
            f"{source / 'params.json'} does not say {fault}.", remedy="fetch the file again"
        ) from fault


def _is_tied(shards: MetaShards) -> bool:
    """Small Llama 3.2 models store the embedding twice."""
    import torch

    names = ("tok_embeddings.weight", "output.weight")
    if shards.shape_of(names[0]) != shards.shape_of(names[1]):
        return False
    return torch.equal(shards.read(names[0]), shards.read(names[1]))


def feed_forward_width(dim: int, *, multiple_of: int, multiplier: float | None = None) -> int:
    """Two thirds of four times the width, stretched, rounded up. Source: `llama/model.py`."""
    width = int(2 * 4 * dim / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * -(-width // multiple_of)


def _check_width(params: dict[str, Any], shape: MetaShape, found: int) -> None:
    if "multiple_of" not in params:
        return
    multiplier = params.get("ffn_dim_multiplier")
    expected = feed_forward_width(
        shape.dim, multiple_of=int(params["multiple_of"]), multiplier=multiplier
    )
    if expected != found:
        raise InvalidInputError(
            f"The feed-forward layers are {found:,} wide; by params.json they would be "
            f"{expected:,}.",
            remedy="use the params.json that belongs to these files",
        )


def _make_config(
    params: dict[str, Any], shape: MetaShape, *, source: Path, is_tied: bool
) -> tuple[dict[str, Any], list[str]]:
    """transformers' settings; lengths that Meta's file leaves out are those of the release."""
    is_llama_3 = is_tiktoken(source / "tokenizer.model")
    is_scaled = bool(params.get("use_scaled_rope", False))
    theta = float(params.get("rope_theta") or 10_000.0)
    context, release = _release(params, shape, is_llama_3=is_llama_3, theta=theta)
    scaling: dict[str, Any] | None = None
    if is_scaled:
        usual = _FACTOR_OF_SMALL if is_tied else _FACTOR
        scaling = _SCALED | {"factor": float(params.get("rope_scaling_factor") or usual)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(params.get("norm_eps", 1e-5)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": context,
        "tie_word_embeddings": is_tied,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
    }
    template = "llama-3" if is_llama_3 else "llama-2"
    return config, [
        f"Taken for {release}: a context of {context:,} tokens.",
        f"Meta's files hold no chat template; a chat model wants --set template={template}.",
    ]


def _release(
    params: dict[str, Any], shape: MetaShape, *, is_llama_3: bool, theta: float
) -> tuple[int, str]:
    """Context length by release. params.json does not say it; other settings tell them apart."""
    if params.get("use_scaled_rope"):
        return 131_072, "Llama 3.1 or later"
    if is_llama_3:
        return 8192, "Llama 3"
    if theta > 100_000:
        return 16_384, "Code Llama"
    # Llama 1: norm_eps 1e-6, but 1e-5 in the 65B, whose heads are not grouped.
    is_first = float(params.get("norm_eps", 1e-5)) < 5e-6
    is_first = is_first or (shape.dim == 8192 and shape.num_kv_heads == shape.num_heads)
    return (2048, "Llama 1") if is_first else (4096, "Llama 2")


def _list_outputs(
    shards: MetaShards, shape: MetaShape, dtype: torch.dtype, *, is_tied: bool
) -> list[Output]:
    names = list_names(shape.num_layers)
    return [
        Output(name=ours, shape=shards.shape_of(theirs), dtype=dtype)
        for theirs, ours in names.items()
        if not (is_tied and ours == "lm_head.weight")
    ]


def _num_layers(plan: MetaPlan) -> int:
    return int(plan.config["num_hidden_layers"])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
