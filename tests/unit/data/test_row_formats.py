"""Formats: recognised by their keys, turned into messages, refused with the keys they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tightfit.core.errors import InvalidInputError
from tightfit.data.formats import (
    FORMATS,
    Message,
    Turns,
    recognise_format,
)
from tightfit.data.readers import Row


def row_of(values: dict[str, Any]) -> Row:
    return Row(values, Path("train.jsonl"), 7, "line")


CASES: list[tuple[dict[str, Any], str, Turns]] = [
    (
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        "alpaca",
        Turns("Add.\n\n1 2", "3", 2),
    ),
    ({"instruction": "Add.", "input": "", "output": "3"}, "alpaca", Turns("Add.", "3", 2)),
    ({"instruction": "Add.", "input": None, "output": "3"}, "alpaca", Turns("Add.", "3", 2)),
    (
        {"instruction": "Sum", "context": "1", "response": "3", "category": "x"},
        "alpaca",
        Turns("Sum\n\n1", "3", 2),
    ),
    (
        {"instruction": "Add.", "output": "3", "system": "Be terse."},
        "alpaca",
        Turns("Be terse.\nAdd.", "3", 3),
    ),
    (
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": [{"type": "text", "text": "c"}]},
                {"role": "assistant", "content": "d"},
            ]
        },
        "chat",
        Turns("S\na\nc", "b\nd", 5),
    ),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        "chat",
        Turns("a", "b", 2),
    ),
    ({"prompt": "a", "completion": "b"}, "prompt-completion", Turns("a", "b", 2)),
    ({"prompt": "a", "response": "b"}, "prompt-completion", Turns("a", "b", 2)),
    ({"question": "a", "answer": 42}, "prompt-completion", Turns("a", "42", 2)),
    (
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [{"role": "assistant", "content": "b"}],
        },
        "prompt-completion",
        Turns("a", "b", 2),
    ),
    (
        {"id": 1, "dialogue": "a", "summary": "b"},
        "dialogue-summary",
        Turns("Summarize this:\n\na", "b", 2),
    ),
    (
        {"db_id": "x", "question": "q", "context": "c", "answer": "a"},
        "question-context-answer",
        Turns("q\n\nc", "a", 2),
    ),
    (
        {"question": "q", "context": "c", "answers": {"text": ["a", "b"], "answer_start": [1, 2]}},
        "question-context-answer",
        Turns("q\n\nc", "a", 2),
    ),
    ({"text": "words", "url": "x"}, "text", Turns("", "words", 0)),
]


@pytest.mark.parametrize(("values", "name", "turns"), CASES)
def test_rows_are_recognised_and_split(values: dict[str, Any], name: str, turns: Turns) -> None:
    row = row_of(values)

    row_format = recognise_format(row)

    assert row_format.name == name
    assert row_format.to_turns(row) == turns


def test_the_cases_cover_every_format() -> None:
    assert {name for _, name, _ in CASES} == set(FORMATS)


def test_messages_keep_order_and_roles() -> None:
    row = row_of(
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    )

    assert FORMATS["chat"].to_messages(row) == [
        Message("user", "a"),
        Message("assistant", "b"),
    ]


def test_a_tool_call_without_content_counts_its_call() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find"}}]}
    row = row_of(
        {"messages": [{"role": "user", "content": "a"}, call], "tools": [{"name": "find"}]}
    )

    assert "find" in FORMATS["chat"].to_turns(row).answer


def test_unknown_keys_are_listed_with_near_ones() -> None:
    with pytest.raises(InvalidInputError) as caught:
        recognise_format(row_of({"instuction": "a", "outputs": "b", "\x1b[31m": "c"}))

    problem = caught.value.problem
    assert "train.jsonl line 7" in problem
    assert "`instuction`: did you mean `instruction`?" in problem
    assert "`outputs`: did you mean `output`?" in problem
    assert "\x1b" not in problem
    assert all(name in caught.value.remedy for name in FORMATS)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("alpaca", {"prompt": "a", "completion": "b"}, ["instruction", "`prompt`, `completion`"]),
        ("alpaca", {"instruction": "a"}, ["`output` or `response`"]),
        ("alpaca", {"instruction": None, "output": "b"}, ["null"]),
        ("prompt-completion", {"prompt": "a", "completion": {"x": 1}}, ["an object"]),
        ("prompt-completion", {"prompt": "a", "completion": float("nan")}, ["a number", "nan"]),
        ("prompt-completion", {"prompt": 5, "completion": "b"}, ["a number: 5"]),
        ("text", {"text": float("nan")}, ["line 7", "a number"]),
        ("text", {"text": 12}, ["a number: 12"]),
        ("text", {"text": True}, ["true/false"]),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, ["message 1", "a number"]),
        ("prompt-completion", {"prompt": "a", "completion": []}, ["a list"]),
        ("chat", {"messages": "hello"}, ["list of messages", "text"]),
        ("chat", {"messages": []}, ["empty list"]),
        ("chat", {"messages": ["hello"]}, ["message 1", "text"]),
        ("chat", {"messages": [{"content": "a"}]}, ["message 1", "no `role`"]),
        ("chat", {"messages": [{"role": "asistant", "content": "a"}]}, ["`assistant`"]),
        ("chat", {"messages": [{"role": 5, "content": "a"}]}, ["unknown role"]),
        ("chat", {"messages": [{"role": "user"}]}, ["no `content`"]),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["not text"]),
        ("text", {"text": ["a"]}, ["a list"]),
    ],
)
def test_broken_rows_name_their_place(name: str, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        FORMATS[name].to_turns(row_of(values))

    assert "train.jsonl line 7" in caught.value.problem
    assert [word for word in words if word not in caught.value.problem] == []


def test_reasoning_stands_before_the_answer_it_led_to(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2 "}
    asked = {"role": "user", "content": "2 + 2?", "thinking": "ignored"}
    row = Row({"messages": [asked, answer]}, tmp_path, 1, "line")

    messages = recognise_format(row).to_messages(row)

    assert messages[0].content == "2 + 2?"
    assert messages[1].reasoning == "2 and 2"
    assert messages[1].content == "4"
