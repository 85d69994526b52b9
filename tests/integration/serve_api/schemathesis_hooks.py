"""Loaded by schemathesis: most generated requests name a model that is there, and end soon."""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_TOKENS = 4


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """Only valid values are exchanged for valid ones, so that invalid requests stay invalid."""
    if not isinstance(body, dict):
        return body
    changed = dict(body)
    if isinstance(changed.get("model"), str) and changed["model"]:
        changed["model"] = ("plain", "gguf")[len(changed["model"]) % 2]
    for name in ("max_tokens", "max_completion_tokens"):
        value = changed.get(name)
        if value is None or (type(value) is int and MAX_TOKENS < value < 2**31):
            changed[name] = MAX_TOKENS
    return changed
