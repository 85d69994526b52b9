"""Scores of every next token of a text, read piece by piece so that they never lie on the device
all at once."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_SCORES = 1 << 26
"""Of one piece: 256 MiB in fp32."""


def score_tokens(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    """(tokens, vocabulary) in fp32. Called with the model to itself."""
    import numpy as np
    import torch

    from tightfit.engines.transformers.rows import has_plain_cache

    device = model.get_input_embeddings().weight.device
    # The head itself may be packed, and then has no weight to ask.
    num_vocabulary = int(model.config.get_text_config().vocab_size)
    scores = np.empty((len(tokens), num_vocabulary), dtype=np.float32)
    is_plain = has_plain_cache(model.config)
    size = max(16, _MOST_SCORES // num_vocabulary) if is_plain else len(tokens)
    cache = _open_cache(model)
    names = inspect.signature(model.forward).parameters
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        extra = {}
        if "position_ids" in names:
            extra["position_ids"] = torch.arange(start, end, device=device)[None]
        with torch.inference_mode():
            output = model(
                input_ids=torch.tensor([tokens[start:end]], device=device),
                attention_mask=torch.ones((1, end), dtype=torch.long, device=device),
                past_key_values=cache,
                use_cache=True,
                **extra,
            )
        if is_plain:
            cache.advance(end - start)
        scores[start:end] = output.logits[0].float().cpu().numpy()
        del output
    return scores


def _open_cache(model: Any) -> Any:
    from transformers import DynamicCache

    from tightfit.engines.transformers.cache import RowCache
    from tightfit.engines.transformers.rows import has_plain_cache

    if not has_plain_cache(model.config):
        return DynamicCache(config=model.config)
    cache = RowCache(most_rows=1)
    cache.begin(1, 0)
    return cache
