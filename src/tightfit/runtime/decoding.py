"""Decoding one token per row: attention over slots of keys and values, and faster products.

Slots are buffers of fixed size, (slots, heads, columns, width), in which row r has slot r. Each
row writes its next key at its own length and attends to the columns up to there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import UserError
from tightfit.models.families.registry import find_family

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


SLOTS = "tightfit_slots"
"""The name of `slot_attention` in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotScores:
    """How scores become weights."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    """One logit per head that takes its share of the weights and adds nothing."""


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per row. `attention_mask`: the rows' lengths, as `as_mask` has
    them."""
    scores = SlotScores(
        scale=options.get("scaling") or query.shape[-1] ** -0.5,
        softcap=options.get("softcap"),
        window=options.get("sliding_window"),
        sinks=options.get("s_aux", getattr(module, "sinks", None)),
    )
    output = attend_slots(query[:, :, 0], key, value, attention_mask[:, 0, 0, 0], scores)
    return output[:, None], None


def as_mask(lengths: Tensor) -> Tensor:
    """Lengths in a mask's four dimensions: transformers then makes no mask of its own."""
    return lengths[:, None, None, None]


@cache
def has_decode_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run there: Ampere and later."""
    import torch

    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def attend_slots(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scores: SlotScores
) -> Tensor:
    """(rows, heads, value width) of queries (rows, heads, width); the row's new token is in column
    `lengths[row]` already."""
    if has_decode_kernels(query.device):
        from tightfit.runtime.kernels import decode_triton

        return decode_triton.attend_slots(query, keys, values, lengths, scores)
    import torch

    num_rows, num_heads, width = query.shape
    num_key_heads, num_columns = keys.shape[1:3]
    grouped = query.view(num_rows, num_key_heads, num_heads // num_key_heads, width)
    distance = lengths[:, None] - torch.arange(num_columns, device=lengths.device)
    seen = distance >= 0
    if scores.window:
        seen &= distance < scores.window
    if scores.softcap is None and scores.sinks is None:
        attend = torch.nn.functional.scaled_dot_product_attention
        # The query heads of a key head as its queries: no key is repeated.
        made = attend(grouped, keys, values, attn_mask=seen[:, None, None], scale=scores.scale)
        return made.reshape(num_rows, num_heads, -1)
    logits = (grouped @ keys.transpose(2, 3)).float() * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, num_key_heads, -1, 1).expand(num_rows, -1, -1, -1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(dim=-1)[..., :num_columns].to(values.dtype)
    return (weights @ values).reshape(num_rows, num_heads, -1)


def write_slots(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
    """Write each row's new key and value, (rows, heads, width), into its slot at its length."""
    if has_decode_kernels(key.device):
        from tightfit.runtime.kernels import decode_triton

        decode_triton.write_slots(key, value, keys, values, lengths)
        return
    import torch

    rows = torch.arange(len(key), device=key.device)
    keys[rows, :, lengths] = key
    values[rows, :, lengths] = value


# Faster modules

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that read the same rows."""
_WIDE = 4
"""Times the input's width, from which on joining gains less for several rows than copying the parts
costs: tried with 22,016 x 4096 and 8 rows on an H200."""
_ROTARY = "apply_rotary_pos_emb"
"""The function's name in modules of transformers."""


def fuse_for_decoding(model: Any) -> None:
    """Fused norms, rotary embedding and gated MLP, joined projections, and our own product where a
    step has one row.

    A step of few rows is bound by reading the weights and by the number of kernels. Only plain
    16-bit layers are joined: adapters, and 4- and 8-bit weights, stay as they are.
    """
    if not has_decode_kernels(model.device):
        return
    if find_family(model.config.get_text_config().model_type).has_liger:
        from tightfit.runtime.kernels.liger import apply_fused_kernels

        with suppress(UserError):  # liger-kernel is not installed, or does not know the family
            apply_fused_kernels(model)
            _use_own_rotary(model)
    for layers in _find_joined(model):
        join_projections(layers)
    for layer in model.modules():
        if _is_plain(layer) and "forward" not in vars(layer):
            layer.forward = partial(multiply, layer.weight, layer.bias)


def _use_own_rotary(model: nn.Module) -> None:
    """Our rotary embedding of single tokens, in the modules where Liger has put its own."""
    for owner in {type(module).__module__ for module in model.modules()}:
        found: Any = vars(sys.modules[owner]).get(_ROTARY)
        if getattr(found, "__module__", "").startswith("liger_kernel."):
            setattr(sys.modules[owner], _ROTARY, partial(_rotate, found))


def _rotate(
    liger: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *others: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    is_step = query.shape[2] == 1 and cos.shape[-1] == query.shape[-1] and not query.requires_grad
    if not is_step or not has_decode_kernels(query.device):
        return liger(query, key, cos, sin, *others, **options)
    from tightfit.runtime.kernels.decode_triton import rotate

    return rotate(query, key, cos, sin)


def _find_joined(model: nn.Module) -> Iterator[list[Any]]:
    for module in model.modules():
        parts = dict(module.named_children())
        for names in _JOINED:
            layers: list[Any] = [parts.get(name) for name in names]
            if (
                all(map(_is_plain, layers))
                and len({layer.weight.shape[1] for layer in layers}) == 1
            ):
                yield layers


def _is_plain(layer: Any) -> bool:
    import torch

    is_linear = type(layer) is torch.nn.Linear
    return is_linear and layer.weight.dtype in (torch.float16, torch.bfloat16)


def join_projections(layers: list[Any]) -> None:
    """Compute several layers' products of the same rows as one; their weights become its parts."""
    import torch

    from tightfit.runtime.kernels.fused_projections import FusedProjections

    sizes = [len(layer.weight) for layer in layers]
    weight = torch.cat([layer.weight.data for layer in layers])
    for layer, part in zip(layers, torch.split(weight, sizes), strict=True):
        layer.weight.data = part
    biases = [layer.bias for layer in layers]
    bias: Any = None
    if any(one is not None for one in biases):
        pairs = zip(biases, sizes, strict=True)
        bias = torch.cat([weight.new_zeros(n) if one is None else one.data for one, n in pairs])

    def multiply_all(x: Tensor, _: list[Any]) -> tuple[Tensor, ...]:
        if x.numel() > x.shape[-1] and len(weight) > weight.shape[1] * _WIDE:
            return tuple(multiply(layer.weight, layer.bias, x) for layer in layers)
        return torch.split(multiply(weight, bias, x), sizes, dim=-1)

    group = FusedProjections(layers, multiply_all)
    for layer in layers:
        layer.forward = partial(group.multiply, layer)


def multiply(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """`x W^T + bias`."""
    from torch.nn.functional import linear

    is_row = x.numel() == x.shape[-1] and x.dtype == weight.dtype and x.is_contiguous()
    if not is_row or not has_decode_kernels(x.device):
        return linear(x, weight, bias)
    from tightfit.runtime.kernels.decode_triton import multiply_row

    return multiply_row(x, weight, bias)
