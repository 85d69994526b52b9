"""Loaded by schemathesis: most generated requests name a model that is there, end soon, and have no
tools, since a description cannot say that a result follows its call."""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_TOKENS = 4
KEEPS_TOOLS = 4
"""One request in so many stays as it was generated."""


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    """Of every phase. Only valid values are exchanged for valid ones, so that invalid requests stay
    invalid."""
    if not isinstance(case.body, dict):
        return
    changed = dict(case.body)
    model = changed.get("model")
    if model is None or (isinstance(model, str) and model):
        changed["model"] = ("plain", "gguf")[len(model or changed) % 2]
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = changed.get(name)
        if value is None or (type(value) is int and MAX_TOKENS < value < 2**31):
            changed[name] = MAX_TOKENS
    if len(repr(case.body)) % KEEPS_TOOLS:
        leave_tools_out(changed)
    case.body = changed


def leave_tools_out(body: dict[str, Any]) -> None:
    tools, messages = body.get("tools"), body.get("messages")
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        body["tools"] = None
    if isinstance(messages, list):
        body["messages"] = [leave_calls_out(message) for message in messages]


def leave_calls_out(message: Any) -> Any:
    """A turn of text, where its role and content are valid."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return message
    changed = dict(message)
    if changed["role"] == "tool":
        changed["role"] = "user"
    if changed.get("content", "") is None and changed.get("tool_calls") in (None, []):
        changed["content"] = "Hello"
    return changed
