"""Loaded by schemathesis: most generated requests name a model that is there, and end soon."""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_TOKENS = 4


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
    for name in ("max_tokens", "max_completion_tokens"):
        value = changed.get(name)
        if value is None or (type(value) is int and MAX_TOKENS < value < 2**31):
            changed[name] = MAX_TOKENS
    case.body = changed
