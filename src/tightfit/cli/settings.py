"""`--set key=value`: any field of the strategy, fixed by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from tightfit.core.errors import UsageError
from tightfit.core.strategy import Strategy
from tightfit.core.suggest import did_you_mean

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def read_settings(texts: Iterable[str] | None) -> dict[str, Any]:
    """Fields by name, in the Strategy's own types."""
    found: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not value.strip():
            raise UsageError(
                f"`--set {text}` has no value.", remedy=f"--set {name or 'packing'}=VALUE"
            )
        if name not in Strategy.model_fields:
            raise UsageError(
                f"`{key.strip()}` is no field of a strategy."
                f"{did_you_mean(name, Strategy.model_fields)}",
                remedy="--set with one of " + ", ".join(Strategy.model_fields),
            )
        found[name] = _read_value(name, value.strip())
    try:
        checked = Strategy.model_validate(found)
    except ValidationError as fault:
        first = fault.errors()[0]
        raise UsageError(
            f"`--set {first['loc'][0]}={first['input']}`: {first['msg'][:1].lower()}"
            f"{first['msg'][1:]}.",
            remedy=f"--set {first['loc'][0]}=VALUE",
        ) from fault
    return {name: getattr(checked, name) for name in found}


def _read_value(name: str, text: str) -> Any:
    if name == "lora_targets":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if Strategy.model_fields[name].annotation is bool:
        return _TRUTH.get(text.lower(), text)
    return text.lower()
