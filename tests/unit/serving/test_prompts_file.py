"""Prompts from files of every kind: what is asked, and that no answer is given away."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.data.formats import Message
from tightfit.serving.generate.prompts import (
    PromptRequest,
    check_template,
    digest_prompts,
    fill_template,
    read_prompts,
)

GOLD = "the gold answer"


def read(path: Path | str, **changes: Any) -> list[tuple[Message, ...]]:
    request = PromptRequest(path=str(path), **changes)
    return [prompt.messages for prompt in read_prompts(request)]


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_each_line_of_a_text_file_is_a_prompt_and_blank_ones_are_none(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  \ntwo  \r\nthree", encoding="utf-8")

    prompts = read_prompts(PromptRequest(path=str(path)))

    assert [prompt.text for prompt in prompts] == ["one", "two  ", "three"]
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert prompts[2].place == f"{path} line 5"


def test_a_whole_file_is_one_prompt(tmp_path: Path) -> None:
    path = tmp_path / "story"
    path.write_text("once\n\nupon a time\n", encoding="utf-8")

    assert read(path, is_whole=True) == [(Message("user", "once\n\nupon a time"),)]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "q", "completion": GOLD}, ["q"]),
        ({"prompt": "q"}, ["q"]),
        ({"prompt": "q", "completion": None}, ["q"]),
        ({"instruction": "do", "input": "this", "output": GOLD}, ["do\n\nthis"]),
        ({"instruction": "do", "input": ""}, ["do"]),
        ({"question": "q", "context": "c", "answer": GOLD}, ["q\n\nc"]),
        ({"question": "q", "context": "c"}, ["q\n\nc"]),
        ({"text": "q"}, ["q"]),
        ({"system": "s", "prompt": "q", "answer": GOLD}, ["s", "q"]),
        ({"messages": [{"role": "user", "content": "q"}]}, ["q"]),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": GOLD},
                ]
            },
            ["a", "b", "q"],
        ),
    ],
)
def test_a_row_asks_and_its_answer_is_not_sent(
    row: dict[str, Any], asked: list[str], tmp_path: Path
) -> None:
    (messages,) = read(write_rows(tmp_path / "rows.jsonl", row))

    assert [message.content for message in messages] == asked
    assert messages[-1].role == "user"


def test_csv_and_a_slice_of_rows(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text('question,context\n"a, b",c\nd,e\n', encoding="utf-8")

    assert read(table) == [(Message("user", "a, b\n\nc"),), (Message("user", "d\n\ne"),)]
    assert read(f"{table}[1:]") == [(Message("user", "d\n\ne"),)]
    assert len(read(table, limit=1)) == 1


def test_parquet_rows(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pip install 'tightfit[data]'")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"prompt": ["a", "b"]}), tmp_path / "rows.parquet")

    assert [m[0].content for m in read(tmp_path / "rows.parquet")] == ["a", "b"]


def test_stdin_holds_lines_or_rows_by_what_its_first_line_is() -> None:
    def of(data: bytes) -> list[str]:
        request = PromptRequest(path="-")
        return [prompt.messages[-1].content for prompt in read_prompts(request, io.BytesIO(data))]

    assert of(b"one\ntwo\n") == ["one", "two"]
    assert of(b'\n{"prompt": "one"}\n{"prompt": "two"}\n') == ["one", "two"]
    assert of(b"{not json}\n") == ["{not json}"]


def test_a_template_is_filled_from_each_row(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"a": "x", "n": 3, "who": {"k": "ä"}})

    (messages,) = read(rows, template="{a}-{n} {{kept}} {who}")

    assert messages == (Message("user", 'x-3 {kept} {"k": "ä"}'),)


@given(value=st.text())
def test_braces_in_a_value_are_not_a_template(value: str) -> None:
    assert fill_template("<{column}>", {"column": value}, "row 1") == f"<{value}>"


@pytest.mark.parametrize("template", ["no column", "{", "{}", "{a!r}", "{a:>10}"])
def test_a_template_that_cannot_be_filled_is_refused(template: str) -> None:
    with pytest.raises(InvalidInputError):
        check_template(template)


def test_a_missing_column_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"article": "x"})

    with pytest.raises(NotFoundError, match="no column `atricle`") as caught:
        read(rows, column="atricle")
    assert "`article`" in caught.value.remedy
    with pytest.raises(InvalidInputError, match="none of the keys that ask"):
        read(write_rows(tmp_path / "odd.jsonl", {"odd": "x"}))


def test_the_system_prompt_yields_to_the_rows_own(tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "b", "system": "row's own"}
    )

    first, second = read(rows, system="ours")

    assert first == (Message("system", "ours"), Message("user", "a"))
    assert second == (Message("system", "row's own"), Message("user", "b"))


def test_raw_text_is_no_conversation(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    rows = write_rows(tmp_path / "rows.jsonl", {"messages": turns})

    with pytest.raises(InvalidInputError, match="conversation"):
        read(rows, is_raw=True)


def test_columns_of_plain_text_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n", encoding="utf-8")
    with pytest.raises(UsageError, match="plain text"):
        read(path, column="question")
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="no prompts"):
        read(path)
    with pytest.raises(NotFoundError):
        read(tmp_path / "missing.txt")


def test_the_digest_tells_prompts_their_order_and_their_roles_apart(tmp_path: Path) -> None:
    def digest(*texts: str, **changes: Any) -> str:
        path = tmp_path / "p.txt"
        path.write_text("\n".join(texts), encoding="utf-8")
        return digest_prompts(read_prompts(PromptRequest(path=str(path), **changes)))

    seen = {
        digest("a", "b"),
        digest("b", "a"),
        digest("a"),
        digest("ab"),
        digest("a", "b", system="s"),
    }
    assert len(seen) == 5
    assert digest("a", "b") == digest("a", "b")
