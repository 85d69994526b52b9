"""A GGUF file's metadata and tensors, one tensor in memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError
from tightfit.models.gguf import read_gguf_header

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Unquantized formats and torch's names of them."""


class GgufFile:
    """Reads metadata at once, tensors on demand."""

    def __init__(self, path: Path) -> None:
        import gguf

        read_gguf_header(path)  # raises for a damaged file
        self.path = path
        try:
            reader: Any = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:  # offsets beyond the end of the file
            raise InvalidInputError(
                f"{path} is cut short or damaged ({error}).",
                remedy="fetch or convert the file again",
            ) from error
        self.metadata: dict[str, Any] = {
            name: field.contents() for name, field in reader.fields.items()
        }
        # Not the reader's own tensors: they map the file, and mapped pages count as memory.
        self.tensors: dict[str, _Place] = {tensor.name: _Place(tensor) for tensor in reader.tensors}
        if int(self.metadata.get("split.count", 1)) > 1:
            raise InvalidInputError(
                f"{path} is one part of several.",
                remedy="put them together: llama-gguf-split --merge FIRST-PART OUT.gguf",
            )

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

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

    def __init__(self, tensor: Any) -> None:
        self.kind = tensor.tensor_type
        self.shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
        self.start = int(tensor.data_offset)
        self.num_bytes = int(tensor.n_bytes)
