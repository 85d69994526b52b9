"""Sampling: every option of choosing tokens, declared once.

The fields' metadata gives bounds, an example and the help text. Command-line options, the chat's
`/set`, the compare page's controls and the settings kept beside answers are derived from it. A new
option needs its field here and its use in each engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

MAX_SEED = 2**32 - 2
"""llama.cpp's seeds have 32 bits, and the largest means a random seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOption:
    """One numeric option: its type, inclusive bounds, an example and its help text."""

    name: str
    kind: type[int] | type[float]
    least: float
    most: float
    example: float
    help: str

    @property
    def flag(self) -> str:
        """The command-line option."""
        return "--" + self.name.replace("_", "-")


def _number(default: float | None, *, least: float, most: float, example: float, help: str) -> Any:
    facts = {"least": least, "most": most, "example": example, "help": help}
    return field(default=default, metadata=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen, and when to end."""

    max_new_tokens: int = _number(
        512, least=1, most=1_048_576, example=256, help="Longest answer. [default: 512]"
    )
    temperature: float = _number(
        0.0,
        least=0,
        most=100,
        example=0.7,
        help="0: always the likeliest token; 1: as the model says.",
    )
    """0: greedy, whatever the other settings are."""
    top_p: float = _number(
        1.0,
        least=1e-6,
        most=1,
        example=0.9,
        help="Draw from the likeliest tokens that make up this share. [default: 1]",
    )
    top_k: int = _number(
        0,
        least=0,
        most=1_048_576,
        example=40,
        help="Draw from the K likeliest tokens; 0: from all. [default: 0]",
    )
    min_p: float = _number(
        0.0,
        least=0,
        most=1,
        example=0.05,
        help="Leave out tokens less likely than this share of the likeliest. [default: 0]",
    )
    repetition_penalty: float = _number(
        1.0,
        least=0.01,
        most=10,
        example=1.1,
        help="Above 1: tokens that were there already become less likely. [default: 1]",
    )
    presence_penalty: float = _number(
        0.0,
        least=-2,
        most=2,
        example=0.5,
        help="Above 0: tokens that the answer holds already become less likely. [default: 0]",
    )
    frequency_penalty: float = _number(
        0.0,
        least=-2,
        most=2,
        example=0.5,
        help="The same, for each time that the answer holds a token. [default: 0]",
    )
    seed: int | None = _number(
        None,
        least=0,
        most=MAX_SEED,
        example=42,
        help="The same seed gives the same answer. [default: another answer every time]",
    )
    """None: another answer every time. The same seed and engine give the same answer."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer and are not part of it, beside the model's own stop tokens."""
    ignores_stop_tokens: bool = False
    """Generate up to `max_new_tokens`, for measuring."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits."""
    top_logprobs: int | None = None
    """Report each token's log-probability, beside those of this many likeliest; None: none.

    They are the model's own, before temperature, penalties and biases.
    """
    grammar: str | None = None
    """What the whole answer must fit: `Grammar.to_json()` of `data/grammar.py`."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the next token depends on how often the answer holds it."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


def _list_options() -> Mapping[str, SamplingOption]:
    kinds: dict[str, type[int] | type[float]] = {"float": float, "int": int, "int | None": int}
    found = {
        one.name: SamplingOption(name=one.name, kind=kinds[str(one.type)], **one.metadata)
        for one in fields(Sampling)
        if one.metadata
    }
    return MappingProxyType(found)


SAMPLING_OPTIONS: Mapping[str, SamplingOption] = _list_options()
"""The numeric options by name, in the order of the fields."""


def describe_sampling(sampling: Sampling) -> dict[str, Any]:
    """Every option that an answer depends on, by its command-line name without the dashes."""
    named = {name.replace("_", "-"): getattr(sampling, name) for name in SAMPLING_OPTIONS}
    return named | {"stop": list(sampling.stop)}
