"""From Sampling to the fields of llama.cpp's completion requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tightfit.engines.protocol import Sampling

ANY_SEED = 2**32 - 1
"""llama.cpp draws a seed of its own for this one."""


def make_body(prompt: Sequence[int], sampling: Sampling, *, num_new_tokens: int) -> dict[str, Any]:
    """One request. Only the samplers named here run, in the order transformers has them.

    llama.cpp's own defaults would cut at top-k 40, top-p 0.95 and min-p 0.05.
    `verbose` puts token ids into the stream; `return_progress` says what was cached.
    """
    return {
        "prompt": list(prompt),
        "max_tokens": num_new_tokens,
        "samplers": choose_samplers(sampling),
        "temperature": max(0.0, sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": len(prompt) + num_new_tokens,
        "seed": ANY_SEED if sampling.seed is None else sampling.seed % ANY_SEED,
        "ignore_eos": sampling.ignores_stop_tokens,
        "cache_prompt": True,
        "stream": True,
        "verbose": True,
        "return_tokens": True,
        "return_progress": True,
    }


def choose_samplers(sampling: Sampling) -> list[str]:
    """Those that change anything. A temperature of 0 leaves one token: nothing may come after."""
    chosen = [] if sampling.repetition_penalty == 1.0 else ["penalties"]
    chosen.append("temperature")
    if sampling.temperature <= 0:
        return chosen
    if sampling.top_k > 0:
        chosen.append("top_k")
    if sampling.top_p < 1:
        chosen.append("top_p")
    if sampling.min_p > 0:
        chosen.append("min_p")
    return chosen
