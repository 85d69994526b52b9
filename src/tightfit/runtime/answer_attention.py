"""Which attention answers: torch's own, unless the family needs what that has not.

`tightfit_folded`: SDPA for one new token a row, with the query heads that share a key head laid
side by side as if they were several tokens. Under a mask SDPA would repeat those keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.runtime.attention import fit_attention

if TYPE_CHECKING:
    import torch

FOLDED = "tightfit_folded"


def choose_answer_attention(folder: Path) -> str:
    """`sdpa`, or `eager` for a family without it or with capped scores, which it would not cap.

    The attention of packed training keeps no key-value cache, so it never answers.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as fault:
        lines = str(fault).strip().splitlines() or [type(fault).__name__]
        raise InvalidInputError(
            f"transformers cannot read {folder / 'config.json'}: {lines[0].rstrip('.')}.",
            remedy="name a model of a family that transformers knows: tightfit models",
        ) from fault
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return "eager"
    try:
        return fit_attention(config, "sdpa")
    except UsageError:
        return "eager"


def register_folded() -> None:
    """Make the name known to transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(FOLDED, folded_attention)
    AttentionMaskInterface.register(FOLDED, sdpa_mask)


def folded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' own `sdpa`, which it is for more than one token a row."""
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, num_new, width = query.shape
    num_shared = heads // key.shape[1]
    if num_new != 1 or num_shared == 1 or attention_mask is None:
        attend: Any = sdpa_attention_forward
        found: tuple[torch.Tensor, None] = attend(
            module, query, key, value, attention_mask, **options
        )
        return found
    output = scaled_dot_product_attention(
        query.view(rows, key.shape[1], num_shared, width),
        key,
        value,
        attn_mask=attention_mask.expand(-1, -1, num_shared, -1),
        scale=options.get("scaling"),
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None
