"""A model folder's tensors: listed from headers and read one at a time, written shard by shard."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError
from tightfit.runtime.model_files import list_weight_files, read_safetensors_header

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
    """One tensor of a file."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    """Its first byte in a safetensors file; 0 in a pickle."""
    num_bytes: int

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class StoredWeights:
    """Every tensor of a folder, in file order. At most one pickle is open (mapped) at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pickle: tuple[Path, dict[str, Any]] | None = None
        self.tensors: dict[str, StoredTensor] = {}
        files = [path for path in list_weight_files(folder) if path.suffix != ".json"]
        if not files:
            raise InvalidInputError(
                f"{folder} holds no weights.", remedy="name a folder that has them"
            )
        for path in files:
            listed = (
                list_safetensors(path) if path.suffix == ".safetensors" else self._list_pickle(path)
            )
            for tensor in listed:
                self.tensors.setdefault(tensor.name, tensor)

    def read(self, name: str) -> torch.Tensor:
        """A copy of the tensor's values."""
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
            self._pickle = None  # free the last one first
            self._pickle = (path, load_pickle(path))
        return self._pickle[1]


def list_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file in the order of their data; reads the header only."""
    import torch

    data_start, tensors = read_safetensors_header(path)
    found = []
    for name, entry in tensors.items():
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
                start=data_start + start,
                num_bytes=end - start,
            )
        )
    return sorted(found, key=lambda tensor: tensor.start)


def read_safetensor(tensor: StoredTensor) -> torch.Tensor:
    """Read one tensor; not memory-mapped, as mapped pages count as this process's memory."""
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


def load_pickle(path: Path) -> dict[str, Any]:
    """A file of `torch.save`, tensors only, memory-mapped unless it is too old."""
    import torch

    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before torch 1.6: cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidInputError(
            f"{path} is a pickle that holds more than tensors, which could run any code.",
            remedy="fetch the model's safetensors files instead",
        ) from error
    return dict(loaded)


# Safetensors shards written tensor by tensor: no more than one of them is ever in memory.

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Source: transformers `save_pretrained` before version 5, and the hub's advice."""
_ALIGNMENT = 8
"""The header is padded to a multiple of it. Source: safetensors' format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


Produce = Callable[[Output], "torch.Tensor"]


def write_shards(
    folder: Path,
    outputs: Sequence[Output],
    produce: Produce,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    report: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write all outputs to `model*.safetensors`, with an index if there are several."""
    shards = list(_fill_shards(outputs, max_shard_bytes))
    paths: list[Path] = []
    homes: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        ending = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        path = folder / f"model{ending}.safetensors"
        _write_shard(path, shard, produce, report)
        paths.append(path)
        homes |= {output.name: path.name for output in shard}
    if len(shards) > 1:
        total = sum(output.num_bytes for output in outputs)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n")
        paths.append(path)
    return paths


def _fill_shards(outputs: Sequence[Output], most: int) -> Iterator[list[Output]]:
    shard: list[Output] = []
    held = 0
    for output in outputs:
        if shard and held + output.num_bytes > most:
            yield shard
            shard, held = [], 0
        shard.append(output)
        held += output.num_bytes
    if shard:
        yield shard


def _write_shard(
    path: Path, outputs: Sequence[Output], produce: Produce, report: Callable[[int], None] | None
) -> None:
    with path.open("wb") as stream:
        stream.write(_header(outputs))
        for output in outputs:
            value = produce(output)
            if value.dtype != output.dtype or tuple(value.shape) != output.shape:
                raise ValueError(f"{output.name} came out as {value.dtype} {tuple(value.shape)}")
            stream.write(_raw(value))
            del value
            if report is not None:
                report(output.num_bytes)
        stream.flush()
        os.fsync(stream.fileno())


def _header(outputs: Sequence[Output]) -> bytes:
    names = {torch_name: name for name, torch_name in SAFETENSORS_NAMES.items()}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for output in outputs:
        end = start + output.num_bytes
        entries[output.name] = {
            "dtype": names[str(output.dtype).removeprefix("torch.")],
            "shape": list(output.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _raw(value: torch.Tensor) -> memoryview | bytes:
    import torch

    if not value.numel():
        return b""
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    data: Any = flat.numpy()
    return memoryview(data)
