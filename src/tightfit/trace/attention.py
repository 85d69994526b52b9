"""Attention as a GPU runs it: which SDPA backend torch selects, and the fused operation it calls.

The autograd formulas and shape functions are torch's own, so what a forward pass saves and what a
backward pass returns is exact. Kernel workspace is in `kernel_workspace`.
Source: pytorch aten/src/ATen/native/transformers (cuda/sdp_utils.cpp, sdp_utils_cpp.h,
attention.cpp), torch 2.9 to 2.13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CUDNN = "cudnn"
FLASH = "flash"
EFFICIENT = "efficient"
MATH = "math"

Capability = tuple[int, int]

_HALF = ("float16", "bfloat16")
_NEWEST = (12, 1)
"""Newest architecture the kernels are built for; the oldest differs by kernel."""
_FLASH_MAX_WIDTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareVersions:
    """Versions that the selection depends on."""

    torch: tuple[int, int]
    cudnn: int
    """In cuDNN's own numbering: 91900 is 9.19.0."""


CUDNN_OF_TORCH = {9: 91002, 10: 91002, 11: 91900, 12: 92000, 13: 92000, 14: 92400}
"""cuDNN that the PyPI wheel of torch 2.x requires (9.10.2.21, 9.10.2.21,
9.19.0.56, 9.20.0.48, 9.20.0.48, 9.24.0.43)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments of `scaled_dot_product_attention` that decide the backend."""

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
    """`enable_gqa` was passed."""
    dropout: float = 0.0
    needs_gradient: bool
    is_dense: bool = True
    """All tensors are 4-D, have one batch size and a contiguous last dimension."""


def find_default_cudnn(torch: tuple[int, int]) -> int:
    """The cuDNN version of torch's own wheel."""
    known = CUDNN_OF_TORCH
    return known[min(max(torch[1], min(known)), max(known))]


def select_attention_backend(
    call: AttentionCall, capability: Capability, software: SoftwareVersions
) -> str:
    """The backend that torch selects for `call` on a GPU of this compute capability."""
    checks = {CUDNN: _fits_cudnn, FLASH: _fits_flash, EFFICIENT: _fits_efficient}
    order = (CUDNN, FLASH, EFFICIENT) if prefers_cudnn(capability, software) else (FLASH, EFFICIENT)
    if not call.is_dense or not call.num_queries or not call.num_keys:
        return MATH
    return next((name for name in order if checks[name](call, capability, software)), MATH)


def prefers_cudnn(capability: Capability, software: SoftwareVersions) -> bool:
    """`check_prefer_cudnn_attention`. Elsewhere cuDNN comes after math, which accepts everything.

    2.9 (PR 162073): sm90 and sm100 from cuDNN 9.9. From 2.10 (PR 171627) from cuDNN 9.15.1,
    which the wheels have from 2.11 on; and sm103.
    """
    major, minor = capability
    if software.torch < (2, 9) or major not in (9, 10):
        return False
    if software.torch < (2, 10):
        return software.cudnn >= 90900 and minor == 0
    return software.cudnn > 91500 and minor in (0, 3)


def _fits_cudnn(call: AttentionCall, capability: Capability, software: SoftwareVersions) -> bool:
    """`can_use_cudnn_attention`."""
    limit = _cudnn_max_width(call, capability, software)
    return (
        (8, 0) <= capability <= _NEWEST
        and call.dtype in _HALF
        and (not call.has_mask or call.is_mask_broadcastable)
        and _has_heads(call, can_group=True, same_values=False)
        and max(call.width, call.value_width) <= limit
        and call.width % 8 == call.value_width % 8 == 0
        and call.num_keys != 1
        and _cudnn_drops_out(call, software)
    )


def _cudnn_max_width(
    call: AttentionCall, capability: Capability, software: SoftwareVersions
) -> int:
    """`check_cudnn_tensor_shapes`; from 2.14 also `check_cudnn_d256_bprop_head_dim`."""
    widths = (call.width, call.value_width)
    if software.torch >= (2, 14):
        is_new = software.cudnn > 92200 and (capability == (9, 0) or capability[0] == 10)
        if is_new and (not call.needs_gradient or widths in ((192, 128), (256, 256))):
            return 256
        return 192 if capability[0] in (9, 10) and widths == (192, 128) else 128
    if capability == (9, 0) and software.cudnn >= 91000:
        return 256
    if capability[0] == 10 and software.cudnn >= 91100 and widths == (192, 128):
        return 192
    return 128


def _cudnn_drops_out(call: AttentionCall, software: SoftwareVersions) -> bool:
    if call.dropout == 0.0:
        return True
    if call.num_queries == 1 or 91100 < software.cudnn < 91400:
        return False
    return software.torch < (2, 12) or (call.dropout * 16).is_integer()


def _fits_flash(call: AttentionCall, capability: Capability, _software: SoftwareVersions) -> bool:
    """`can_use_flash_attention`."""
    return (
        (8, 0) <= capability <= _NEWEST
        and call.dtype in _HALF
        and not call.has_mask
        and call.width == call.value_width <= _FLASH_MAX_WIDTH
        and not _is_too_wide_for_small_cores(call, capability)
        and (not call.is_causal or call.num_queries == call.num_keys)
        and _has_heads(call, can_group=True)
    )


def _is_too_wide_for_small_cores(call: AttentionCall, capability: Capability) -> bool:
    """`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`."""
    is_small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if not is_small or not call.needs_gradient or call.width <= 192:
        return False
    return call.width <= 224 or call.dropout > 0


def _fits_efficient(
    call: AttentionCall, capability: Capability, software: SoftwareVersions
) -> bool:
    """`can_use_mem_efficient_attention`. Grouped keys from 2.14 on (PR 191085)."""
    dtypes = ("float16", "float32", "bfloat16") if capability >= (8, 0) else ("float16", "float32")
    alignment = _gemm_alignment(call, capability)
    return (
        (5, 0) <= capability <= _NEWEST
        and call.dtype in dtypes
        and call.width % alignment == call.value_width % alignment == 0
        and _has_heads(call, can_group=software.torch >= (2, 14))
    )


def _gemm_alignment(call: AttentionCall, capability: Capability) -> int:
    """`minimum_gemm_alignment`: elements of a 16-byte load where tensor cores are used."""
    is_half = call.dtype in _HALF
    if capability >= (8, 0) or (capability >= (7, 0) and is_half):
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


_aten: Any = torch.ops.aten
_BIAS_ALIGNMENT = 8
"""`mem_eff_alignment`: strides of the efficient kernel's bias are multiples of it."""
_CUDNN_MASKED = -65504.0
"""`convert_boolean_attn_mask_cudnn`: cuDNN does not take infinity."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Arguments of `scaled_dot_product_attention` after its three tensors, in its order."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class GpuAttention:
    """`torch.nn.functional.scaled_dot_product_attention` as one GPU and torch version run it."""

    def __init__(self, capability: Capability, software: SoftwareVersions) -> None:
        self._capability = capability
        self._software = software

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        options = AttentionOptions(*args, **kwargs)
        device = query.device.type
        if not torch.is_autocast_enabled(device):
            return self._run(query, key, value, options)
        # Autocast casts the inputs on both devices; the operations inside run without it.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (_cast(x, dtype) for x in (query, key, value))
        if options.attn_mask is not None:
            options = replace(options, attn_mask=_cast(options.attn_mask, dtype))
        with torch.autocast(device, enabled=False):
            return self._run(query, key, value, options)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        call = describe_attention_call(query, key, value, options)
        backend = select_attention_backend(call, self._capability, self._software)
        if backend == FLASH:
            return _flash(query, key, value, options)
        masked = _CUDNN_MASKED if backend == CUDNN else -math.inf
        bias = _to_bias(options.attn_mask, query.dtype, masked)
        options = replace(options, attn_mask=bias)
        if backend == MATH:
            return _math(query, key, value, options)
        fused = _cudnn if backend == CUDNN else _efficient
        return fused(query, key, value, options, needs_gradient=call.needs_gradient)


def describe_attention_call(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> AttentionCall:
    tensors = (query, key, value)
    mask = options.attn_mask
    is_one_dtype = query.dtype == key.dtype == value.dtype
    is_dense = (
        all(x.dim() == 4 and x.stride(-1) == 1 for x in tensors)
        and query.shape[0] == key.shape[0] == value.shape[0]
        and (mask is None or mask.stride(-1) == 1)
    )
    return AttentionCall(
        dtype=str(query.dtype).removeprefix("torch.") if is_one_dtype else "",
        num_heads=query.shape[-3],
        num_key_heads=key.shape[-3],
        num_value_heads=value.shape[-3],
        width=query.shape[-1],
        value_width=value.shape[-1],
        num_queries=query.shape[-2],
        num_keys=key.shape[-2],
        has_mask=mask is not None,
        is_mask_broadcastable=mask is None or _is_broadcastable(mask, query, key),
        is_causal=options.is_causal,
        is_grouped=options.enable_gqa,
        dropout=options.dropout_p,
        needs_gradient=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        is_dense=is_dense,
    )


def _is_broadcastable(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """`check_attn_mask_shape`."""
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    whole = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])[-mask.dim() :]
    return all(size in (1, limit) for size, limit in zip(mask.shape, whole, strict=True))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    is_eligible = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if is_eligible else tensor


def _to_bias(mask: Tensor | None, dtype: torch.dtype, masked: float) -> Tensor | None:
    """`convert_boolean_attn_mask`: made anew in each call, so every layer saves its own."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), masked, dtype=dtype))


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *, needs_gradient: bool
) -> Tensor:
    output: Tensor = _aten._scaled_dot_product_cudnn_attention(
        query,
        key,
        value,
        options.attn_mask,
        needs_gradient,
        options.dropout_p,
        options.is_causal,
        False,
        scale=options.scale,
    )[0]
    return output


def _flash(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Head widths are padded to a multiple of 8 outside the kernel."""
    width = query.shape[-1]
    padded = [_pad(x, -width % 8) for x in (query, key, value)]
    scale = width**-0.5 if options.scale is None else options.scale
    output: Tensor = _aten._scaled_dot_product_flash_attention(
        *padded, options.dropout_p, options.is_causal, False, scale=scale
    )[0]
    return output if output.shape[-1] == width else output[..., :width]


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *, needs_gradient: bool
) -> Tensor:
    bias = options.attn_mask
    if bias is not None:
        # `preprocess_mask`
        if bias.stride(-1) != 1 or any(step % _BIAS_ALIGNMENT for step in bias.stride()[:-1]):
            num_keys = bias.shape[-1]
            bias = _pad(bias, _BIAS_ALIGNMENT - num_keys % _BIAS_ALIGNMENT)[..., :num_keys]
        bias = bias.expand(*query.shape[:3], key.shape[2])
    output: Tensor = _aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        bias,
        needs_gradient,
        options.dropout_p,
        options.is_causal,
        scale=options.scale,
    )[0]
    return output


def _math(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """`_scaled_dot_product_attention_math`; the C++ version treats fake tensors differently."""
    dtype, bias = query.dtype, options.attn_mask
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(query.shape[-1] ** -0.5 if options.scale is None else abs(options.scale))
    query = query * root
    if options.is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        bias = _to_bias(seen, query.dtype, -math.inf)
    if options.enable_gqa and query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = torch.matmul(query, key.transpose(-2, -1) * root)
    if bias is not None:
        weights.add_(bias)
    weights = _aten._safe_softmax(weights, -1)
    if options.dropout_p > 0.0:
        weights = functional.dropout(weights, options.dropout_p)
    output = torch.matmul(weights, value).to(dtype)
    weights.to(dtype)  # the second result, which the caller drops
    return output


def _pad(tensor: Tensor, count: int) -> Tensor:
    return functional.pad(tensor, [0, count]) if count else tensor
