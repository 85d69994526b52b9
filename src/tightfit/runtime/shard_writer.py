"""Safetensors shards written tensor by tensor: no more than one of them is ever in memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.runtime.stored_weights import SAFETENSORS_NAMES

if TYPE_CHECKING:
    import torch

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Source: transformers `save_pretrained` before version 5, and the hub's advice."""
_ALIGNMENT = 8
"""Of the header, so that values start where any dtype may. Source: safetensors' format."""


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
Report = Callable[[str, int, int], None]
"""What is being done, how far, of how much."""


def write_shards(
    folder: Path,
    outputs: Sequence[Output],
    produce: Produce,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    report: Callable[[int], None] | None = None,
) -> list[Path]:
    """All outputs into `model*.safetensors`, with an index where there are several."""
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
