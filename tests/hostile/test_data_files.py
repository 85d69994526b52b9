"""Data files in every format, whole, mutated and of the wrong kind: a report or one error."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutate import NAMES, VALUES, mutate_bytes, mutate_text, mutate_tree, plant_special, write_json

from hostile_trials import StartTrials
from tightfit.data.sources import data_files

ROWS: list[dict[str, Any]] = [
    {"prompt": f"What is {number} and {number}?", "completion": f"It is {2 * number}."}
    for number in range(12)
]
CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"Question {number}"},
            {"role": "assistant", "content": f"Answer {number}"},
        ]
    }
    for number in range(6)
]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def make_jsonl(rng: Random, rows: list[dict[str, Any]]) -> bytes:
    lines = [
        write_json(rng, mutate_tree(rng, row)) if rng.random() < 0.3 else json.dumps(row).encode()
        for row in rows
    ]
    return b"\n".join(lines)


def make_json(rng: Random, rows: list[dict[str, Any]]) -> bytes:
    held: Any = rng.choice((rows, {"data": rows}, {"rows": rows, "version": 1}))
    return write_json(rng, mutate_tree(rng, held))


def make_csv(rng: Random, rows: list[dict[str, Any]]) -> bytes:
    sign = rng.choice(",;\t|")
    lines = [sign.join(rows[0]), *(sign.join(map(str, row.values())) for row in rows)]
    return mutate_text(rng, "\n".join(lines)).encode("utf-8", "surrogateescape")


def make_text(rng: Random, rows: list[dict[str, Any]]) -> bytes:
    return mutate_bytes(rng, "\n".join(str(row) for row in rows).encode())


def make_parquet(rng: Random, rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return mutate_bytes(rng, sink.getvalue().to_pybytes())


def make_arrow(rng: Random, rows: list[dict[str, Any]]) -> bytes:
    import pyarrow

    table, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
    new = rng.choice((pyarrow.ipc.new_file, pyarrow.ipc.new_stream))
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return mutate_bytes(rng, sink.getvalue().to_pybytes())


FORMATS: dict[str, Callable[[Random, list[dict[str, Any]]], bytes]] = {
    ".jsonl": make_jsonl,
    ".json": make_json,
    ".csv": make_csv,
    ".tsv": make_csv,
    ".txt": make_text,
    ".parquet": make_parquet,
    ".arrow": make_arrow,
}


def make_case(rng: Random, folder: Path, model: Path) -> list[str]:
    ending = rng.choice(list(FORMATS))
    content = FORMATS[ending](rng, rng.choice((ROWS, CHATS)))
    path = folder / f"rows{ending}"
    if ending not in (".parquet", ".arrow") and rng.random() < 0.25:
        packing = rng.choice(list(PACKERS))
        content = PACKERS[packing](content)
        if rng.random() < 0.7:
            content = mutate_bytes(rng, content)
        path = folder / f"rows{ending}{packing}"
    path.write_bytes(content)
    if rng.random() < 0.1:
        plant_special(rng, path)
    named = path.name
    if rng.random() < 0.1:
        named = rng.choice(NAMES)
    elif rng.random() < 0.1:
        (folder / "saved").mkdir()
        state = {"_data_files": [{"filename": rng.choice((*VALUES, "../rows.arrow"))}]}
        (folder / "saved" / "state.json").write_bytes(write_json(rng, state))
        if rng.random() < 0.3:
            plant_special(rng, folder / "saved" / "state.json")
        named = "saved"
    words = ["prepare", str(model), "--data", named]
    return [*words, "--skip-invalid"] if rng.random() < 0.5 else words


def test_data_files(trials: StartTrials, model: Path) -> None:
    trials("data files").run(lambda rng, folder: make_case(rng, folder, model))


@pytest.mark.parametrize(
    "name",
    ["/dev/zero", "/dev/stdin", "a\0b.jsonl", "a" * 300 + ".jsonl", "/".join(["a" * 200] * 30)],
)
def test_names_that_are_no_data(trials: StartTrials, model: Path, name: str) -> None:
    once = trials("data names")
    for words in (
        ["prepare", str(model), "--data", name],
        ["plan", "gpt2", "--on", "T4", "--data", name],
        ["init", "--model", "gpt2", "--data", name],
    ):
        assert once.run_one(name[:20], lambda _, words=words: words) not in (0, 70)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.arrow", "rows.txt.gz"])
def test_a_pipe_is_no_data(trials: StartTrials, model: Path, name: str) -> None:
    def make(folder: Path) -> list[str]:
        os.mkfifo(folder / name)
        return ["prepare", str(model), "--data", name]

    assert trials("data pipes").run_one(name, make) == 4


def test_a_key_that_is_no_text_once_failed(trials: StartTrials, model: Path) -> None:
    def make(folder: Path) -> list[str]:
        rows = '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "\\ud800completion": "b"}\n'
        (folder / "rows.jsonl").write_text(rows)
        return ["prepare", str(model), "--data", "rows.jsonl", "--skip-invalid"]

    assert trials("data keys").run_one("key", make) == 0


def test_a_deep_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(1200):
        folder /= "a"
        folder.mkdir()
    (folder / "rows.md").write_text("text\n")
    os.mkfifo(folder / "pipe.md")
    assert data_files(tmp_path) == [folder / "rows.md"]
    for name in ("rows.md", "pipe.md"):
        (folder / name).unlink()
    while folder != tmp_path:  # too deep for what removes old folders of tests
        folder.rmdir()
        folder = folder.parent
