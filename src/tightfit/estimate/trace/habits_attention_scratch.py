"""Scratch memory of the attention kernels: what they allocate beside their results.

Arguments are those of the operations that autograd calls; tensors are
[batch, heads, tokens, width] but for the varlen kernel's [tokens, heads, width].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tightfit.estimate.trace.habits_backend import Capability

_FLOAT = 4
_SMALL_CORE_SHARED_BYTES = ((7, 5), (8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""Cards whose 64 to 99 KiB of shared memory cannot hold the kernels' largest tiles (CUDA
programming guide, technical specifications per compute capability)."""
_MAX_SPLIT_GROUPS = 200
"""Keys are split while heads times splits stay within this (attention_backward.cu)."""


def flash_backward(args: tuple[Any, ...]) -> list[int]:
    """`mha_bwd` of flash_attn/flash_api.cpp, without determinism.

    Query gradients are summed in fp32, of padded length and width; grouped keys get
    gradients per query head first. `_flash_attention_backward` makes the gradient and the
    output contiguous token by token.
    """
    gradient, query, key, _, output = args[:5]
    batch, num_heads, num_queries, width = query.shape
    rounded = _round_up(num_queries, 128)
    blocks = [_bytes(x) for x in (gradient, output) if not x.transpose(1, 2).is_contiguous()]
    blocks.append(_FLOAT * batch * num_heads * rounded)
    blocks.append(_FLOAT * batch * num_heads * rounded * _round_width(width))
    if key.shape[1] != num_heads:
        whole = batch * num_heads * key.shape[2] * width * key.element_size()
        blocks += [whole, whole]
    return blocks


def varlen_backward(args: tuple[Any, ...]) -> list[int]:
    """`mha_varlen_bwd` of flash_attn/flash_api.cpp: each document is 128 rows from the next."""
    gradient, query, key, _, output, _, offsets = args[:7]
    num_queries, num_heads, width = query.shape
    rows = num_queries + 128 * (offsets.numel() - 1)
    blocks = [_bytes(x) for x in (gradient, output) if not x.is_contiguous()]
    blocks.append(_FLOAT * num_heads * rows)
    blocks.append(_FLOAT * num_heads * rows * _round_width(width))
    if key.shape[1] != num_heads:
        whole = num_heads * key.shape[0] * width * key.element_size()
        blocks += [whole, whole]
    return blocks


_CUDNN_EXTRA_BYTES = 16
"""Less than a block; one block more than without was seen on an H200 with torch 2.11."""


def cudnn_backward(args: tuple[Any, ...]) -> list[int]:
    """One workspace (`run_cudnn_SDP_bprop`), as cudnn-frontend adds it up.

    `SDPABackwardNode::get_fe_workspace_size_node`: the query's gradient and the sum over each
    row, both in fp32. Grouped keys' gradients per query head are no tensors of the
    frontend's; the plan that sums them has to keep them.
    """
    gradient, query, key, value = args[:4]
    batch, num_heads, num_queries, width = query.shape
    workspace = _FLOAT * batch * num_heads * num_queries * (width + 1) + _CUDNN_EXTRA_BYTES
    if key.shape[1] != num_heads:
        widths = width + value.shape[-1]
        workspace += batch * num_heads * key.shape[2] * widths * key.element_size()
    copied = [] if gradient.stride(-1) == 1 else [_bytes(gradient)]
    return [*copied, workspace]


def efficient_forward(args: tuple[Any, ...]) -> list[int]:
    """`kNeedsOutputAccumulatorBuffer` of mem_eff_attention/kernel_forward.h: beyond width 128."""
    query, value = args[0], args[2]
    if query.element_size() == _FLOAT or max(query.shape[-1], value.shape[-1]) <= 128:
        return []
    return [_FLOAT * query.shape[0] * query.shape[1] * query.shape[2] * value.shape[-1]]


def efficient_backward(args: tuple[Any, ...], card: Capability) -> list[int]:
    """`_efficient_attention_backward` of attention_backward.cu with `Params::workspace_size`.

    fp32 kernels and Volta's wide ones take the rows' sums from a product made outside,
    which is gone before the workspace comes.
    """
    gradient, query, key, value, _, output = args[:6]
    batch, num_heads, num_queries, width = query.shape
    is_half = query.element_size() == 2
    rows, columns, max_width = _pick_tile(max(width, value.shape[-1]), card, is_half=is_half)
    is_in_registers = is_half and max_width <= rows
    tiles = -(-num_queries // rows) * -(-width // columns)
    elements = tiles * (rows * columns + 4)
    if is_half and not is_in_registers:
        splits = min(-(-key.shape[2] // columns), _MAX_SPLIT_GROUPS // (batch * num_heads))
        kept = _round_up(width, rows) + _round_up(value.shape[-1], rows)
        elements += max(splits, 1) * columns * kept
    workspace = _FLOAT * batch * num_heads * _round_up(elements, 4)
    if not (is_half and (is_in_registers or card[:2] != (7, 0))):
        workspace = max(workspace, _FLOAT * output.numel())
    blocks = [] if gradient.transpose(1, 2).is_contiguous() else [_bytes(gradient)]
    return [*blocks, _FLOAT * batch * num_heads * num_queries, workspace]


def _pick_tile(width: int, card: Capability, *, is_half: bool) -> tuple[int, int, int]:
    """(kBlockSizeI, kBlockSizeJ, kMaxK) of the first kernel in kernels/cutlassB.h that fits."""
    if width <= 64:
        return 64, 64, 32 if width <= 32 else 64
    max_width = 128 if width <= 128 else 65536
    if card in _SMALL_CORE_SHARED_BYTES or (not is_half and card < (8, 0)):
        if is_half and width <= 96 and card in ((8, 6), (8, 9)):
            return 128, 64, 96
        return 64, 64, max_width
    if is_half and card >= (8, 0) and width <= 128:
        return 128, 128, 128
    return 128, 64, max_width


def safe_softmax(args: tuple[Any, ...]) -> list[int]:
    """`_safe_softmax` of attention.cpp: the plain softmax and which scores are -inf."""
    scores = args[0]
    return [_bytes(scores), scores.numel()]


def _round_width(width: int) -> int:
    return _round_up(width, 32 if width <= 128 else 64)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
