"""Rows of an encoder-decoder: they start together, and leave one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class PairRows:
    """Encoder outputs and both caches of a batch.

    Families count decoder positions in different ways, some from the cache's length alone. All
    of them are right when every row's answer has the same length, so nobody joins half-way.
    """

    is_gang = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = model.get_input_embeddings().weight.device
        self._cache: Any = None
        self._encoded: Any = None
        self._mask: Any = None

    @property
    def num_rows(self) -> int:
        return 0 if self._mask is None else int(self._mask.shape[0])

    def join(self, prompts: Sequence[Sequence[int]], most_new: int) -> torch.Tensor:  # noqa: ARG002
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
        return logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._forward(tokens, self._encoded, self._mask, self._cache)

    def drop(self, row: int) -> None:
        import torch

        last = self.num_rows - 1
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
