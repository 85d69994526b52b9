"""Values of options: words and numbers are read here, and offered to the shell for completion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import TypeVar

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Attention, Loss, Offload, Sharding, list_settings, words_of
from tightfit.core.suggest import did_you_mean
from tightfit.core.text import shorten

METHODS = ("full", "lora", "qlora", "load")
PLAN_METHODS = ("auto", "full", "lora", "qlora")
WEIGHTS = words_of(Dtype)
COMPUTE = list_settings()["compute"].words
OPTIMIZERS = words_of(Optimizer)
ATTENTIONS = words_of(Attention)
LOSSES = words_of(Loss)
SHARDINGS = words_of(Sharding)
OFFLOADS = words_of(Offload)

Choice = TypeVar("Choice", bound=Enum)
Number = TypeVar("Number", int, float)


def read_word(text: str, known: Iterable[str], *, option: str) -> str:
    """`text` as one of the known words, or a message that names the nearest."""
    words = list(known)
    wanted = text.strip().lower()
    if wanted in words:
        return wanted
    raise UsageError(
        f"`{option} {shorten(text)}` is not known.{did_you_mean(text, words)}",
        remedy=f"{option} " + "|".join(words),
    )


def read_choice(kind: type[Choice], text: str, *, known: tuple[str, ...], option: str) -> Choice:
    return kind(read_word(text, known, option=option))


def offer(words: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A completion callback for a fixed set of words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete.lower())]

    return complete


def empty_value(name: str, example: str) -> UsageError:
    is_option = name.startswith("-")
    next_try = f"{name} {example}" if is_option else f"{example} in its place"
    return UsageError(
        f"`{name}` was given an empty value.", remedy=f"{next_try}    (is a shell variable unset?)"
    )


def _read_number(
    parse: Callable[[str], Number], text: str, option: str, example: str, *, kind: str
) -> tuple[str, Number]:
    """What was typed, and the number it is; or a message that shows a value that works."""
    typed = str(text).strip()
    if not typed:
        raise empty_value(option, example)
    try:
        return typed, parse(typed)
    except ValueError:
        raise UsageError(
            f"`{option} {shorten(typed)}` is not {kind}.", remedy=f"{option} {example}"
        ) from None


def read_whole(text: str, option: str, most: int, example: int) -> int:
    """A whole number from 1 to `most`, or a message that names the value and the bound."""
    typed, number = _read_number(int, text, option, f"{example}", kind="a whole number")
    if not 1 <= number <= most:
        raise UsageError(
            f"`{option} {shorten(typed)}` is not between 1 and {most:,}.",
            remedy=f"{option} {example}",
        )
    return number


def read_positive(text: str, option: str, most: float, example: float) -> float:
    """A number above 0 and up to `most`."""
    typed, number = _read_number(float, text, option, f"{example:g}", kind="a number")
    if not 0 < number <= most:
        raise UsageError(
            f"`{option} {shorten(typed)}` is not above 0 and up to {most:,g}.",
            remedy=f"{option} {example:g}",
        )
    return number


def read_count(text: str, *, option: str) -> int:
    """`2851e6`, `2.8B`, `32M` or `32000000` as a positive whole number."""
    factors = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    stripped = text.strip().lower().replace("_", "").replace(",", "")
    factor = factors.get(stripped[-1:], 1)
    try:
        number = float(stripped[:-1] if factor > 1 else stripped) * factor
    except ValueError:
        number = float("nan")
    if not 1 <= number <= 10**15:
        raise UsageError(
            f"`{option} {shorten(text)}` is not a number of parameters.",
            remedy=f"{option} 2851e6, or 2.8B, or 32000000",
        )
    return round(number)


# What the shell offers for names: models and hardware, from the offline catalogue.

_COUNT_BEFORE_NAME = re.compile(r"^((?:\d+\s*n\s*x\s*)?\d+\s*x\s*)(.*)$", re.IGNORECASE)


def complete_model(incomplete: str) -> list[str]:
    """Catalogue names, with and without the owner. A shell never sees an error from here."""
    try:
        from tightfit.models.resolve import list_models

        names = [row.model for row in list_models()]
    except Exception:
        return []
    short = [name.rsplit("/", 1)[-1] for name in names]
    return _starting_with(incomplete, [*short, *names])


def complete_gpu(incomplete: str) -> list[str]:
    """GPU names as one word."""
    return _starting_with(incomplete, _gpu_words())


def complete_hardware(incomplete: str) -> list[str]:
    """`here`, `slurm`, `k8s`, GPU names; after `4x` or `2n x 4x` the names behind the count."""
    counted = _COUNT_BEFORE_NAME.match(incomplete)
    if counted is not None:
        head, rest = counted.groups()
        return [head + name for name in _starting_with(rest, _gpu_words())]
    return _starting_with(incomplete, ["here", "slurm", "slurm:", "k8s", *_gpu_words()])


def complete_job(incomplete: str) -> list[str]:
    """A model, or a recipe file in this folder."""
    recipes = [str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern)]
    return [*_starting_with(incomplete, sorted(recipes)), *complete_model(incomplete)]


def _gpu_words() -> list[str]:
    try:
        from tightfit.hardware.catalogue import gpu_names

        return [name.replace(" ", "-") for name in gpu_names()]
    except Exception:
        return []


def _starting_with(incomplete: str, names: list[str]) -> list[str]:
    fold = incomplete.lower()
    return [name for name in dict.fromkeys(names) if name.lower().startswith(fold)]
