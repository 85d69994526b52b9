"""The metric of tool calls: names and arguments as JSON, and what is no call."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.errors import InvalidInputError
from tightfit.data.call_syntax import HERMES
from tightfit.data.tools import ToolCall, read_tools
from tightfit.evaluation.metrics import METRICS
from tightfit.evaluation.scored_models import Question

TOOLS = read_tools([{"name": "get"}, {"name": "put"}])
GET, PUT = ToolCall("get", {"n": 2, "of": {"a": 1, "b": [True]}}), ToolCall("put", {})


def question(*calls: ToolCall, **changes: Any) -> Question:
    facts: dict[str, Any] = {
        "place": "a",
        "values": {},
        "messages": (),
        "num_prompt_tokens": 1,
        "gold": "",
        "num_gold_tokens": 1,
        "tools": TOOLS,
        "gold_calls": calls,
        "syntax": HERMES,
        **changes,
    }
    return Question(**facts)


def written(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


RIGHT = '{"arguments": {"of": {"b": [true], "a": 1.0}, "n": 2}, "name": "get"}'
OTHER = '{"name": "get", "arguments": {"n": "2", "of": {"a": 1, "b": [true]}}}'
BARE = '{"name": "put", "arguments": {}}'


@pytest.mark.parametrize(
    ("gold", "answer", "calls", "names", "readable"),
    [
        ((GET,), written(RIGHT), 1, 1, 1),
        ((GET,), f"Let me see.\n{written(RIGHT)}", 1, 1, 1),
        ((GET,), written(OTHER), 0, 1, 1),
        ((GET,), written(RIGHT.replace("true", "1")), 0, 1, 1),
        ((GET,), written(BARE), 0, 0, 1),
        ((GET,), "It is two.", 0, 0, 0),
        ((GET,), written(RIGHT[:-3]), 0, 0, 0),
        ((GET, PUT), written(BARE, RIGHT), 1, 1, 1),
        ((GET, PUT), written(RIGHT), 0, 0, 1),
        ((), "It is two.", 1, 1, None),
        ((), written(BARE), 0, 0, None),
    ],
)
def test_scores(
    gold: tuple[ToolCall, ...], answer: str, calls: int, names: int, readable: int | None
) -> None:
    make = METRICS["tool-calls"].make_score
    assert make is not None

    values = make([question(*gold)], None, [])(0, answer).values

    assert (values["tool_calls"], values["tool_names"]) == (calls, names)
    assert values.get("tool_json") == readable


def test_rows_without_tools_have_no_score() -> None:
    make = METRICS["tool-calls"].make_score
    assert make is not None

    assert make([question(GET), question(tools=())], None, [])(1, written(RIGHT)).values == {}
    assert not METRICS["tool-calls"].suits("chat", [question(tools=())])
    with pytest.raises(InvalidInputError):
        make([question(tools=())], None, [])
