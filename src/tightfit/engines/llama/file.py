"""What a GGUF file's header says about running it: format, sizes, context, vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from tightfit.models.gguf import GgufHeader, LongArray, read_gguf_header

KV_VALUE_BYTES = 2
"""llama.cpp keeps keys and values in fp16 unless told otherwise."""
_NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFile:
    """Facts of one GGUF file, or of all parts where it is split."""

    path: Path
    format: str
    """`F16`, `Q4_K_M`, ... as llama.cpp names it."""
    num_params: int
    weight_bytes: int
    kv_bytes_per_token: int
    """Over all layers. Layers with a sliding window keep less of a long text."""
    context: int | None
    """Tokens that the model was made for."""
    num_vocabulary: int


def read_llama_file(path: Path) -> LlamaFile:
    """Read the header, and those of the other parts where the file is the first of several."""
    first = read_gguf_header(path)
    headers = [first, *(read_gguf_header(part) for part in _other_parts(path, first))]
    tensors = [tensor for header in headers for tensor in header.tensors]
    return LlamaFile(
        path=path,
        format=_read_format(first),
        num_params=sum(t.num_elements for t in tensors if t.name not in _NOT_PARAMETERS),
        weight_bytes=sum(_tensor_bytes(t.shape, t.type_id) for t in tensors),
        kv_bytes_per_token=_kv_bytes_per_token(first),
        context=_whole(first, "context_length"),
        num_vocabulary=_num_vocabulary(first, [t.shape for t in tensors if _is_embedding(t.name)]),
    )


def _other_parts(path: Path, header: GgufHeader) -> list[Path]:
    """Parts are named NAME-00001-of-00003.gguf; llama.cpp is given the first and finds the rest."""
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 2 or "-00001-of-" not in path.name:
        return []
    head, _, tail = path.name.partition("-00001-of-")
    parts = [path.with_name(f"{head}-{n:05d}-of-{tail}") for n in range(2, min(count, 999) + 1)]
    return [part for part in parts if part.is_file()]


def _read_format(header: GgufHeader) -> str:
    from gguf import LlamaFileType

    stated = header.metadata.get("general.file_type")
    try:
        name = LlamaFileType(stated).name  # type: ignore[arg-type]
    except ValueError:
        return "GGUF"
    return name.removeprefix("ALL_").removeprefix("MOSTLY_")


def _tensor_bytes(shape: tuple[int, ...], type_id: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (ValueError, KeyError):  # a type younger than the gguf package
        values, num_bytes = 1, 1
    return prod(shape) // values * num_bytes


def _kv_bytes_per_token(header: GgufHeader) -> int:
    """Keys and values of every layer; a number per layer where the file gives one per layer."""
    num_layers = _whole(header, "block_count") or 0
    num_heads = _per_layer(header, "attention.head_count", num_layers)
    kv_heads = _per_layer(header, "attention.head_count_kv", num_layers) or num_heads
    width = (_whole(header, "embedding_length") or 0) // max(1, max(num_heads, default=1))
    key = _whole(header, "attention.key_length") or width
    value = _whole(header, "attention.value_length") or width
    return KV_VALUE_BYTES * sum(kv_heads) * (key + value)


def _per_layer(header: GgufHeader, key: str, num_layers: int) -> list[int]:
    stated = header.metadata.get(f"{header.metadata.get('general.architecture')}.{key}")
    if isinstance(stated, tuple):
        return [int(one) for one in stated]
    return [stated] * num_layers if isinstance(stated, int) else []


def _whole(header: GgufHeader, key: str) -> int | None:
    stated = header.metadata.get(f"{header.metadata.get('general.architecture')}.{key}")
    return stated if isinstance(stated, int) and stated > 0 else None


def _is_embedding(name: str) -> bool:
    return name == "token_embd.weight"


def _num_vocabulary(header: GgufHeader, embeddings: list[tuple[int, ...]]) -> int:
    if embeddings and len(embeddings[0]) == 2:
        return embeddings[0][1]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return tokens.length if isinstance(tokens, LongArray) else _whole(header, "vocab_size") or 0
