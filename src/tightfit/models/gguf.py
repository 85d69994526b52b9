"""GGUF headers (versions 2 and 3): metadata, tensor list, and the ModelSpec they describe.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.core.reading import open_regular
from tightfit.models.config import read_config
from tightfit.models.families.registry import find_family, find_gguf_family
from tightfit.models.spec import ModelSpec

MAX_PAIRS = 100_000
MAX_TENSORS = 1_000_000
MAX_STRINGS = 20_000_000
"""Of one array. The largest vocabularies have a few hundred thousand."""
MAX_KEPT_ITEMS = 10_000
"""Longer arrays are vocabularies, of which the length is enough."""

_MAGIC = b"GGUF"
_SCALARS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", start=10))
"""struct's codes by GGUF's value types."""
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NAME_BYTES = 63
"""Of a tensor. Source: GGML_MAX_DIMS and GGML_MAX_NAME in ggml.h."""
_MAX_ELEMENTS = 10**15
TENSOR_TYPES = {
    **{0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)},
    **{9: (32, 40), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176)},
    **{14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98)},
    **{19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136)},
    **{24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2)},
    **{34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18)},
}
"""Values of a block and its bytes, by type. Source: the blocks of ggml-common.h."""
_DEFAULT_ALIGNMENT = 32
_ALIGNMENTS = frozenset(2**power for power in range(21))


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array whose items were passed over."""

    length: int


MetadataValue = (
    int | float | bool | str | tuple[int | float | bool, ...] | tuple[str, ...] | LongArray
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor: fastest dimension first, as ggml writes it."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    """The place of its first byte in the file."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """At least: one a value where the type is unknown here."""
        values, num_bytes = TENSOR_TYPES.get(self.type_id, (1, 1))
        return self.num_elements // values * num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    version: int
    metadata: dict[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]
    file_bytes: int


def read_gguf_header(
    path: Path, *, keeps_arrays: bool = False, is_adapter: bool = False
) -> GgufHeader:
    """Read a model's metadata and tensor list. A file that is no GGUF, cut short, corrupt or an
    adapter is one error; with `is_adapter`, one that is none is.

    Vocabularies are read only with `keeps_arrays`.
    """
    try:
        with open_regular(path) as stream:
            if stream.read(4) != _MAGIC:
                raise _corrupt(path, "it does not start with `GGUF`")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Cursor(path, data, keeps_arrays).header()
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"Cannot read {path}: {error}.",
            remedy="check that the file exists and that you may read it",
        ) from error
    if is_adapter and header.metadata.get("general.type") != "adapter":
        raise InvalidInputError(
            f"{path} is a model, not an adapter.",
            remedy="tightfit convert ADAPTER --to gguf-lora",
        )
    if header.metadata.get("general.type") == "adapter" and not is_adapter:
        raise InvalidInputError(
            f"{path} is an adapter, not a model.",
            remedy="name the adapter's own folder; llama.cpp loads this file beside its base's: "
            "llama-server -m BASE.gguf --lora FILE",
        )
    return header


class _Cursor:
    """A position in the file; every step is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap, keeps_arrays: bool) -> None:
        self._path = path
        self._data = data
        self._keeps_arrays = keeps_arrays
        self._errors = "strict" if keeps_arrays else "replace"
        self._size = len(data)
        self._at = 4

    def header(self) -> GgufHeader:
        version = self._scalar("I")
        if version not in (2, 3):
            raise _corrupt(self._path, f"version {version} is not 2 or 3, or it is big-endian")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self._check_count(int(num_tensors), MAX_TENSORS, least_bytes=32)
        self._check_count(int(num_pairs), MAX_PAIRS, least_bytes=13)
        pairs = [self._pair() for _ in range(int(num_pairs))]
        metadata = dict(pairs)
        if len(metadata) != len(pairs):
            raise _corrupt(self._path, "it states a value twice")
        tensors = [self._tensor() for _ in range(int(num_tensors))]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment not in _ALIGNMENTS:
            raise _corrupt(self._path, "its alignment is absurd")
        start = -(-self._at // alignment) * alignment
        tensors = [replace(tensor, start=start + tensor.start) for tensor in tensors]
        self._check_places(tensors, alignment)
        self._check_vocabulary(metadata)
        return GgufHeader(
            version=int(version),
            metadata=metadata,
            tensors=tuple(tensors),
            file_bytes=self._size,
        )

    def _check_places(self, tensors: list[GgufTensor], alignment: int) -> None:
        """Every tensor lies inside the file, at an aligned place that is its own."""
        end, names = 0, set()
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            values, _ = TENSOR_TYPES.get(tensor.type_id, (1, 1))
            if tensor.name in names:
                raise _corrupt(self._path, "two tensors have the same name")
            if tensor.shape and tensor.shape[0] % values:
                raise _corrupt(self._path, "a tensor's rows are no whole blocks of its type")
            if tensor.start % alignment or tensor.start < end:
                raise _corrupt(self._path, "tensors overlap, or lie at odd places")
            end = tensor.start + tensor.num_bytes
            if end > self._size:
                raise _corrupt(self._path, "tensors lie beyond its end; it is cut short")
            names.add(tensor.name)

    def _check_vocabulary(self, metadata: dict[str, MetadataValue]) -> None:
        """Other programs read as many scores and types as there are tokens, without a look."""
        lengths = {
            value.length if isinstance(value, LongArray) else len(value)
            for name in ("tokens", "scores", "token_type")
            if isinstance(value := metadata.get(f"tokenizer.ggml.{name}"), LongArray | tuple)
        }
        if len(lengths) > 1:
            raise _corrupt(self._path, "its tokens, scores and types differ in number")

    def _pair(self) -> tuple[str, MetadataValue]:
        key = self._string()
        return key, self._value(int(self._scalar("I")))

    def _value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _corrupt(self._path, f"value type {kind} is unknown")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> MetadataValue:
        kind, length = int(self._scalar("I")), int(self._scalar("Q"))
        if kind == _STRING:
            self._check_count(length, MAX_STRINGS, least_bytes=8)
            if self._keeps_arrays:
                return tuple([self._string() for _ in range(length)])
            for _ in range(length):
                self._skip(int(self._scalar("Q")))
            return LongArray(length)
        if kind not in _SCALARS:
            raise _corrupt(self._path, f"an array of type {kind} cannot be read")
        code = _SCALARS[kind]
        width = struct.calcsize(f"<{code}")
        self._check_count(length, self._size, least_bytes=width)
        if length > MAX_KEPT_ITEMS and not self._keeps_arrays:
            self._skip(length * width)
            return LongArray(length)
        start = self._at
        self._skip(length * width)
        return struct.unpack_from(f"<{length}{code}", self._data, start)

    def _tensor(self) -> GgufTensor:
        """Its start counts from that of all tensors, which is known later."""
        name = self._string()
        if len(name.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
            raise _corrupt(self._path, f"a tensor's name is longer than {_MAX_NAME_BYTES} bytes")
        num_dims = int(self._scalar("I"))
        if num_dims > _MAX_DIMS:
            raise _corrupt(self._path, f"a tensor has {num_dims} dimensions")
        shape = tuple(int(self._scalar("Q")) for _ in range(num_dims))
        type_id, offset = int(self._scalar("I")), int(self._scalar("Q"))
        tensor = GgufTensor(name=name, shape=shape, type_id=type_id, start=offset)
        if not 0 < tensor.num_elements <= _MAX_ELEMENTS:
            raise _corrupt(self._path, "a tensor's shape is absurd")
        return tensor

    def _string(self) -> str:
        length = int(self._scalar("Q"))
        start = self._at
        self._skip(length)
        # A vocabulary must be right to the letter; `read_gguf_header` reports what is no UTF-8.
        return self._data[start : self._at].decode("utf-8", self._errors)

    def _scalar(self, code: str) -> int | float | bool:
        start = self._at
        self._skip(struct.calcsize(f"<{code}"))
        value: int | float | bool = struct.unpack_from(f"<{code}", self._data, start)[0]
        return value

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > self._size - self._at:
            raise _corrupt(self._path, "it ends in the middle of its header")
        self._at += num_bytes

    def _check_count(self, count: int, most: int, *, least_bytes: int) -> None:
        if count > most or count * least_bytes > self._size - self._at:
            raise _corrupt(self._path, f"it claims {count:,} entries, more than it can hold")


def _corrupt(path: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"{path} is not a whole GGUF file: {why}.", remedy="fetch or convert the file again"
    )


# From a GGUF header to a ModelSpec, by way of the config that transformers would have.

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
NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_UNPACKED = {0: Dtype.FP32, 1: Dtype.FP16, 30: Dtype.BF16}


def read_gguf_model(path: Path) -> ModelSpec:
    """Read a GGUF file's architecture. The tensors in the file decide the parameter count."""
    header = read_gguf_header(path)
    spec = read_config(_as_config(header, path), name=path.stem, source=str(path))
    warnings = list(spec.warnings)
    split = header.metadata.get("split.count", 1)
    counted = sum(t.num_elements for t in header.tensors if t.name not in NOT_PARAMETERS)
    difference = 0
    if not header.tensors or (isinstance(split, int) and split > 1):
        warnings.append("The file holds a part of the tensors; the count is that of its metadata.")
    elif counted != spec.num_params:
        difference = counted - spec.num_params
        warnings.append(
            f"The file's tensors hold {counted:,} parameters; its metadata lead to "
            f"{spec.num_params:,}."
        )
    elements: Counter[int] = Counter()
    for tensor in header.tensors:
        if len(tensor.shape) > 1:
            elements[tensor.type_id] += tensor.num_elements
    dtype = None
    if elements:
        dtype = _UNPACKED.get(elements.most_common(1)[0][0])
        if dtype is None:
            warnings.append(
                "The file's weights are quantized; the counts are those of the unpacked weights."
            )
    return spec.model_copy(
        update={
            "warnings": tuple(warnings),
            "outer_params": max(0, spec.outer_params + difference),
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
    for name in ("num_experts", "sliding_window"):  # llama.cpp writes 0 for none
        if config.get(name) == 0:
            del config[name]
    family = find_gguf_family(architecture)
    if architecture == "llama" and "num_experts" in config:
        family = find_family("mixtral")
    names = {tensor.name for tensor in header.tensors}
    config["model_type"] = family.model_types[0] if family is not None else architecture
    config["vocab_size"] = _vocab_size(header, architecture)
    config["tie_word_embeddings"] = "output.weight" not in names
    return config | (family or find_family(architecture)).gguf_flags(config, names)


def _one_number(value: MetadataValue, key: str, path: Path) -> object:
    """Some files give a number per layer; layers that differ are beyond a run of equal blocks.

    A layer that does not attend has no key heads.
    """
    if not isinstance(value, tuple):
        return value
    found = set(value) - {0} or set(value)
    if len(found) == 1:
        return found.pop()
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
