"""torch's flex attention: softcaps, sinks, windows, chunks, position biases and packed documents in
one compiled kernel that skips what the mask leaves out.

Source: torch.nn.attention.flex_attention. The function has the arguments of transformers' own
attention functions, the mask those of its mask functions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tightfit.core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

_RECOMPILES = 64
"""Variants of one compiled function: kinds of masks, and shapes. Beyond torch's own limit of 8 it
falls back to a function that holds all scores."""


def make_block_mask(*args: Any, **kwargs: Any) -> Any:
    """Which blocks of scores are needed, as transformers' masks describe it."""
    _raise_limits()
    return _make_mask(*args, **kwargs)


def _make_mask(*args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import flex_attention_mask

    make: Any = flex_attention_mask
    return make(*args, **kwargs)


def flex_attention(  # noqa: PLR0913, PLR0917  (as transformers calls it)
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slopes: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over `[rows, heads, tokens, head_dim]` tensors under a block mask.

    `s_aux`: a logit per head that joins the softmax. `slopes`: of a bias per head by distance.
    """
    if dropout:
        raise UsageError(
            "flex attention does not drop attention weights.", remedy="--set attention=eager"
        )
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    is_compiling = torch.compiler.is_compiling()
    attend, scale = (_attend, _scale_by_sinks) if is_compiling else _compiled()
    output, sums = attend(query, key, value, attention_mask, scaling, softcap, slopes)
    if s_aux is not None:
        # Apart from the kernel: compiled as one, torch 2.11 sums a wrong gradient of the sinks.
        output = scale(output, sums, s_aux)
    return output.transpose(1, 2).contiguous(), None


def _attend(  # noqa: PLR0913, PLR0917  (compiled as one)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Any,
    scale: float | None,
    softcap: float | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Any]:
    """The output, and the logarithm of each row's sum of exponentials."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def change_score(score: Any, _row: Any, head: Any, place: Any, seen: Any) -> Any:
        if softcap is not None:
            # tanh through the hardware's exponential, which libdevice's own does not use: with that
            # one, Gemma 2's attention was several times as slow as plain causal SDPA on an H200.
            score = softcap * (2.0 * torch.sigmoid((2.0 / softcap) * score) - 1.0)
        if slopes is not None:
            score = score + slopes[head] * (seen - place)
        return score

    is_changed = softcap is not None or slopes is not None
    output, extra = flex_attention(
        query,
        key,
        value,
        score_mod=change_score if is_changed else None,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return output, extra.lse


def _scale_by_sinks(output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """What is left of the output when a logit per head joins the softmax."""
    share = torch.sigmoid(sums - sinks.float()[:, None])
    return (output * share[..., None]).to(output.dtype)


@lru_cache(maxsize=1)
def _compiled() -> tuple[Any, Any]:
    _raise_limits()
    return torch.compile(_attend), torch.compile(_scale_by_sinks)


def _raise_limits() -> None:
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, _RECOMPILES)
