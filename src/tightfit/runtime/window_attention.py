"""Flash attention of rows that are not packed, without a mask: padding is on the right.

Layers that see the whole row go through SDPA, which takes the GPU's fastest causal kernel. Sliding
windows go through torch's FlashAttention-2, which keeps grouped keys grouped. On Hopper cuDNN's
causal kernel is faster, but has no windows in torch: long ones are cut into blocks of one window.
A query sees its own block causally, and of the block before it the part that its own block's start
leaves in the window, which is a causal square too when both blocks are reversed. Each part's
softmax is merged by the logarithm of its sum. On one H200, 2 rows of 8,192 tokens with a window of
4,096 and 32 heads take 7.1 ms forward and backward so, and 10.9 ms with FlashAttention-2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.core.errors import UsageError

LEAST_BLOCK = 1024
"""Shorter windows lose more to copies than the kernel gains: with 8 heads of 256 and a window of
1,024 blocks took 2.2 ms and FlashAttention-2 1.4 ms (one H200)."""
MOST_PADDING = 1.25
"""Times as many tokens as the row has, once it is padded to whole blocks."""
MAX_BLOCK_HEAD_DIM = 128

_aten = torch.ops.aten


def window_attention(  # noqa: PLR0913, PLR0917  (as transformers calls it)
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of `[rows, heads, tokens, head_dim]` tensors, as transformers calls it."""
    _check(query, key, attention_mask, dropout, options)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    num_tokens = query.shape[2]
    if sliding_window is None or sliding_window >= num_tokens:
        output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=_is_grouped(query, key)
        )
        return output.transpose(1, 2).contiguous(), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _fits_blocks(query, value, sliding_window) and _has_fast_causal_kernel(query.device):
        output = attend_in_blocks(query, key, value, window=sliding_window, scale=scale)
        return output.transpose(1, 2).contiguous(), None
    value_width = value.shape[-1]
    if value_width != query.shape[-1]:  # the kernel requires values as wide as keys
        value = functional.pad(value, [0, query.shape[-1] - value_width])
    parts = (x.transpose(1, 2) for x in (query, key, value))
    output = _aten._flash_attention_forward(
        *parts,
        *(None, None, num_tokens, num_tokens, 0.0, True, False),
        scale=scale,
        window_size_left=sliding_window - 1,
        window_size_right=0,
    )[0]
    return output[..., :value_width], None


def _check(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, options: dict[str, Any]
) -> None:
    """What would be computed silently wrong is refused."""
    limits = (
        (mask is not None, "a mask of its own"),
        (query.shape[2] != key.shape[2], "a key-value cache"),
        (options.get("is_causal") is False, "attention both ways"),
        (options.get("softcap") is not None, "capped logits"),
        (options.get("position_bias") is not None, "a position bias"),
        (options.get("s_aux") is not None, "attention sinks"),
        (dropout > 0, "attention dropout"),
    )
    found = next((what for is_limit, what in limits if is_limit), None)
    if found is not None:
        raise UsageError(f"Flash attention cannot do {found}.", remedy="--set attention=sdpa")


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]


def _fits_blocks(query: Tensor, value: Tensor, window: int) -> bool:
    num_tokens, head_dim = query.shape[2:]
    return (
        window >= LEAST_BLOCK
        and head_dim == value.shape[-1] <= MAX_BLOCK_HEAD_DIM
        and _count_blocks(num_tokens, window) * window <= MOST_PADDING * num_tokens
    )


def _has_fast_causal_kernel(device: torch.device) -> bool:
    """cuDNN's, of Hopper."""
    backends: Any = torch.backends.cuda  # not annotated
    if device.type != "cuda" or not backends.cudnn_sdp_enabled():
        return False
    return has_fast_causal_kernel(torch.cuda.get_device_capability(device))


def has_fast_causal_kernel(capability: tuple[int, int]) -> bool:
    return capability == (9, 0)


# Blocks of one window


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, *, window: int, scale: float
) -> Tensor:
    """Attention to the last `window` tokens of `[rows, heads, tokens, head_dim]` tensors."""
    num_tokens = query.shape[2]
    missing = -num_tokens % window
    if missing:  # later tokens, which no query of the row sees
        query, key, value = (functional.pad(x, [0, 0, 0, missing]) for x in (query, key, value))
    run: Any = _Blocks.apply
    output: Tensor = run(query, key, value, window, scale)
    return output[:, :, :num_tokens] if missing else output


def _count_blocks(num_tokens: int, window: int) -> int:
    return -(-num_tokens // window)


class _Forward(NamedTuple):
    """What the causal kernel returns."""

    output: Tensor
    sums: Tensor
    """The logarithm of each query's sum of exponentials."""
    rest: tuple[Any, ...]
    """What its backward pass asks for."""


def _run_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> _Forward:
    found = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    return _Forward(found[0], found[1], tuple(found[2:8]))


def _run_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    found: _Forward,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    ends_q, ends_k, most_q, most_k, seed, offset = found.rest
    return _aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        *(gradient, *inputs, found.output, found.sums, seed, offset, None),
        *(ends_q, ends_k, most_q, most_k, 0.0, True),
        scale=scale,
    )


class _Blocks(torch.autograd.Function):
    """Two causal kernels each way. With the output and the sums of both parts together, the
    kernel's backward pass gives each part's share of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int, scale: float
    ) -> Tensor:
        rows = query.shape[0]
        blocks = [_to_blocks(x, window) for x in (query, key, value)]
        own = _run_forward(blocks[0], blocks[1], blocks[2], scale)
        pairs = _reverse_pairs(blocks, rows)
        before = _run_forward(pairs[0], pairs[1], pairs[2], scale)
        shape = (rows, -1, query.shape[1], window)
        sums = own.sums.reshape(shape).clone()
        earlier = before.sums.reshape(*shape[:3], window - 1).flip(3)
        later = sums[:, 1:, :, :-1]  # the last query of a block sees nothing of the one before
        later.copy_(torch.logaddexp(later, earlier))
        share = torch.exp(earlier - later)[..., None]
        output = own.output
        merged = _by_row(output, rows)[:, 1:, :, :-1]
        other = _by_row(before.output, rows).flip(3)
        merged.copy_(torch.lerp(merged.to(share.dtype), other.to(share.dtype), share))
        result = _from_blocks(output, rows)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.rests = own.rest, before.rest
        ctx.window, ctx.scale, ctx.sums_shape = window, scale, own.sums.shape[3:]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        rows, window = query.shape[0], ctx.window
        wanted = (query, key, value, output, gradients[0])
        blocks = [_to_blocks(x, window) for x in wanted]
        own = _Forward(blocks[3], _as_kernel(sums, ctx.sums_shape), ctx.rests[0])
        found = _run_backward(blocks[4], (blocks[0], blocks[1], blocks[2]), own, ctx.scale)
        pairs = _reverse_pairs(blocks, rows)
        earlier = _as_kernel(sums[:, 1:, :, :-1].flip(3), ctx.sums_shape)
        before = _Forward(pairs[3], earlier.contiguous(), ctx.rests[1])
        others = _run_backward(pairs[4], (pairs[0], pairs[1], pairs[2]), before, ctx.scale)
        for at, (mine, other) in enumerate(zip(found, others, strict=True)):
            of_rows = _by_row(mine, rows)
            place = of_rows[:, 1:, :, :-1] if at == 0 else of_rows[:, :-1, :, 1:]
            place += _by_row(other, rows).flip(3)
        return (*(_from_blocks(x, rows) for x in found), None, None)


def _to_blocks(x: Tensor, window: int) -> Tensor:
    """`[rows * blocks, heads, window, head_dim]`; a view of what projections make."""
    rows, heads, num_tokens, width = x.shape
    flat = x.transpose(1, 2).reshape(rows * (num_tokens // window), window, heads, width)
    return flat.transpose(1, 2)


def _from_blocks(x: Tensor, rows: int) -> Tensor:
    """Back to `[rows, heads, tokens, head_dim]`."""
    flat = x.transpose(1, 2)
    return flat.reshape(rows, -1, *flat.shape[2:]).transpose(1, 2)


def _by_row(x: Tensor, rows: int) -> Tensor:
    """A view with the blocks of each row by themselves."""
    return x.view(rows, -1, *x.shape[1:])


def _as_kernel(sums: Tensor, rest: tuple[int, ...]) -> Tensor:
    """Sums by row and block, in the shape in which the kernel returns them."""
    flat = sums.flatten(0, 1)
    return flat.reshape(*flat.shape, *rest)


def _reverse_pairs(blocks: list[Tensor], rows: int) -> list[Tensor]:
    """Each block but the first as queries, with the block before it as keys and values: reversed,
    so that the keys still in a query's window are those up to its own place.

    `blocks`: queries, keys, values, and what goes with the queries. The last query of a block sees
    no key of the block before, and that block's first key is out of every window.
    """
    found = []
    for at, x in enumerate(blocks):
        of_rows = _by_row(x, rows)
        part = of_rows[:, :-1, :, 1:] if at in (1, 2) else of_rows[:, 1:, :, :-1]
        found.append(part.flip(3).flatten(0, 1))
    return found
