"""A model known only by its size: `7e9-params`, `1B-params`. Shapes are assumed, and said to be."""

from __future__ import annotations

import re

from tightfit.core.errors import InvalidInputError
from tightfit.core.faults import printable
from tightfit.models.config import read_config
from tightfit.models.spec import ModelSpec

_NUMBER = r"([0-9]{1,40}(?:\.[0-9]{1,40})?(?:e\+?[0-9]{1,3})?)\s*([kmbt]?)"
_SIZE = re.compile(_NUMBER + r"[\s_-]*params?", re.IGNORECASE)
_BARE_SIZE = re.compile(_NUMBER, re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
ASPECT = 128
"""Hidden width per layer of the GPT-3 and Llama families. Source: arXiv:2005.14165 table 2.1."""
HEAD_DIM = 128
VOCABULARY = 32_000
MIN_PARAMS = 10**7
MAX_PARAMS = 10**13


def read_synthetic(name: str) -> ModelSpec | None:
    """A Llama-shaped model of the size that `name` states; None where it states none.

    The count is exact: what whole layers leave over is put outside them.
    """
    match = _SIZE.fullmatch(name.strip())
    if match is None:
        return None
    stated = float(match[1]) * _FACTORS[match[2].lower()]
    if not MIN_PARAMS <= stated <= MAX_PARAMS:
        raise InvalidInputError(
            f"`{printable(name)}`: a model has 10 million to 10 trillion parameters.",
            remedy="state a size between, like 350M-params, 7B-params or 1.2T-params",
        )
    num_params = round(stated)
    spec = _largest_below(num_params, printable(name.strip()))
    left_over = num_params - spec.num_params
    return spec.model_copy(update={"outer_params": spec.outer_params + left_over})


def suggest_size(name: str) -> str | None:
    """`7B-params` for `7B`: how to plan for a size alone; None for any other name."""
    match = _BARE_SIZE.fullmatch(name.strip())
    if (
        match is None
        or not MIN_PARAMS <= float(match[1]) * _FACTORS[match[2].lower()] <= MAX_PARAMS
    ):
        return None
    return f"{match[1]}{match[2].upper()}-params"


def _largest_below(num_params: int, name: str) -> ModelSpec:
    hidden = max(HEAD_DIM, round((num_params * ASPECT / 12) ** (1 / 3) / HEAD_DIM) * HEAD_DIM)
    while True:
        layers = max(1, (num_params - 2 * VOCABULARY * hidden) // (12 * hidden * hidden))
        spec = read_config(
            {
                "model_type": "llama",
                "hidden_size": hidden,
                "intermediate_size": 8 * hidden // 3,
                "num_hidden_layers": layers,
                "num_attention_heads": hidden // HEAD_DIM,
                "num_key_value_heads": hidden // HEAD_DIM,
                "vocab_size": VOCABULARY,
                "tie_word_embeddings": False,
            },
            name=name,
            source=f"assumed from a size of {num_params:,} parameters",
        )
        if spec.num_params <= num_params or hidden == HEAD_DIM:
            warning = (
                f"only the size is known: {layers} Llama-like layers of width {hidden} are assumed"
            )
            return spec.model_copy(update={"warnings": (*spec.warnings, warning)})
        hidden -= HEAD_DIM
