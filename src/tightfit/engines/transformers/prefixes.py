"""Keys and values of earlier requests, for prompts that begin as those did.

A token's keys and values depend on the tokens before it alone, so a prompt that begins as an
earlier one (a system prompt, a chat's history) need not compute them again. They are of one set of
weights: rows computed with another adapter must never be looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

LayerParts = tuple["torch.Tensor", "torch.Tensor"]
"""Keys and values of one row, (heads, tokens, width)."""
Prefix = list[LayerParts | None]
"""By layer; None where it keeps nothing of its own."""

MEMORY_FRACTION = 0.05
"""Of the free memory when the engine starts."""
SPLIT_TOKENS = {"cpu": 16, "cuda": 256}
"""Shared tokens from which on a prompt waits for another one's pass over the model: on a GPU a pass
over fewer takes as long as reading the weights."""
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that turn a key by the length of the whole text."""


def reuses_prefixes(config: Any) -> bool:
    """Whether a prefix's keys are the same whatever follows it. For caches of keys and values."""
    stated = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_layer = [one for one in stated.values() if isinstance(one, dict)]
    kinds = {one.get("rope_type") for one in (stated, *by_layer)}
    return not kinds & _LENGTH_DEPENDENT_ROPE


def as_tokens(tokens: Sequence[int]) -> NDArray[np.int64]:
    import numpy as np

    return np.asarray(tokens, dtype=np.int64)


def count_shared(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """How many first tokens are the same."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where a prompt's first tokens were found."""

    num_tokens: int
    read: Callable[[int], Prefix] | None = None
    """Keys and values of so many first tokens; None where there is no match."""


class KeptPrefixes:
    """Copies of rows that have ended, the least recently used of which make room for others."""

    def __init__(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._kept: list[tuple[NDArray[np.int64], Prefix, int]] = []
        """Tokens, keys and values, bytes; the least recently used first."""

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(
        self,
        prompt: NDArray[np.int64],
        running: Iterable[tuple[NDArray[np.int64], Callable[[int], Prefix]]] = (),
    ) -> Match:
        """The longest match with a running row or a kept one; at least one token is left over."""
        best = Match(num_tokens=0)
        for tokens, read in running:
            shared = min(count_shared(prompt, tokens), len(prompt) - 1)
            if shared > best.num_tokens:
                best = Match(num_tokens=shared, read=read)
        found = None
        for place, (tokens, prefix, _) in enumerate(self._kept):
            shared = min(count_shared(prompt, tokens), len(prompt) - 1)
            if shared > best.num_tokens:
                found, best = place, Match(num_tokens=shared, read=_make_reader(prefix))
        if found is not None:
            self._kept.append(self._kept.pop(found))
        return best

    def keep(
        self, tokens: Sequence[int], read: Callable[[int], Prefix], *, bytes_per_token: int
    ) -> None:
        """Copy a row. What it holds of others takes their place."""
        given = as_tokens(tokens)
        if len(given) == 0 or bytes_per_token * len(given) > self._most_bytes:
            return
        for place, (known, _, _) in enumerate(self._kept):
            if count_shared(given, known) == len(given):
                self._kept.append(self._kept.pop(place))
                return
        for place in reversed(range(len(self._kept))):
            if count_shared(given, self._kept[place][0]) == len(self._kept[place][0]):
                self._drop(place)
        while self._num_bytes + bytes_per_token * len(given) > self._most_bytes:
            self._drop(0)
        copied: Prefix = [
            None if part is None else (part[0].clone(), part[1].clone())
            for part in read(len(given))
        ]
        size = sum(one.nbytes for part in copied if part is not None for one in part)
        self._kept.append((given, copied, size))
        self._num_bytes += size

    def clear(self) -> None:
        self._kept.clear()
        self._num_bytes = 0

    def _drop(self, place: int) -> None:
        self._num_bytes -= self._kept.pop(place)[2]


def _make_reader(prefix: Prefix) -> Callable[[int], Prefix]:
    return lambda count: [
        None if part is None else (part[0][:, :count], part[1][:, :count]) for part in prefix
    ]
