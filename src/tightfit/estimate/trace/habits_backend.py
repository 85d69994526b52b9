"""Which of torch's attention kernels a card takes, as `sdp_utils.cpp` decides. Knows no torch.

Source: pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and
.../transformers/sdp_utils_cpp.h, torch 2.9 to 2.13. A backend is the first of the priority
order whose every `check_*` passes.
"""

from __future__ import annotations

from dataclasses import dataclass

CUDNN = "cudnn"
FLASH = "flash"
EFFICIENT = "efficient"
MATH = "math"

Capability = tuple[int, int]

_HALF = ("float16", "bfloat16")
_NEWEST = (12, 1)
"""Of the architectures that the kernels were built for; the oldest differs."""
_FLASH_MAX_WIDTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What decides beside the card."""

    torch: tuple[int, int]
    cudnn: int
    """As cuDNN counts: 91900 is 9.19.0."""


CUDNN_OF_TORCH = {9: 91002, 10: 91002, 11: 91900, 12: 92000, 13: 92000, 14: 92400}
"""cuDNN that the PyPI wheel of torch 2.x asks for (its requirements: 9.10.2.21, 9.10.2.21,
9.19.0.56, 9.20.0.48, 9.20.0.48, 9.24.0.43)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of `scaled_dot_product_attention`, as far as the choice goes."""

    dtype: str
    """`float16`, `bfloat16`, `float32`; empty if query, key and value differ."""
    num_heads: int
    num_key_heads: int
    num_value_heads: int
    width: int
    """Of query and key heads."""
    value_width: int
    num_queries: int
    num_keys: int
    has_mask: bool
    is_mask_broadcastable: bool = True
    """Two- or four-dimensional, of the scores' shape or 1, and without gradient."""
    is_causal: bool
    is_grouped: bool
    """The caller said `enable_gqa`."""
    dropout: float = 0.0
    needs_gradient: bool
    is_dense: bool = True
    """Four-dimensional, of one batch size, and neighbours in the last dimension of each tensor."""


def default_cudnn(torch: tuple[int, int]) -> int:
    """The cuDNN of torch's own wheel."""
    known = CUDNN_OF_TORCH
    return known[min(max(torch[1], min(known)), max(known))]


def choose_backend(call: AttentionCall, card: Capability, software: Software) -> str:
    """The kernel that runs `call` on `card`."""
    checks = {CUDNN: _fits_cudnn, FLASH: _fits_flash, EFFICIENT: _fits_efficient}
    order = (CUDNN, FLASH, EFFICIENT) if prefers_cudnn(card, software) else (FLASH, EFFICIENT)
    if not call.is_dense or not call.num_queries or not call.num_keys:
        return MATH
    return next((name for name in order if checks[name](call, card, software)), MATH)


def prefers_cudnn(card: Capability, software: Software) -> bool:
    """`check_prefer_cudnn_attention`. Elsewhere cuDNN comes after math, which takes everything.

    2.9 (PR 162073): sm90 and sm100 from cuDNN 9.9. From 2.10 (PR 171627) from cuDNN 9.15.1,
    which the wheels have from 2.11 on; and sm103.
    """
    major, minor = card
    if software.torch < (2, 9) or major not in (9, 10):
        return False
    if software.torch < (2, 10):
        return software.cudnn >= 90900 and minor == 0
    return software.cudnn > 91500 and minor in (0, 3)


def _fits_cudnn(call: AttentionCall, card: Capability, software: Software) -> bool:
    """`can_use_cudnn_attention`."""
    limit = _cudnn_max_width(call, card, software)
    return (
        (8, 0) <= card <= _NEWEST
        and call.dtype in _HALF
        and (not call.has_mask or call.is_mask_broadcastable)
        and _has_heads(call, can_group=True, same_values=False)
        and max(call.width, call.value_width) <= limit
        and call.width % 8 == call.value_width % 8 == 0
        and call.num_keys != 1
        and _cudnn_drops_out(call, software)
    )


def _cudnn_max_width(call: AttentionCall, card: Capability, software: Software) -> int:
    """`check_cudnn_tensor_shapes`; from 2.14 also `check_cudnn_d256_bprop_head_dim`."""
    widths = (call.width, call.value_width)
    if software.torch >= (2, 14):
        is_new = software.cudnn > 92200 and (card == (9, 0) or card[0] == 10)
        if is_new and (not call.needs_gradient or widths in ((192, 128), (256, 256))):
            return 256
        return 192 if card[0] in (9, 10) and widths == (192, 128) else 128
    if card == (9, 0) and software.cudnn >= 91000:
        return 256
    if card[0] == 10 and software.cudnn >= 91100 and widths == (192, 128):
        return 192
    return 128


def _cudnn_drops_out(call: AttentionCall, software: Software) -> bool:
    if call.dropout == 0.0:
        return True
    if call.num_queries == 1 or 91100 < software.cudnn < 91400:
        return False
    return software.torch < (2, 12) or (call.dropout * 16).is_integer()


def _fits_flash(call: AttentionCall, card: Capability, _software: Software) -> bool:
    """`can_use_flash_attention`."""
    return (
        (8, 0) <= card <= _NEWEST
        and call.dtype in _HALF
        and not call.has_mask
        and call.width == call.value_width <= _FLASH_MAX_WIDTH
        and not _is_too_wide_for_small_cores(call, card)
        and (not call.is_causal or call.num_queries == call.num_keys)
        and _has_heads(call, can_group=True)
    )


def _is_too_wide_for_small_cores(call: AttentionCall, card: Capability) -> bool:
    """`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`."""
    is_small = (8, 6) <= card <= (8, 9) or (12, 0) <= card <= (12, 1)
    if not is_small or not call.needs_gradient or call.width <= 192:
        return False
    return call.width <= 224 or call.dropout > 0


def _fits_efficient(call: AttentionCall, card: Capability, software: Software) -> bool:
    """`can_use_mem_efficient_attention`. Grouped keys from 2.14 on (PR 191085)."""
    dtypes = ("float16", "float32", "bfloat16") if card >= (8, 0) else ("float16", "float32")
    alignment = _gemm_alignment(call, card)
    return (
        (5, 0) <= card <= _NEWEST
        and call.dtype in dtypes
        and call.width % alignment == call.value_width % alignment == 0
        and _has_heads(call, can_group=software.torch >= (2, 14))
    )


def _gemm_alignment(call: AttentionCall, card: Capability) -> int:
    """`minimum_gemm_alignment`: elements of a 16-byte load where tensor cores are used."""
    is_half = call.dtype in _HALF
    if card >= (8, 0) or (card >= (7, 0) and is_half):
        return 8 if is_half else 4
    return 1


def _has_heads(call: AttentionCall, *, can_group: bool, same_values: bool = True) -> bool:
    """`check_batch_size_and_num_heads_dense`."""
    if call.num_heads == call.num_key_heads == call.num_value_heads:
        return True
    if not call.is_grouped or not can_group:
        return False
    if same_values and call.num_key_heads != call.num_value_heads:
        return False
    return call.num_heads % call.num_key_heads == call.num_heads % call.num_value_heads == 0
