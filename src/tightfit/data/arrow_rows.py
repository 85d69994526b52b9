"""Rows of Arrow files, as the `datasets` library saves them: streams or files, one batch held."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightfit.core.errors import EnvironmentFaultError, InvalidInputError
from tightfit.data.meter import Meter
from tightfit.data.row import Row
from tightfit.data.streams import require_file, size_of, unreadable

_FILE_MAGIC = b"ARROW1"
_STATE = "state.json"


def read_arrow(path: Path, meter: Meter | None = None) -> Iterator[Row]:
    """A column is a key. `save_to_disk` writes the stream format, others the file format."""
    require_file(path)
    try:
        import pyarrow as arrow
    except ImportError as fault:
        raise EnvironmentFaultError(
            f"Reading {path} needs pyarrow, which is not installed.",
            remedy="pip install 'tightfit[data]'",
        ) from fault
    number, size = 0, size_of(path)
    try:
        with arrow.memory_map(str(path)) as source:
            for batch in _batches(arrow, source):
                if meter is not None:
                    meter.move_to(min(int(source.tell()), size))
                for piece in range(0, batch.num_rows, 1024):
                    for values in batch.slice(piece, 1024).to_pylist():
                        number += 1
                        yield Row(values, path, number, "row")
    except (arrow.ArrowException, OSError) as fault:
        if isinstance(fault, OSError) and fault.errno:
            raise unreadable(path, fault) from fault
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise InvalidInputError(
            f"{path} is not a whole Arrow file: {reason}", remedy="save or copy the dataset again"
        ) from fault


def _batches(arrow: Any, source: Any) -> Iterator[Any]:
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    source.seek(0)
    if not is_file:
        yield from arrow.ipc.open_stream(source)
        return
    reader = arrow.ipc.open_file(source)
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def saved_files(folder: Path) -> list[str] | None:
    """File names that a saved dataset's `state.json` lists; None where it is no such folder.

    Other Arrow files beside them are caches of `map` and `filter`.
    """
    try:
        state = json.loads((folder / _STATE).read_bytes())
        return [str(item["filename"]) for item in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
