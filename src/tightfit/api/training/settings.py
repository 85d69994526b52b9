"""Settings as command-line words: `--set` is read here, and jobs are written back as commands."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from pydantic import ValidationError

from tightfit.api.options.training import JobOptions, TrainingOptions
from tightfit.core.errors import UsageError
from tightfit.core.new_tokens import NEW_TOKENS, read_token_files
from tightfit.core.options import list_given, repeat_options
from tightfit.core.recipe import Recipe
from tightfit.core.settings import RENAMED_SETTINGS, Method, find_setting, names_where
from tightfit.core.strategy import Strategy
from tightfit.core.text import did_you_mean, nearest, sanitize, shorten
from tightfit.core.validation import describe_validation_errors
from tightfit.planning.describe import name_method

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
FIELDS = tuple(name for name in Strategy.model_fields if name not in ("trainer", "quirks"))
"""What can be set; the trainer is an option of its own."""


def read_settings(texts: Iterable[str] | None) -> dict[str, Any]:
    """Fields by name, in the Strategy's own types."""
    found: dict[str, Any] = {}
    for text in texts or ():
        name, value = _split(text)
        if found.get(name, value) != value:
            raise UsageError(
                f"`--set {name}` is given twice: {shorten(found[name])} and {shorten(value)}.",
                remedy=f"keep one: --set {name}={shorten(value)}",
            )
        found[name] = value
    read = {name: _read_value(name, value) for name, value in found.items()}
    try:
        checked = Strategy.model_validate(read)
    except ValidationError as error:
        raise _refuse(error, found) from error
    return {name: getattr(checked, name) for name in found}


def refuse_twice(settings: Mapping[str, Any], given: Mapping[str, object]) -> None:
    """An option and `--set` for the same field contradict each other, or will after an edit."""
    for name, value in given.items():
        if value is None or name not in settings:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            stated = option if value else option.replace("--", "--no-", 1)
        else:
            stated = f"{option} {shorten(value)}"
        raise UsageError(
            f"`{stated}` and `--set {name}={shorten(show_value(settings[name]))}` both fix {name}.",
            remedy=f"keep one: {stated}",
        )


def refuse_trace(trainer: str | None, *, is_traced: bool) -> None:
    """A trace runs tightfit's own step."""
    if trainer and is_traced:
        raise UsageError(
            f"`--trace` runs tightfit's own step, and `--trainer {shorten(trainer)}` runs another.",
            remedy=f"--trainer {shorten(trainer)}    (without --trace: by formula)",
        )


def show_value(value: Any) -> str:
    """A field's value as `--set` takes it, whole: it is read back."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return sanitize(",".join(value) if isinstance(value, tuple) else str(value))


def name_setting(text: str) -> str:
    """The field that `key=value` is about."""
    return text.partition("=")[0].strip().replace("-", "_")


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    name = name_setting(text)
    if not equals or not value.strip():
        known = name if name in FIELDS else "packing"
        raise UsageError(
            f"`--set {shorten(text)}` has no value.", remedy=f"--set {known}={_example(known)}"
        )
    if name in RENAMED_SETTINGS:
        new = RENAMED_SETTINGS[name]
        raise UsageError(
            f"The setting `{name}` is now called `{new}`.",
            remedy=f"--set {new}={shorten(value.strip())}",
        )
    if name in Recipe.model_fields and name not in FIELDS:
        has_option = name in {field.name for field in fields(TrainingOptions)}
        option, given = f"--{name.replace('_', '-')}", shorten(value.strip())
        raise UsageError(
            f"`{name}` is a key of a recipe, not a field of a strategy.",
            remedy=f"{option} {given}"
            if has_option
            else f"write `{name}: {given}` into a recipe    (tightfit train recipe.yaml)",
        )
    if name not in FIELDS:
        near = nearest(name, FIELDS)
        meant = shlex.quote(f"{near[0]}={shorten(value.strip())}") if near else ""
        raise UsageError(
            f"`{shorten(key.strip())}` is no field of a strategy.{did_you_mean(name, FIELDS)}",
            remedy=f"--set {meant}" if meant else f"--set with one of {', '.join(FIELDS)}",
        )
    if name == "objective":
        raise UsageError(
            f"`--set objective={shorten(value.strip())}`: the data must fit the objective, which "
            "is an option of its own.",
            remedy=f"--objective {shorten(value.strip())}",
        )
    if name == "method" and value.strip().lower() in ("qlora", "auto"):
        word = value.strip().lower()
        meaning = "lora over nf4 weights" if word == "qlora" else "the planner's choice"
        raise UsageError(
            f"`--set method={word}`: {word} is {meaning}, not a value of the field.",
            remedy=f"--method {word}",
        )
    return name, value.strip()


def _read_value(name: str, text: str) -> Any:
    if name in NEW_TOKENS:
        return read_token_files([part for part in text.split(",") if part])
    if name == "lora_targets":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if Strategy.model_fields[name].annotation is bool:
        if text.lower() not in _TRUTH:
            raise UsageError(
                f"`--set {name}={shorten(text)}` is neither true nor false.",
                remedy=f"--set {name}=true",
            )
        return _TRUTH[text.lower()]
    return text.lower()


def _refuse(error: ValidationError, typed: Mapping[str, str]) -> UsageError:
    name = str(error.errors()[0]["loc"][0])
    stated = describe_validation_errors(error, Strategy, lines={})
    # `name: expected ...` or `name[0]: ...`: ours begins with what was typed.
    expected = next(line for line in stated if line.startswith(f"`{name}")).partition(": ")[2]
    return UsageError(
        f"`--set {name}={shorten(typed[name])}`: {expected}",
        remedy=f"--set {name}={_example(name)}",
    )


def _example(name: str) -> str:
    field = Strategy.model_fields[name]
    if name in NEW_TOKENS:
        return find_setting(name).setting.example
    return "true" if field.annotation is bool else show_value(field.get_default())


# A command line again, as part of a remedy.


def repeat_plan(options: JobOptions, *, without: Collection[str] = ()) -> str:
    """`tightfit plan` of the job that was asked for, less its hardware, to be continued.

    `without` are settings to leave out, as they were typed.
    """
    given = list_given(
        options, ("method", "objective", "seq_len", "data", "tools", "effective_batch", "trainer")
    )
    given["--set"] = [text for text in options.settings or () if text not in without]
    return shlex.join(["tightfit", "plan", options.job, *repeat_options(given)])


# The words that make the planner come to one plan alone.

NOT_SEARCHED = names_where(is_searched=False)
"""What the planner takes from the job and never chooses; `method` is an option of its own."""
_OF_ADAPTERS = names_where(is_of_adapters=True)


def list_plan_options(strategy: Strategy) -> tuple[str, ...]:
    """`--method` and a `--set` for every lever."""
    name = name_method(strategy)
    words = ["--method", name if name in ("full", "qlora") else "lora"]
    is_full = strategy.method is Method.FULL
    for field in FIELDS:
        value = getattr(strategy, field)
        if field in NOT_SEARCHED or value is None or (is_full and field in _OF_ADAPTERS):
            continue
        words += ["--set", f"{field}={show_value(value)}"]
    return tuple(words)
