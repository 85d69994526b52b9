"""Folders as the `datasets` library saves them, written by pyarrow and by the library itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tightfit.core.errors import InvalidInputError
from tightfit.data.sources import data_files, read_rows

pyarrow = pytest.importorskip("pyarrow", reason="un-skip with: pip install 'tightfit[data]'")

ROWS = [{"prompt": f"p{i}", "completion": "é" * i} for i in range(2500)]


def write_arrow(path: Path, *, is_stream: bool, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    make = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return path


@pytest.mark.parametrize("is_stream", [True, False])
def test_both_layouts(is_stream: bool, tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", is_stream=is_stream, rows=ROWS)

    rows = list(read_rows(path))

    assert [dict(row.values) for row in rows] == ROWS
    assert rows[2000].place == f"{path} row 2001"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_cut_off_file_is_a_message(is_stream: bool, tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", is_stream=is_stream, rows=ROWS)
    path.write_bytes(path.read_bytes()[:-3000])

    with pytest.raises(InvalidInputError, match="not a whole Arrow file"):
        list(read_rows(path))


def test_only_the_files_that_state_json_lists(tmp_path: Path) -> None:
    write_arrow(tmp_path / "data-00000-of-00001.arrow", is_stream=True, rows=ROWS[:3])
    write_arrow(tmp_path / "cache-0123.arrow", is_stream=True, rows=ROWS[:1])
    (tmp_path / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))

    assert [path.name for path in data_files(tmp_path)] == ["data-00000-of-00001.arrow"]


def test_saved_by_the_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="un-skip with: pip install datasets")
    parts = {
        "train": datasets.Dataset.from_list(ROWS[:5]),
        "validation": datasets.Dataset.from_list(ROWS[5:7]),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "all")

    assert [dict(row.values) for row in read_rows(tmp_path / "all")] == ROWS[:5]
    held_out = data_files(tmp_path / "all", word="validation")
    assert [dict(row.values) for row in read_rows(held_out)] == ROWS[5:7]
