"""Meta's consolidated.*.pth: model-parallel shards put together, in transformers' names."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import InvalidInputError
from tightfit.core.units import GIB
from tightfit.runtime.gguf.layout import split_rotary
from tightfit.runtime.stored_weights import load_pickle

if TYPE_CHECKING:
    import torch
    from torch import Tensor

REOPEN_BYTES = 2 * GIB
"""Mapped pages count as this process's memory until the map is closed."""
_LAYER_NAMES = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_OUTER_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BY_ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
_BY_COLUMNS = ("wo", "w2")
"""How fairscale's layers split a matrix: ColumnParallelLinear its outputs, RowParallelLinear its
inputs. Source: `llama/model.py` of meta-llama/llama."""
_COMPUTED = re.compile(r"(^|\.)(rope\.freqs|inner_attention\.rope\.freqs)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaShape:
    """What params.json says, checked."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class MetaShards:
    """All shards at once, mapped; tensors by Meta's name, whole."""

    def __init__(self, folder: Path, shape: MetaShape) -> None:
        self._paths = sorted(folder.glob("consolidated.*.pth"))
        self._shape = shape
        self._held = 0
        _check_files(self._paths, folder)
        self._shards: list[Mapping[str, Tensor]] = []
        self._open()
        self._check_names()
        self._check_count(folder)

    @property
    def num_shards(self) -> int:
        return len(self._paths)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._paths)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        first = self._shards[0][name]
        rows = list(first.shape)
        axis = self._axis(name, first)
        if axis is not None:
            rows[axis] *= self.num_shards
        return tuple(rows)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._shards[0][name].dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor in memory of its own."""
        import torch

        if self._held > REOPEN_BYTES:
            self._open()
        parts = [shard[name] for shard in self._shards]
        self._held += sum(part.numel() * part.element_size() for part in parts)
        axis = self._axis(name, parts[0])
        return parts[0].clone() if axis is None else torch.cat(parts, dim=axis)

    def read_as_transformers(self, name: str) -> Tensor:
        """As `read`, queries and keys in transformers' rotary order."""
        values = self.read(name)
        if name.endswith(".wq.weight"):
            return split_rotary(values, self._shape.num_heads)
        if name.endswith(".wk.weight"):
            return split_rotary(values, self._shape.num_kv_heads)
        return values

    def _open(self) -> None:
        self._shards = []  # let the old maps go first
        self._shards = [load_pickle(path) for path in self._paths]
        self._held = 0

    def _axis(self, name: str, part: Tensor) -> int | None:
        """Along which axis the shards are parts of the whole; None: each has all of it."""
        if self.num_shards == 1 or part.ndim == 1:
            return None
        kind = name.split(".")[-2]
        if kind in _BY_ROWS:
            return 0
        if kind in _BY_COLUMNS:
            return 1
        # Llama 1 and 2 split the embedding's width, Llama 3 its vocabulary.
        return 0 if part.shape[1] == self._shape.dim else 1

    def _check_names(self) -> None:
        wanted = set(list_names(self._shape.num_layers))
        for path, shard in zip(self._paths, self._shards, strict=True):
            found = {name for name in shard if not _COMPUTED.search(name)}
            lost, extra = sorted(wanted - found), sorted(found - wanted)
            if lost or extra:
                problem = f"lacks {lost[0]}" if lost else f"holds {extra[0]}, which no Llama has"
                raise InvalidInputError(
                    f"{path} {problem}.",
                    remedy="fetch the file again; vision and adapter files cannot be converted",
                )

    def _check_count(self, folder: Path) -> None:
        """The last files may be missing, which their numbers do not show."""
        rows, _ = self.shape_of("layers.0.attention.wq.weight")
        if rows != self._shape.dim:
            needed = self._shape.dim * self.num_shards / rows
            raise InvalidInputError(
                f"{folder} holds {self.num_shards} of {needed:g} consolidated files, or its "
                "params.json belongs to another model.",
                remedy="fetch all of the model's files",
            )


def list_names(num_layers: int) -> dict[str, str]:
    """Meta's names to transformers', in the order of the layers."""
    names = {"tok_embeddings.weight": _OUTER_NAMES["tok_embeddings.weight"]}
    for layer in range(num_layers):
        for theirs, ours in _LAYER_NAMES.items():
            names[f"layers.{layer}.{theirs}"] = f"model.layers.{layer}.{ours}"
    return names | _OUTER_NAMES


def _check_files(paths: list[Path], folder: Path) -> None:
    numbers = [int(found[1]) for path in paths if (found := re.search(r"\.(\d+)\.pth$", path.name))]
    if not paths or numbers != list(range(len(paths))):
        raise InvalidInputError(
            f"{folder} lacks consolidated.{_first_gap(numbers):02}.pth.",
            remedy="fetch all of the model's files",
        )
    for path in paths:
        # A zip's table stands at its end, so a file that is cut short has none.
        if not zipfile.is_zipfile(path):
            raise InvalidInputError(
                f"{path} is cut short, or no file of torch.", remedy="fetch the file again"
            )


def _first_gap(numbers: list[int]) -> int:
    return next(i for i in range(len(numbers) + 1) if i not in numbers)
