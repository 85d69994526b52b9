"""Parts of datasets: what people write, against Python's own slices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.strategy import DataSource
from tightfit.data.readers import ReadMeter
from tightfit.data.sources import open_source, parse_row_slice, read_source


def write(path: Path, num_rows: int = 50, start: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": "p", "completion": str(start + i)} for i in range(num_rows)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def numbers(path: Path | str, take: str | None = None, split: str = "train") -> list[int]:
    source = DataSource.model_validate({"path": str(path), "take": take, "split": split})
    rows = read_source(open_source(source), ReadMeter())
    return [int(row.values["completion"]) for row, _ in rows]


@pytest.mark.parametrize(
    ("take", "expected"),
    [
        ("10", range(10)),
        ("1_0", range(10)),
        ("10%", range(5)),
        ("[:10%]", range(5)),
        ("train[:10%]", range(5)),
        ("[10:20]", range(10, 20)),
        ("[-5:]", range(45, 50)),
        ("[:-40]", range(10)),
        ("[90%:]", range(45, 50)),
        ("[10%:20]", range(5, 20)),
        ("[:]", range(50)),
        ("1000", range(50)),
        ("train", range(50)),
        (" train [ 2 : 4 ] ", range(2, 4)),
        ("2.5%", range(1)),
    ],
)
def test_parts(take: str, expected: range, tmp_path: Path) -> None:
    assert numbers(write(tmp_path / "train.jsonl"), take) == list(expected)


def test_a_part_as_the_end_of_a_path(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl")

    assert numbers(f"{path}[:10%]") == list(range(5))
    literal = write(tmp_path / "odd[1:2].jsonl", 3)
    assert numbers(literal) == [0, 1, 2]
    with pytest.raises(InvalidInputError, match="another"):
        numbers(f"{path}[:10%]", "5")
    with pytest.raises(NotFoundError, match="no data file"):
        numbers(tmp_path / "missing.jsonl[:10%]")


@pytest.mark.parametrize(
    "take",
    ["", "0", "-3", "101%", "1.5", "x", "[1:2:3]", "[1]", "[1:", "tain[:10%]", "train 10", "[a:b]"],
)
def test_nonsense_is_refused_with_examples(take: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_row_slice(take)
    assert "train[:10%]" in caught.value.remedy


@pytest.mark.parametrize("take", ["[20:10]", "0.1%", "[60:]", "[5:5]"])
def test_a_part_without_rows_is_refused(take: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        numbers(write(tmp_path / "a.jsonl"), take)


@given(num_rows=st.integers(1, 40), low=st.integers(-45, 45), high=st.integers(-45, 45))
def test_slices_are_pythons(num_rows: int, low: int, high: int) -> None:
    expected = list(range(num_rows))[low:high]
    take = parse_row_slice(f"[{low}:{high}]")
    if expected:
        first, last = take.range(num_rows, "x")
        assert list(range(num_rows))[first:last] == expected
    else:
        with pytest.raises(InvalidInputError):
            take.range(num_rows, "x")


def test_splits_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train-00000.jsonl", 3)
    write(tmp_path / "d" / "validation-00000.jsonl", 2, start=100)
    write(tmp_path / "d" / "test-00000.jsonl", 1, start=200)
    folder = tmp_path / "d"

    assert numbers(folder) == [0, 1, 2]
    assert numbers(folder, "validation") == [100, 101]
    assert numbers(folder, "valid[:1]") == [100]
    assert numbers(folder, "test") == [200]
    assert numbers(folder, split="eval") == [100, 101]
    with pytest.raises(InvalidInputError, match="not the validation split"):
        numbers(folder / "train-00000.jsonl", "validation[:1]")
    only = tmp_path / "only"
    write(only / "rows.jsonl", 1)
    with pytest.raises(InvalidInputError, match="no files named train"):
        numbers(only, "train")
