"""Reading rows: every format and compression round trip, and every error as a message."""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib
import io
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UserError
from tightfit.data import readers
from tightfit.data.sources import data_files, read_file, read_rows

ROWS = [
    {"prompt": "What is 2 + 2?", "completion": "4"},
    {"prompt": 'Say "hi", twice;\nplease', "completion": "hi\thi"},
    {"prompt": "Grüße, 日本 🙂", "completion": "žluťoučký kůň"},
]


def as_json(rows: list[dict[str, str]]) -> bytes:
    return json.dumps(rows).encode()


def as_pretty_json(rows: list[dict[str, str]]) -> bytes:
    return json.dumps(rows, indent=4, ensure_ascii=False).encode()


def as_wrapped_json(rows: list[dict[str, str]]) -> bytes:
    return json.dumps({"version": 1, "data": rows}).encode()


def as_jsonl(rows: list[dict[str, str]]) -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


def as_csv(rows: list[dict[str, str]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


WRITERS: list[tuple[str, Callable[[list[dict[str, str]]], bytes]]] = [
    ("a.json", as_json),
    ("b.json", as_pretty_json),
    ("c.json", as_wrapped_json),
    ("d.json", as_jsonl),
    ("e.jsonl", as_jsonl),
    ("f.ndjson", lambda rows: b"\xef\xbb\xbf" + as_jsonl(rows) + b"\n\n"),
    ("g.csv", as_csv),
    ("h.csv", lambda rows: b"\xef\xbb\xbf" + as_csv(rows, ";")),
    ("i.tsv", lambda rows: as_csv(rows, "\t")),
    ("J.JSONL", as_jsonl),
]
COMPRESSORS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("", bytes),
    (".gz", gzip.compress),
    (".bz2", bz2.compress),
    (".xz", lzma.compress),
]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])
@pytest.mark.parametrize(("ending", "compress"), COMPRESSORS, ids=["plain", "gz", "bz2", "xz"])
def test_round_trip(
    tmp_path: Path,
    name: str,
    write: Callable[[list[dict[str, str]]], bytes],
    ending: str,
    compress: Callable[[bytes], bytes],
) -> None:
    path = tmp_path / (name + ending)
    path.write_bytes(compress(write(ROWS)))

    assert [dict(row.values) for row in read_rows(path)] == ROWS


def test_zstd_round_trip_and_damage(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="un-skip with: pip install zstandard")
    whole = zstandard.compress(as_jsonl(ROWS * 1000))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(whole)
    assert len(list(read_rows(path))) == 3 * 1000

    path.write_bytes(whole[:20] + b"\x00" * 40)
    with pytest.raises(InvalidInputError, match=r"damaged|no rows"):
        list(read_rows(path))


def test_zstd_without_a_module_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfdrest")

    with pytest.raises(SetupError) as caught:
        list(read_rows(path))
    assert "pip install zstandard" in caught.value.remedy


def test_parquet_round_trip(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="un-skip with: pip install 'tightfit[data]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    chats = [{"messages": [{"role": "user", "content": "hi"}]}] * 3000
    parquet.write_table(arrow.Table.from_pylist(chats), path)

    rows = list(read_rows(path))

    assert [row.values for row in rows] == chats
    assert rows[-1].place.endswith("row 3000")

    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InvalidInputError, match="Parquet"):
        list(read_rows(path))


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")

    with pytest.raises(SetupError) as caught:
        list(readers.read_parquet(path))
    assert caught.value.remedy == "pip install 'tightfit[data]'"


def test_text_lines_become_rows_with_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\n  \ntwo \r\n")

    assert [(row.values, row.number) for row in read_file(path, by_line=True)] == [
        ({"text": "one"}, 1),
        ({"text": "two"}, 4),
    ]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_bytes("# Title\r\n\r\nfirst ü\n\nlast\n".encode())

    assert [(row.values, row.has_before, row.has_more) for row in read_rows(path)] == [
        ({"text": "# Title\n\nfirst ü\n\nlast"}, False, False)
    ]


def test_a_document_that_is_too_large_comes_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_PART_CHARS", 100)
    path = tmp_path / "a.txt"
    text = "\n".join(f"line {number} " * 3 for number in range(40)) + "\n \n"
    path.write_text(text)

    rows = list(read_rows(path))

    assert len(rows) == 10
    assert "".join(row.values["text"] for row in rows).strip() == text.strip()
    assert [row.has_before for row in rows] == [False, *[True] * (len(rows) - 1)]
    assert [row.has_more for row in rows] == [*[True] * (len(rows) - 1), False]
    lines = text.split("\n")
    assert all(row.values["text"].startswith(lines[row.number - 1]) for row in rows)


def test_markdown_beside_rows_is_about_them(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A dataset card")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "b.md").write_text("# Notes")
    assert [path.name for path in data_files(tmp_path)] == ["README.md", "b.md"]

    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')

    assert [path.name for path in data_files(tmp_path)] == ["train.jsonl"]


def test_line_numbers_of_pretty_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(as_pretty_json(ROWS))
    lines = path.read_text().splitlines()

    numbers = [row.number for row in read_rows(path)]

    assert [lines[number - 1].strip() for number in numbers] == ["{"] * 3
    assert numbers == [2, 6, 10]


def test_json_values_may_span_read_chunks(tmp_path: Path) -> None:
    rows = [{"text": "é" * length} for length in (1, 300_000, 5, 700_001, 0)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")

    assert [row.values for row in read_rows(path)] == rows


@pytest.mark.parametrize("name", ["big.jsonl", "big.csv"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    row = {"prompt": "p" * 2000, "completion": "c"}
    write = dict(WRITERS)["g.csv"] if name.endswith("csv") else as_jsonl
    path = tmp_path / name
    path.write_bytes(write([row] * 10_000))

    tracemalloc.start()
    num_rows = sum(1 for _ in read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert num_rows == 10_000
    assert peak < 4_000_000 < path.stat().st_size / 4


def test_folder_is_read_sorted_and_without_what_is_held_out(tmp_path: Path) -> None:
    for name in ("train-2.jsonl", "train-1.jsonl.gz", "test.jsonl", "my_validation.csv"):
        data = as_jsonl([{"text": name}])
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for name in ("README.md", ".hidden.jsonl", "dataset_info.json", "weights.bin"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "latest.jsonl").write_bytes(as_jsonl(ROWS))
    (tmp_path / "more" / "loop").symlink_to(tmp_path)

    names = [path.name for path in data_files(tmp_path)]

    assert names == ["latest.jsonl", "train-1.jsonl.gz", "train-2.jsonl"]


def test_folder_of_test_files_alone_is_read(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(as_jsonl(ROWS))

    assert len(list(read_rows(tmp_path))) == 3


def test_several_sources_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(as_jsonl(ROWS[:1]))
    (tmp_path / "a.csv").write_bytes(as_csv(ROWS[1:]))

    rows = read_rows([tmp_path / "b.jsonl", str(tmp_path / "a.csv")])

    assert [row.values for row in rows] == ROWS


ERRORS: list[tuple[str, bytes, list[str]]] = [
    ("a.jsonl", b"", ["empty"]),
    ("a.jsonl", b"\n \n", ["no rows"]),
    ("a.json", b"", ["empty"]),
    ("a.json", b"  \n", ["no rows"]),
    ("a.json", b"[]", ["no rows"]),
    ("a.csv", b"prompt,completion\n", ["no rows"]),
    ("a.txt", b"\n\n", ["no rows"]),
    ("a.jsonl", b'{"a": 1}\n{"a": \n', ["line 2", "not JSON"]),
    ("a.jsonl", b'{"a": 1}\n\n[1, 2]\n', ["line 3", "a list", "object"]),
    ("a.jsonl", b'{"a": 1}\n"words"\n', ["line 2", "text"]),
    ("a.jsonl", b"[" * 200_000, ["line 1", "nested"]),
    ("a.jsonl", b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", ["line 2"]),
    ("a.jsonl", b'{"a": "caf\xe9"}', ["line 1", "UTF-8", "0xe9"]),
    ("a.jsonl", '{"a": 1}'.encode("utf-16"), ["not text"]),
    ("a.jsonl", b"SQLite format 3\x00....", ["not text"]),
    ("a.jsonl", b"PAR1\x15\x04", ["not text"]),
    ("a.txt", b"abc\x00\x01\x02", ["NUL"]),
    ("a.txt", b"good\nbad \xff\n", ["line 2", "UTF-8"]),
    ("a.json", b'[{"a": 1},\n {"a": 2', ["line 2", "not JSON"]),
    ("a.json", b'[{"a": 1},\n 7]', ["line 2", "a number"]),
    ("a.json", b'[{"a": 1}\n{"a": 2}]', ["line 2", "expected `,`"]),
    ("a.json", b'[{"a": 1},\n', ["line 2", "cut off"]),
    ("a.json", b'[{"a": 1}', ["cut off"]),
    ("a.json", b'[{"a": 1}] trailing', ["line 1", "after the end"]),
    ("a.json", b'[{"a": "\n"}]', ["line 1", "not JSON"]),
    ("a.json", b'[{"a": "x"},\n{"a": "caf\xe9"}]', ["line 2", "UTF-8"]),
    ("a.json", b"words", ["line 1", "not JSON"]),
    ("a.json", b"17", ["a number"]),
    ("a.json", b'{"data": [{"a": 1}, 5]}', ["row 2", "a number"]),
    ("a.json", b'{"traning": [{"a": 1}]}', ["traning"]),
    ("a.json", b"[" * 200_000, ["nested"]),
    ("a.json", b'{"a": "' + b"x" * 300_000, ["line 1", "not JSON"]),
    ("a.json", b'[{"a": "b"},\n {"a": "cut o', ["line 2 column 8 ", "never closed"]),
    ("a.json", b'[{"a": "b"},\n {"a": 1}, {"a": oops, "b": 2}]', ["line 2 column 18 "]),
    ("a.json", b"[" + b'{"a": 1},' * 99_999 + b"oops]", ["line 1 column 899993 "]),
    ("a.jsonl", b'{"a": "b"}\n{"a": "cut o\n', ["line 2 column 7 ", "never closed"]),
    ("a.csv", b"prompt,completion\na,b\na,b,c\n", ["line 3", "3 columns"]),
    ("a.csv", b"prompt,completion\na\n", ["line 2", "1 columns"]),
    ("a.csv", b'prompt,completion\na,"b\n', ["CSV"]),
    ("a.csv", b"prompt,prompt\na,b\n", ["line 1", "twice"]),
    ("a.csv", b"\n\na,b\n", ["header"]),
    ("a.csv", b"prompt,completion\na,caf\xe9\n", ["line 2", "UTF-8"]),
    ("a.jsonl.gz", b"not gzip at all", ["gzip"]),
    ("a.jsonl.gz", gzip.compress(as_jsonl(ROWS * 500), mtime=0)[:-200], ["truncated"]),
    ("a.json.gz", gzip.compress(as_json(ROWS * 500), mtime=0)[:-200], ["truncated"]),
    ("a.jsonl.xz", lzma.compress(as_jsonl(ROWS * 500))[:-90], ["truncated"]),
    ("a.jsonl.bz2", bz2.compress(as_jsonl(ROWS * 500))[:-90], ["truncated"]),
    ("a.jsonl.bz2", b"BZh9" + b"junk" * 99, ["damaged"]),
    ("a.parquet.gz", b"x", ["Parquet"]),
    ("a.docx", b"x", ["no ending"]),
    ("noending", b"x", ["no ending"]),
]


@pytest.mark.parametrize(("name", "data", "words"), ERRORS, ids=lambda value: str(value)[:40])
def test_errors_name_the_file_and_the_line(
    tmp_path: Path, name: str, data: bytes, words: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(data)

    with pytest.raises(InvalidInputError) as caught:
        list(read_rows(path))

    assert str(path) in caught.value.problem
    assert [word for word in words if word not in caught.value.problem] == []
    assert caught.value.remedy


def test_a_gzip_file_without_its_ending_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(as_jsonl(ROWS)))

    assert len(list(read_rows(path))) == 3


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()

    with pytest.raises(NotFoundError, match=r"`train\.jsonl`"):
        list(read_rows(tmp_path / "trian.jsonl"))


@pytest.mark.parametrize("bad", ["a\0b.jsonl", "x" * 5000, "train.jsonl/inner.jsonl"])
def test_names_no_file_system_takes(tmp_path: Path, bad: str) -> None:
    (tmp_path / "train.jsonl").touch()

    with pytest.raises(UserError):
        list(read_rows(tmp_path / bad))


def test_pipes_are_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")

    with pytest.raises(InvalidInputError, match="is a pipe"):
        list(read_rows(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("method", ["open", "iterdir"])
def test_missing_permission_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(ROWS))

    def refuse(self: Path, *_: object) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(os if method == "open" else Path, method, refuse)

    with pytest.raises(SetupError, match="permission denied"):
        list(read_rows(tmp_path))


def test_an_empty_folder_and_no_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no data files"):
        list(read_rows(tmp_path))
    with pytest.raises(InvalidInputError, match="No data file"):
        list(read_rows([]))


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(["a.json", "a.jsonl", "a.csv", "a.tsv", "a.txt", "a.jsonl.gz"]),
    head=st.sampled_from([b"", b"[", b"{", b'[{"a": 1},', b"a,b\n", b"\x1f\x8b\x08\x00", b"BZh9"]),
    data=st.binary(max_size=60) | st.text('[]{}":,1a\\u\n ', max_size=40).map(str.encode),
)
def test_fuzz_no_bytes_escape_as_another_error(
    tmp_path: Path, name: str, head: bytes, data: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(head + data)
    try:
        rows = list(read_rows(path))
    except UserError:
        return
    assert rows
