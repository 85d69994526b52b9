"""Rows of a batch on the device: prefill new rows, step all rows, drop rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tightfit.engines.transformers.prefixes import (
    SPLIT_TOKENS,
    KeptPrefixes,
    Match,
    Prefix,
    as_tokens,
    count_shared,
    reuses_prefixes,
)
from tightfit.runtime.libraries import is_out_of_memory

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


# Sizes that the engine obeys and that predictions use.

PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Of one prefill; other rows wait for it."""
PREFILL_COLUMNS = 2048
"""Of one pass of it; longer prompts take several, which bounds the memory."""
COLUMN_STEP = 256
"""Slots have multiples of these columns; each width has a CUDA graph of its own."""
ROW_SPARE_FRACTION = 0.25
"""Rows without slots grow their buffers by this share."""
CPU_SLOTS = 8
MAX_GPU_SLOTS = 64
KV_MEMORY_FRACTION = 0.8
"""Of the free memory that keys and values may take; scores and activations need the rest."""


def count_gpu_slots(free_bytes: int, slot_bytes: int) -> int:
    """Slots whose keys and values fit into a GPU's free memory; at least one."""
    room = int(max(0, free_bytes) * KV_MEMORY_FRACTION // max(1, slot_bytes))
    return max(1, min(MAX_GPU_SLOTS, room))


def round_columns(count: int) -> int:
    """Columns of a slot that holds `count` tokens."""
    return -(-count // COLUMN_STEP) * COLUMN_STEP


class Joined(NamedTuple):
    """Prompts that became rows."""

    logits: torch.Tensor
    """Of their first tokens, fp32."""
    num_cached: tuple[int, ...]
    """Tokens of each whose keys and values were there."""


# Rows of an encoder-decoder: they start together and end one by one.


class EncoderDecoderRows:
    """Encoder outputs and both caches of a batch.

    Families count decoder positions in different ways, some from the cache's length alone. All
    of them are right when every row's answer has the same length, so no row joins later.
    """

    starts_together = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = model.get_input_embeddings().weight.device
        self._cache: Any = None
        self._encoded: Any = None
        self._mask: Any = None

    def warm_up(self) -> None:
        """Nothing is prepared."""

    def forget_prefixes(self) -> None:
        """Nothing is kept."""

    def join(self, prompts: Sequence[Sequence[int]], most_new: int) -> Joined:  # noqa: ARG002
        import torch
        from transformers import DynamicCache, EncoderDecoderCache

        longest = max(map(len, prompts))
        tokens = [list(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
        mask = [[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
        held = torch.tensor(mask, device=self._device)
        encoder = self._model.get_encoder()
        encoded = encoder(
            input_ids=torch.tensor(tokens, device=self._device), attention_mask=held
        ).last_hidden_state
        make: Any = EncoderDecoderCache
        cache = make(DynamicCache(), DynamicCache())
        first = torch.full((len(prompts),), self._start_token(), device=self._device)
        logits = self._forward(first, encoded, held, cache)
        self._encoded, self._mask, self._cache = encoded, held, cache
        return Joined(logits, (0,) * len(prompts))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._forward(tokens, self._encoded, self._mask, self._cache)

    def drop(self, row: int, tokens: Sequence[int] = ()) -> None:  # noqa: ARG002
        import torch

        last = int(self._mask.shape[0]) - 1
        if last == 0:
            self._cache = self._encoded = self._mask = None
            return
        kept = list(range(last))
        if row < last:
            kept[row] = last
        places = torch.tensor(kept, device=self._device)
        self._cache.batch_select_indices(places)
        self._encoded, self._mask = self._encoded[places], self._mask[places]

    def _start_token(self) -> int:
        for config in (self._model.generation_config, self._model.config):
            for name in ("decoder_start_token_id", "bos_token_id"):
                found = getattr(config, name, None)
                if found is not None:
                    return int(found)
        return 0

    def _forward(
        self, tokens: torch.Tensor, encoded: torch.Tensor, mask: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        from transformers import modeling_outputs

        make: Any = modeling_outputs.BaseModelOutput
        output = self._model(
            encoder_outputs=make(last_hidden_state=encoded),
            attention_mask=mask,
            decoder_input_ids=tokens[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


class BatchRows(Protocol):
    """Rows of a batch on the device."""

    starts_together: bool
    """Rows start together: none may join, or rejoin, while others run."""

    def warm_up(self) -> None:
        """Prepare what the first request would wait for."""
        ...

    def join(self, prompts: Sequence[Sequence[int]], most_new: int) -> Joined:
        """Prefill prompts as new rows after the others. A failure leaves the others unchanged."""
        ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every row; return the next logits in fp32."""
        ...

    def drop(self, row: int, tokens: Sequence[int] = ()) -> None:
        """Drop a row; the last one takes its place. `tokens`: what it held, to be kept for later
        prompts."""
        ...

    def forget_prefixes(self) -> None:
        """Free what is kept for later prompts."""
        ...


def has_plain_cache(config: Any) -> bool:
    """Whether every layer keeps keys and values and nothing else, so that rows can be joined."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in plain for layer in DynamicCache(config=config).layers)


class DecoderRows:
    """Rows of a decoder-only family, in one cache."""

    starts_together = False

    def __init__(self, model: Any, *, most_rows: int, prefix_bytes: int = 0) -> None:
        self._model = model
        self._most_rows = most_rows
        self._device = model.get_input_embeddings().weight.device
        known = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in known
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._lengths: list[int] = []
        self._length_tensor: Any = None
        """The same on the device; None after rows were added or dropped."""
        self._cache: Any = None
        self._prompts: list[NDArray[np.int64]] = []
        """Of the rows, whose prefixes others may share."""
        self._kept: KeptPrefixes | None = None
        if prefix_bytes and reuses_prefixes(model.config):
            self._kept = KeptPrefixes(most_bytes=prefix_bytes)
        self._split_tokens = SPLIT_TOKENS["cuda" if self._device.type == "cuda" else "cpu"]

    def warm_up(self) -> None:
        """Nothing is prepared."""

    def join(self, prompts: Sequence[Sequence[int]], most_new: int) -> Joined:
        import torch

        from tightfit.engines.transformers.cache import RowCache

        given = [as_tokens(prompt) for prompt in prompts]
        before, at = len(self._lengths), 0
        logits: list[torch.Tensor] = []
        num_cached: list[int] = []
        try:
            while at < len(given):
                matches = self._match(given[at:])
                group = given[at : at + len(matches)]
                fresh = RowCache(most_rows=len(group))
                found, reused = self._prefill(group, matches, fresh)
                self._add(fresh, [len(prompt) for prompt in group], most_new)
                self._prompts.extend(group)
                logits.append(found)
                num_cached += reused
                at += len(group)
        except Exception:
            while len(self._lengths) > before:
                self.drop(len(self._lengths) - 1)
            raise
        return Joined(torch.cat(logits) if len(logits) > 1 else logits[0], tuple(num_cached))

    def _add(self, fresh: Any, lengths: list[int], most_new: int) -> None:
        """Make rows of a prefill."""
        if self._cache is None:
            self._cache = fresh
            fresh.span.most_rows = self._most_rows
        else:
            self._cache.join(fresh)
            fresh.clear()
        self._lengths.extend(lengths)
        self._length_tensor = None
        self._cache.expect(max(most_new, self._cache.span.last - self._cache.span.end))

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

    def drop(self, row: int, tokens: Sequence[int] = ()) -> None:
        self._keep(row, tokens)
        self._cache.drop(row)
        self._forget_row(row)
        self._length_tensor = None
        if self._lengths:
            self._cache.trim(max(self._lengths))
        else:
            self._cache.clear()
            self._cache = None

    def forget_prefixes(self) -> None:
        if self._kept is not None:
            self._kept.clear()

    def _forget_row(self, row: int) -> int:
        """The last row takes its place. Returns the last row's length."""
        last, prompt = self._lengths.pop(), self._prompts.pop()
        if row < len(self._lengths):
            self._lengths[row], self._prompts[row] = last, prompt
        return last

    def _keep(self, row: int, tokens: Sequence[int]) -> None:
        """Keep a row for later prompts. Its last token has no keys unless it ran a step more."""
        if self._kept is None or not tokens:
            return
        first = self._read_row(row, 1)
        size = sum(one.nbytes for part in first if part is not None for one in part)
        kept = tokens[: min(len(tokens), self._lengths[row])]
        try:
            self._kept.keep(kept, partial(self._read_row, row), bytes_per_token=size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._kept.clear()

    def _read_row(self, row: int, count: int) -> Prefix:
        """Keys and values of a row's first tokens."""
        found: Prefix = self._cache.read_row(row, self._lengths[row], count)
        return found

    def _match(self, prompts: Sequence[NDArray[np.int64]]) -> list[Match]:
        """What is there already of the first prompts, as many as are best prefilled together.

        A prompt that shares more with one of these than with what is there waits for it, and those
        with a long prefix go together: all take as many columns as the longest rest.
        """
        if self._kept is None:
            return [Match(num_tokens=0)] * len(prompts)
        running = [
            (prompt, partial(self._read_row, row)) for row, prompt in enumerate(self._prompts)
        ]
        matches: list[Match] = []
        for number, prompt in enumerate(prompts):
            match = self._kept.find(prompt, running)
            if matches:
                shared = max(count_shared(prompt, other) for other in prompts[:number])
                is_long = match.num_tokens >= self._split_tokens
                if shared - match.num_tokens >= self._split_tokens or is_long != (
                    matches[0].num_tokens >= self._split_tokens
                ):
                    break
            matches.append(match)
        return matches

    def _prefill(
        self, prompts: Sequence[NDArray[np.int64]], matches: Sequence[Match], cache: Any
    ) -> tuple[torch.Tensor, list[int]]:
        """Logits of the first new tokens, and how many tokens of each prompt were reused."""
        import torch

        longest = max(map(len, prompts))
        pairs = list(zip(prompts, matches, strict=True))
        rest = max(len(prompt) - match.num_tokens for prompt, match in pairs)
        reused = [max(0, len(prompt) - rest) for prompt in prompts]
        padded = [[0] * (longest - len(prompt)) + prompt.tolist() for prompt in prompts]
        tokens = torch.tensor(padded, device=self._device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        columns = torch.arange(longest, device=self._device)
        positions = columns - (longest - lengths)[:, None]
        mask = (positions >= 0).long()
        positions = positions.clamp(min=0)
        cache.begin(len(prompts), longest)
        if any(reused):
            cache.seed(
                [
                    match.read(count) if match.read is not None and count else None
                    for match, count in zip(matches, reused, strict=True)
                ],
                longest - rest,
            )
        for start in range(cache.span.end, longest, PREFILL_COLUMNS):
            end = min(start + PREFILL_COLUMNS, longest)
            part = slice(start, end)
            logits = self._forward(tokens[:, part], mask[:, :end], positions[:, part], cache)
            cache.advance(end - start)
        return logits, reused

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


class SingleRow:
    """One row of a family that keeps more than keys and values: a state, a convolution."""

    starts_together = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = model.get_input_embeddings().weight.device
        self._cache: Any = None

    def warm_up(self) -> None:
        """Nothing is prepared."""

    def forget_prefixes(self) -> None:
        """Nothing is kept."""

    def join(self, prompts: Sequence[Sequence[int]], most_new: int) -> Joined:  # noqa: ARG002
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        (prompt,) = prompts
        logits = self._forward(torch.tensor([list(prompt)], device=self._device), cache)
        self._cache = cache
        return Joined(logits, (0,))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._forward(tokens[:, None], self._cache)

    def drop(self, row: int, tokens: Sequence[int] = ()) -> None:  # noqa: ARG002
        self._cache = None

    def _forward(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits
