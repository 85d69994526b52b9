"""A model folder's weights: files checked, tensors listed from headers and read one at a time, and
written shard by shard."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype, find_plain_dtype
from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.core.progress import Progress
from tightfit.core.reading import (
    NotJsonError,
    UnreadableFileError,
    join_inside,
    open_regular,
    parse_json,
    read_json_file,
)
from tightfit.core.text import printable
from tightfit.core.units import MIB, render_bytes
from tightfit.runtime.output_folder import check_room, whole_folder

if TYPE_CHECKING:
    import torch


# Weight files

_LFS_START = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
_MAX_TENSORS = 1_000_000
_MAX_TENSOR_NAME = 1_000
_MAX_DIMS = 8
_MAX_SIZE = 2**62
"""Of one dimension, or one place in a file."""
_MAX_LISTED = 5
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def has_weights(folder: Path) -> bool:
    """Whether the folder has a file that transformers would load, complete or not."""
    return bool(_list_candidates(folder))


def list_weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load, an index first and then its shards."""
    candidates = _list_candidates(folder)
    if not candidates or candidates[0].suffix != ".json":
        return candidates[:1]
    try:
        names = set(_read_index(candidates[0]).values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        names = set()
    return [candidates[0], *(folder / name for name in sorted(names))]


def check_weights(folder: Path) -> None:
    """Raise if weights are missing, truncated, or lack a tensor; lists all problems."""
    candidates = _list_candidates(folder)
    if not candidates:
        raise NotFoundError(
            f"{folder} has a config.json and no weights.",
            remedy="put model.safetensors there, or name a folder that has it",
        )
    main = candidates[0]
    problems = _check_index(main) if main.suffix == ".json" else _check_files([main])
    if problems:
        shown = "; ".join(problems[:_MAX_LISTED])
        more = len(problems) - _MAX_LISTED
        raise InvalidInputError(
            f"The weights in {folder} are not whole: {shown}"
            f"{f'; and {more} more problems' if more > 0 else ''}.",
            remedy="fetch the model again; `hf download` resumes",
        )


def _list_candidates(folder: Path) -> list[Path]:
    """In the order of transformers; a dangling link, a broken download, counts too."""
    paths = [folder / name for name in _WEIGHT_FILES]
    return [path for path in paths if path.is_file() or path.is_symlink()]


def _read_index(path: Path) -> dict[str, str]:
    """File names by tensor."""
    weight_map = read_json_file(path)["weight_map"]
    homes = {str(tensor): join_inside(path.parent, file) for tensor, file in weight_map.items()}
    folded: dict[str, str] = {}
    for home in homes.values():
        if folded.setdefault(home.name.casefold(), home.name) != home.name:
            raise ValueError(f"{home.name} and {folded[home.name.casefold()]} differ only in case")
    return {tensor: str(home.relative_to(path.parent)) for tensor, home in homes.items()}


def _check_index(index: Path) -> list[str]:
    try:
        homes = _read_index(index)
    except UserError as error:
        return [f"{index.name} cannot be read as an index of shards: {error.problem.rstrip('.')}"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{index.name} cannot be read as an index of shards ({error!r})"]
    if not homes:
        return [f"{index.name} names no tensors"]
    files = [index.parent / name for name in sorted(set(homes.values()))]
    problems = _check_files(files)
    if problems or files[0].suffix != ".safetensors":
        return problems
    stored = {
        str(path.relative_to(index.parent)): set(read_safetensors_header(path)[1]) for path in files
    }
    lost = [name for name, file in sorted(homes.items()) if name not in stored[file]]
    return [f"{homes[name]} lacks the tensor {name}" for name in lost]


def _check_files(files: list[Path]) -> list[str]:
    problems = [(path.name, find_weights_error(path)) for path in files]
    return [f"{name} {problem}" for name, problem in problems if problem is not None]


def find_weights_error(path: Path) -> str | None:
    """What is wrong with a file of weights, as the end of a sentence; None if nothing."""
    try:
        with open_regular(path) as stream:
            start = stream.read(len(_LFS_START))
        if start == _LFS_START:
            return "is a Git LFS pointer, not the file itself (git lfs pull)"
        if not start:
            return "is empty"
        if path.suffix == ".safetensors":
            _read_header(path)
    except FileNotFoundError:
        return "is missing"
    except UnreadableFileError:
        return "is not a regular file"
    except (OSError, ValueError) as error:
        is_format = isinstance(error, ValueError)
        return f"{error}" if is_format else f"cannot be read ({_reason(error)})"
    # A zip's directory is at its end: a truncated file has none. Older pickles are no zips.
    is_cut = start.startswith(b"PK") and not zipfile.is_zipfile(path)
    return "is cut short" if is_cut and path.suffix != ".safetensors" else None


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def read_safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """The byte at which values start, and each tensor's dtype, shape and data_offsets.

    Checked against the format and the file's size: whoever reads on can believe every entry.
    """
    try:
        return _read_header(path)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{printable(str(path), most=400)} {error}.", remedy="fetch the model again"
        ) from error


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """ValueError with the end of a sentence where the file is not what the format demands."""
    with open_regular(path) as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        length = stream.read(8)
        size = int.from_bytes(length, "little")
        if len(length) < 8 or size > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError("is no safetensors file, or is cut short in its header")
        text = stream.read(size)
        if not text.startswith(b"{"):
            raise ValueError("is no safetensors file: its header is no JSON object")
        try:
            found = parse_json(text, source="it", allows_repeated_keys=False)
        except NotJsonError as error:
            why = error.problem.removeprefix("it is not valid JSON: ").rstrip(".")
            raise ValueError(f"has a header that is not valid JSON: {why}") from error
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("has a `__metadata__` that is no mapping of texts")
    if len(found) > _MAX_TENSORS:
        raise ValueError(f"lists more than {_MAX_TENSORS:,} tensors")
    expected = 8 + size + _check_entries(found)
    if file_bytes < expected:
        sizes = f"{render_bytes(file_bytes)} of {render_bytes(expected)}"
        raise ValueError(f"is cut short: {sizes}")
    if file_bytes > expected:
        raise ValueError(f"goes on for {file_bytes - expected:,} bytes after its last tensor")
    return 8 + size, found


def _check_entries(entries: dict[str, Any]) -> int:
    """The bytes that all tensors take: one behind the other, none over another, no gaps."""
    spans = []
    for name, entry in entries.items():
        shown = f"`{printable(name)}`"
        if not 0 < len(name) <= _MAX_TENSOR_NAME:
            raise ValueError(f"names a tensor {shown}: 1 to {_MAX_TENSOR_NAME} characters do")
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"does not state dtype, shape and data_offsets of {shown}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
            raise ValueError(f"holds {shown} as `{printable(str(dtype))}`, a dtype unknown here")
        if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
            raise ValueError(f"gives {shown} a shape that is none")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise ValueError(f"gives {shown} data_offsets that are none")
        if prod(shape) * _DTYPE_BITS[dtype] != 8 * (offsets[1] - offsets[0]):
            raise ValueError(f"gives {shown} another number of bytes than its shape takes")
        spans.append((offsets[0], offsets[1], shown))
    end = 0
    for start, following, shown in sorted(spans):
        if start != end:
            raise ValueError(f"has a {'gap' if start > end else 'tensor'} where {shown} begins")
        end = following
    return end


def _are_sizes(values: Any) -> bool:
    """A list of whole numbers that a file can have; true and false are none."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MAX_SIZE for value in values
    )


# Tensors listed and read

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
_DTYPE_BITS = {
    **{"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8},
    **{"BOOL": 8, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
}
"""Every dtype of the format, readable here or not. Source: safetensors 0.7 `tensor.rs`."""


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
        return prod(self.shape)


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

    def main_dtype(self) -> Dtype | None:
        """The plain format that most of the bytes are in."""
        sizes: Counter[Dtype] = Counter()
        for tensor in self.tensors.values():
            if (found := find_plain_dtype(str(tensor.dtype))) is not None:
                sizes[found] += tensor.num_bytes
        return sizes.most_common(1)[0][0] if sizes else None

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
    with open_regular(tensor.path) as stream:
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
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize


Produce = Callable[[Output], "torch.Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPlan:
    """A conversion to a Hugging Face folder of which nothing is written yet."""

    outputs: tuple[Output, ...]
    produce: Produce
    write_others: Callable[[Path], None]
    """Writes config and tokenizer."""
    extra_bytes: int
    """Peak memory beside what the process holds."""
    notes: tuple[str, ...]
    """What a user should know about the result."""

    @property
    def disk_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs) + 32 * MIB

    def write(self, target: Path, report: Progress | None = None) -> tuple[str, ...]:
        """Write the folder whole or not at all; returns the notes."""
        check_room(target, self.disk_bytes)
        with whole_folder(target) as work:
            self.fill(work, report=report)
        return self.notes

    def fill(
        self,
        folder: Path,
        *,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        report: Progress | None = None,
    ) -> None:
        """Write everything into an existing folder."""
        total, done = sum(output.num_bytes for output in self.outputs), 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if report is not None:
                report("writing", done, total)

        self.write_others(folder)
        write_shards(
            folder, self.outputs, self.produce, max_shard_bytes=max_shard_bytes, report=count
        )


def write_shards(
    folder: Path,
    outputs: Sequence[Output],
    produce: Produce,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    report: Callable[[int], None] | None = None,
) -> None:
    """Write all outputs to `model*.safetensors`, with an index if there are several."""
    shards = list(_fill_shards(outputs, max_shard_bytes))
    homes: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        ending = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        path = folder / f"model{ending}.safetensors"
        _write_shard(path, shard, produce, report)
        homes |= {output.name: path.name for output in shard}
    if len(shards) > 1:
        total = sum(output.num_bytes for output in outputs)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


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
