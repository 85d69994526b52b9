"""The header of a GGUF file: metadata and the list of tensors, without the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tightfit.core.errors import InvalidInputError

MAX_PAIRS = 100_000
MAX_TENSORS = 1_000_000
MAX_STRINGS = 20_000_000
"""Of one array. The largest vocabularies have a few hundred thousand."""
MAX_KEPT_ITEMS = 10_000
"""Longer arrays are vocabularies, of which the length is enough."""

_MAGIC = b"GGUF"
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 8
_MAX_ELEMENTS = 10**15
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array whose items were passed over."""

    length: int


MetadataValue = int | float | bool | str | tuple[int | float | bool, ...] | LongArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor: fastest dimension first, as ggml writes it."""

    name: str
    shape: tuple[int, ...]
    type_id: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    version: int
    metadata: dict[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]
    file_bytes: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor list. A file that is no GGUF, cut short or corrupt is one error."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != _MAGIC:
                raise _corrupt(path, "it does not start with `GGUF`")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).header()
    except (OSError, ValueError) as fault:
        raise InvalidInputError(
            f"Cannot read {path}: {fault}.",
            remedy="check that the file exists and that you may read it",
        ) from fault


class _Cursor:
    """A position in the file; every step is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 4

    def header(self) -> GgufHeader:
        version = self._scalar("I")
        if version not in (2, 3):
            raise _corrupt(self._path, f"version {version} is not 2 or 3, or it is big-endian")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self._check_count(int(num_tensors), MAX_TENSORS, least_bytes=32)
        self._check_count(int(num_pairs), MAX_PAIRS, least_bytes=13)
        metadata = dict(self._pair() for _ in range(int(num_pairs)))
        infos = [self._tensor() for _ in range(int(num_tensors))]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise _corrupt(self._path, "its alignment is absurd")
        start = -(-self._at // alignment) * alignment
        if any(start + offset >= self._size for _, offset in infos):
            raise _corrupt(self._path, "tensors lie beyond its end; it is cut short")
        return GgufHeader(
            version=int(version),
            metadata=metadata,
            tensors=tuple(tensor for tensor, _ in infos),
            file_bytes=self._size,
        )

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
            for _ in range(length):
                self._skip(int(self._scalar("Q")))
            return LongArray(length)
        if kind not in _SCALARS:
            raise _corrupt(self._path, f"an array of type {kind} cannot be read")
        code = _SCALARS[kind]
        width = struct.calcsize(f"<{code}")
        self._check_count(length, self._size, least_bytes=width)
        if length > MAX_KEPT_ITEMS:
            self._skip(length * width)
            return LongArray(length)
        start = self._at
        self._skip(length * width)
        return struct.unpack_from(f"<{length}{code}", self._data, start)

    def _tensor(self) -> tuple[GgufTensor, int]:
        name = self._string()
        num_dims = int(self._scalar("I"))
        if num_dims > _MAX_DIMS:
            raise _corrupt(self._path, f"a tensor has {num_dims} dimensions")
        shape = tuple(int(self._scalar("Q")) for _ in range(num_dims))
        type_id, offset = int(self._scalar("I")), int(self._scalar("Q"))
        tensor = GgufTensor(name=name, shape=shape, type_id=type_id)
        if not 0 < tensor.num_elements <= _MAX_ELEMENTS:
            raise _corrupt(self._path, "a tensor's shape is absurd")
        return tensor, offset

    def _string(self) -> str:
        length = int(self._scalar("Q"))
        start = self._at
        self._skip(length)
        return self._data[start : self._at].decode("utf-8", "replace")

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
