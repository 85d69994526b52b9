"""Weight files checked before anything loads: all there, none cut short, every tensor in place."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.units import render_bytes

_LFS_START = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
_MOST_LISTED = 5


def has_weights(folder: Path) -> bool:
    """Whether any file that transformers would load is named in the folder, whole or not."""
    return bool(_list_candidates(folder))


def list_weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load, an index first and then its shards."""
    candidates = _list_candidates(folder)
    if not candidates or candidates[0].suffix != ".json":
        return candidates[:1]
    try:
        weight_map = json.loads(candidates[0].read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        names = []
    return [candidates[0], *(folder / name for name in names)]


def check_weights(folder: Path) -> None:
    """Raise where weights are missing, cut short, or lack a tensor; all faults at once."""
    candidates = _list_candidates(folder)
    if not candidates:
        raise NotFoundError(
            f"{folder} has a config.json and no weights.",
            remedy="put model.safetensors there, or name a folder that has it",
        )
    main = candidates[0]
    faults = _check_index(main) if main.suffix == ".json" else _check_files([main])
    if faults:
        shown = "; ".join(faults[:_MOST_LISTED])
        more = len(faults) - _MOST_LISTED
        raise InvalidInputError(
            f"The weights in {folder} are not whole: {shown}"
            f"{f'; and {more} more faults' if more > 0 else ''}.",
            remedy="fetch the model again; `hf download` goes on where it stopped",
        )


def _list_candidates(folder: Path) -> list[Path]:
    """In the order of transformers: one safetensors file, their index, then pickles."""
    names = (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    )
    return [folder / name for name in names if _is_named(folder / name)]


def _is_named(path: Path) -> bool:
    return path.is_file() or path.is_symlink()  # a dangling link is a broken download


def _check_index(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        homes = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        return [f"{index.name} cannot be read as an index of shards ({fault!r})"]
    files = [index.parent / name for name in sorted(set(homes.values()))]
    faults = _check_files(files)
    if faults or files[0].suffix != ".safetensors":
        return faults
    stored = {path.name: set(_read_header(path)) for path in files}
    lost = [name for name, file in sorted(homes.items()) if name not in stored[file]]
    return [f"{homes[name]} lacks the tensor {name}" for name in lost]


def _check_files(files: list[Path]) -> list[str]:
    faults = []
    for path in files:
        problem = (
            find_safetensors_fault(path)
            if path.suffix == ".safetensors"
            else _find_pickle_fault(path)
        )
        if problem is not None:
            faults.append(f"{path.name} {problem}")
    return faults


def find_safetensors_fault(path: Path) -> str | None:
    """What is wrong with a safetensors file, as the end of a sentence; None where it is whole."""
    problem = _find_common_fault(path)
    if problem is not None:
        return problem
    try:
        ends = [entry["data_offsets"][1] for entry in _read_header(path).values()]
        with path.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error):
        return "is no safetensors file, or is cut short in its header"
    expected = 8 + header_bytes + max(ends, default=0)
    found = path.stat().st_size
    if found < expected:
        return f"is cut short: {render_bytes(found)} of {render_bytes(expected)}"
    return None


def _find_pickle_fault(path: Path) -> str | None:
    problem = _find_common_fault(path)
    if problem is not None:
        return problem
    with path.open("rb") as stream:
        is_zip = stream.read(2) == b"PK"
    # A zip's table stands at its end, so what is cut short has none. Older pickles have no table.
    return "is cut short" if is_zip and not zipfile.is_zipfile(path) else None


def _find_common_fault(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_LFS_START))
    except FileNotFoundError:
        return "is missing"
    except OSError as fault:
        return f"cannot be read ({(fault.strerror or str(fault)).lower()})"
    if start == _LFS_START:
        return "is a Git LFS pointer, not the file itself (git lfs pull)"
    return None if start else "is empty"


def _read_header(path: Path) -> dict[str, dict[str, list[int]]]:
    """Tensors by name, from the JSON header; reads no values."""
    with path.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > _MAX_HEADER_BYTES:
            raise ValueError("header too long")
        header = json.loads(stream.read(size))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
