"""A model folder's tensors one at a time: listed from the headers, read when asked for."""

from __future__ import annotations

import json
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

SAFETENSORS_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""The format's dtypes as torch names them. Source: safetensors 0.5 README."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    """Byte of the file; 0 in a pickle, whose own index knows."""
    num_bytes: int

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class StoredWeights:
    """Every tensor of a folder, in file order. One pickle is open at a time, mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pickle: tuple[Path, dict[str, Any]] | None = None
        self.tensors: dict[str, StoredTensor] = {}
        for path in _list_files(folder):
            listed = (
                list_safetensors(path) if path.suffix == ".safetensors" else self._list_pickle(path)
            )
            for tensor in listed:
                self.tensors.setdefault(tensor.name, tensor)

    def read(self, name: str) -> torch.Tensor:
        """The values, in memory of their own."""
        tensor = self.tensors[name]
        if tensor.path.suffix == ".safetensors":
            return read_safetensor(tensor)
        return self._open_pickle(tensor.path)[name].clone()  # type: ignore[no-any-return]

    def _list_pickle(self, path: Path) -> list[StoredTensor]:
        import torch

        return [
            StoredTensor(
                name=name,
                path=path,
                dtype=value.dtype,
                shape=tuple(value.shape),
                num_bytes=value.numel() * value.element_size(),
            )
            for name, value in self._open_pickle(path).items()
            if isinstance(value, torch.Tensor)
        ]

    def _open_pickle(self, path: Path) -> dict[str, Any]:
        if self._pickle is None or self._pickle[0] != path:
            self._pickle = None  # let the last one go first
            self._pickle = (path, load_pickle(path))
        return self._pickle[1]


def list_safetensors(path: Path) -> list[StoredTensor]:
    """From the header alone, in the order of the data."""
    import torch

    with path.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in SAFETENSORS_NAMES:
            raise InvalidInputError(
                f"{path} holds {name} as {entry['dtype']}, which cannot be read here.",
                remedy="name a model with fp32, bf16 or fp16 weights",
            )
        start, end = entry["data_offsets"]
        found.append(
            StoredTensor(
                name=name,
                path=path,
                dtype=getattr(torch, SAFETENSORS_NAMES[entry["dtype"]]),
                shape=tuple(entry["shape"]),
                start=8 + size + start,
                num_bytes=end - start,
            )
        )
    return sorted(found, key=lambda tensor: tensor.start)


def read_safetensor(tensor: StoredTensor) -> torch.Tensor:
    """Plain reads, not a map: mapped pages would count as this process's memory."""
    import torch

    buffer = bytearray(tensor.num_bytes)
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.start)
        if stream.readinto(buffer) != tensor.num_bytes:
            raise InvalidInputError(
                f"{tensor.path} is cut short at {tensor.name}.", remedy="fetch the model again"
            )
    if not buffer:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(buffer, dtype=tensor.dtype).reshape(tensor.shape)


def _list_files(folder: Path) -> list[Path]:
    """In the order of transformers: one safetensors file, its index, then pickles."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            homes = json.loads(index.read_bytes())["weight_map"].values()
            return [folder / home for home in sorted(set(homes))]
    raise InvalidInputError(f"{folder} holds no weights.", remedy="name a folder that has them")


def load_pickle(path: Path) -> dict[str, Any]:
    """A file of `torch.save`, tensors only, mapped where its age allows."""
    import torch

    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before torch 1.6: no map, so it is read whole
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as fault:
        raise InvalidInputError(
            f"{path} is a pickle that holds more than tensors, which could run any code.",
            remedy="fetch the model's safetensors files instead",
        ) from fault
    return dict(loaded)
