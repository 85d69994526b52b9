"""The device side of a batch: prefill new rows, step all rows, let rows go."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tightfit.engines.transformers.sizes import PREFILL_COLUMNS

if TYPE_CHECKING:
    import torch


class Rows(Protocol):
    """Rows of a batch on the device."""

    is_gang: bool
    """Rows start together: none may join while others are under way, nor come back."""

    @property
    def num_rows(self) -> int: ...

    def join(self, prompts: Sequence[Sequence[int]], most_new: int) -> torch.Tensor:
        """Read prompts as new rows, behind the others: the scores of their first tokens."""
        ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every row: the scores of the next ones, fp32."""
        ...

    def drop(self, row: int) -> None:
        """Let a row go; the last one takes its place."""
        ...


def open_rows(model: Any, *, most_rows: int) -> Rows:
    """What suits the family: rows that come and go, or rows that start together."""
    if model.config.is_encoder_decoder:
        from tightfit.engines.transformers.pairs import PairRows

        return PairRows(model)
    if not has_plain_cache(model.config):
        return SoloRow(model)
    from tightfit.engines.transformers.slots import SlotRows, can_have_slots

    if model.device.type == "cuda" and can_have_slots(model):
        return SlotRows(model, most_rows=most_rows)
    return DecoderRows(model, most_rows=most_rows)


def has_plain_cache(config: Any) -> bool:
    """Whether every layer keeps keys and values and nothing else, so that rows can be joined."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in plain for layer in DynamicCache(config=config).layers)


class DecoderRows:
    """Rows of a decoder-only family, in one cache."""

    is_gang = False

    def __init__(self, model: Any, *, most_rows: int) -> None:
        self._model = model
        self._most_rows = most_rows
        self._device = model.get_input_embeddings().weight.device
        known = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in known
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._lengths: list[int] = []
        self._length_tensor: Any = None
        """The same numbers on the device; None after rows have come or gone."""
        self._cache: Any = None

    @property
    def num_rows(self) -> int:
        return len(self._lengths)

    def join(self, prompts: Sequence[Sequence[int]], most_new: int) -> torch.Tensor:
        from tightfit.engines.transformers.cache import RowCache

        fresh = RowCache(most_rows=len(prompts))
        logits = self._prefill(prompts, fresh)
        if self._cache is None:
            self._cache = fresh
            fresh.span.most_rows = self._most_rows
        else:
            self._cache.join(fresh)
            fresh.clear()
        self._lengths.extend(map(len, prompts))
        self._length_tensor = None
        self._cache.expect(max(most_new, self._cache.span.last - self._cache.span.end))
        return logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        import torch

        if self._length_tensor is None:
            self._length_tensor = torch.tensor(self._lengths, device=self._device)
        lengths, width = self._length_tensor, self._cache.span.width + 1
        columns = torch.arange(width, device=self._device)
        mask = (columns >= (width - 1 - lengths)[:, None]).long()
        logits = self._forward(tokens[:, None], mask, lengths[:, None], self._cache)
        self._cache.advance(1)
        self._length_tensor = lengths + 1
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def drop(self, row: int) -> None:
        self._cache.drop(row)
        last = self._lengths.pop()
        if row < len(self._lengths):
            self._lengths[row] = last
        self._length_tensor = None
        if self._lengths:
            self._cache.trim(max(self._lengths))
        else:
            self._cache.clear()
            self._cache = None

    def _prefill(self, prompts: Sequence[Sequence[int]], cache: Any) -> torch.Tensor:
        import torch

        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        tokens = torch.tensor(padded, device=self._device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        columns = torch.arange(longest, device=self._device)
        positions = columns - (longest - lengths)[:, None]
        mask = (positions >= 0).long()
        positions = positions.clamp(min=0)
        cache.begin(len(prompts), longest)
        for start in range(0, longest, PREFILL_COLUMNS):
            end = min(start + PREFILL_COLUMNS, longest)
            part = slice(start, end)
            logits = self._forward(tokens[:, part], mask[:, :end], positions[:, part], cache)
            cache.advance(end - start)
        return logits

    def _forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        extra = {"position_ids": positions} if self._takes_positions else {}
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **extra,
            **self._extra,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


class SoloRow:
    """One row of a family that keeps more than keys and values: a state, a convolution."""

    is_gang = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = model.get_input_embeddings().weight.device
        self._cache: Any = None

    @property
    def num_rows(self) -> int:
        return 0 if self._cache is None else 1

    def join(self, prompts: Sequence[Sequence[int]], most_new: int) -> torch.Tensor:  # noqa: ARG002
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        (prompt,) = prompts
        logits = self._forward(torch.tensor([list(prompt)], device=self._device), cache)
        self._cache = cache
        return logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._forward(tokens[:, None], self._cache)

    def drop(self, row: int) -> None:  # noqa: ARG002
        self._cache = None

    def _forward(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits
