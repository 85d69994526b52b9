"""A recipe as commented text: the keys that are stated, and every other one behind a `#`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from tightfit.core.settings import (
    DeclaredSetting,
    JobSettings,
    RecipeMethod,
    StrategySettings,
    TrainingSettings,
    list_settings,
    words_of,
)
from tightfit.core.yaml_text import write_text_value

_REMARK_COLUMN = 29
_ABOVE = ("model", "data", "on", "method")
"""Keys that are asked for, in the order of the file."""


def write_recipe(stated: Mapping[str, Any], *, remarks: Mapping[str, str], title: str) -> str:
    """The text of a recipe file. `remarks` say more of stated keys; `title` heads the file.

    `data` is a path, or a list of mappings as the file has them. Every key and what is said of it
    come from the declared settings.
    """
    lines = [*(f"# {line}".rstrip() for line in title.splitlines()), ""]
    for key in _ABOVE:
        if key in stated:
            lines += _state(key, stated[key], remarks.get(key, ""))
    words = ", ".join(words_of(RecipeMethod))
    if "method" not in stated:
        lines.append(_with_remark("# method: auto", words))
    lines.append("")
    for key, declared in _list_top_level():
        if key in stated:
            lines += _state(key, stated[key], _describe(declared))
        else:
            lines.append(_with_remark(f"# {key}: {_show_example(declared)}", _describe(declared)))
    for section, below in (("lora", _list_lora()), ("strategy", _list_strategy())):
        lines += ["", f"# {section}:"]
        lines += [
            _with_remark(f"#   {key}: {_show_example(declared)}", _describe(declared))
            for key, declared in below
        ]
    lines.append("")
    if "output" in stated:
        lines += _state("output", stated["output"], remarks.get("output", ""))
    else:
        lines.append(_with_remark("# output: runs/mine", "Folder of the run."))
    return "\n".join(lines) + "\n"


def _list_top_level() -> Iterator[tuple[str, DeclaredSetting]]:
    """Settings that a recipe states at its top, beside the method."""
    yield from list_settings(JobSettings).items()
    for name, declared in list_settings().items():
        if declared.setting.recipe_key == name and name not in _ABOVE:
            yield name, declared
    for name, declared in list_settings(TrainingSettings).items():
        if not declared.setting.recipe_key:
            yield name, declared


def _list_lora() -> Iterator[tuple[str, DeclaredSetting]]:
    for declaring in (StrategySettings, TrainingSettings):
        for declared in list_settings(declaring).values():
            section, _, key = declared.setting.recipe_key.partition(".")
            if section == "lora":
                yield key, declared


def _list_strategy() -> Iterator[tuple[str, DeclaredSetting]]:
    """Those of the many that have an example: enough to show how a choice is fixed."""
    for name, declared in list_settings().items():
        if declared.setting.example and not declared.setting.recipe_key:
            yield name, declared


def _state(key: str, value: Any, remark: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield _with_remark(f"{key}: {_show(value)}", remark)
        return
    yield _with_remark(f"{key}:", remark)
    for item in value:
        for number, (name, inner) in enumerate(item.items()):
            yield f"  {' ' if number else '-'} {name}: {_show(inner)}"


def _with_remark(line: str, remark: str) -> str:
    plain = " ".join(remark.split())
    return f"{line:<{_REMARK_COLUMN}}  # {plain}" if plain else line


def _describe(declared: DeclaredSetting) -> str:
    """The setting's help; the words it takes stand before the default."""
    text, bracket, default = declared.setting.help.partition(" [default: ")
    words = f"{text.rstrip('.')}: {', '.join(declared.words)}." if declared.words else text
    return words + bracket + default


def _show_example(declared: DeclaredSetting) -> str:
    """The example that the declaration has, else the default."""
    if isinstance(declared.default, tuple):  # an option's example is one word of the list
        return _show(declared.default)
    return declared.setting.example or _show(declared.default)


def _show(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_show, value))}]"
    return write_text_value(value) if isinstance(value, str) else str(value)
