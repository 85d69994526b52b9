"""Attention as a card runs it: torch's own fused operations, called on fake tensors.

Their autograd formulas and shape functions come with torch, so that what a forward pass
saves and what a backward pass returns is theirs. What the kernels take beyond that is in
`habits_attention_scratch`.
Source: pytorch aten/src/ATen/native/transformers/attention.cpp, torch 2.9 to 2.13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tightfit.estimate.trace.habits_backend import (
    CUDNN,
    FLASH,
    MATH,
    AttentionCall,
    Capability,
    Software,
    choose_backend,
)

_aten: Any = torch.ops.aten
_BIAS_ALIGNMENT = 8
"""`mem_eff_alignment`: the efficient kernel's bias has strides of so many elements."""
_CUDNN_MASKED = -65504.0
"""`convert_boolean_attn_mask_cudnn`: cuDNN does not take infinity."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What `scaled_dot_product_attention` takes after its three tensors, in its order."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class CardAttention:
    """`torch.nn.functional.scaled_dot_product_attention` of one card and torch."""

    def __init__(self, card: Capability, software: Software) -> None:
        self._card = card
        self._software = software

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        options = AttentionOptions(*args, **kwargs)
        device = query.device.type
        if not torch.is_autocast_enabled(device):
            return self._run(query, key, value, options)
        # On the lists of both devices: inputs are cast, what is inside runs without.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (_cast(x, dtype) for x in (query, key, value))
        if options.attn_mask is not None:
            options = replace(options, attn_mask=_cast(options.attn_mask, dtype))
        with torch.autocast(device, enabled=False):
            return self._run(query, key, value, options)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        call = describe_call(query, key, value, options)
        backend = choose_backend(call, self._card, self._software)
        if backend == FLASH:
            return _flash(query, key, value, options)
        masked = _CUDNN_MASKED if backend == CUDNN else -math.inf
        bias = _to_bias(options.attn_mask, query.dtype, masked)
        options = replace(options, attn_mask=bias)
        if backend == MATH:
            return _math(query, key, value, options)
        fused = _cudnn if backend == CUDNN else _efficient
        return fused(query, key, value, options, needs_gradient=call.needs_gradient)


def describe_call(
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
    """`convert_boolean_attn_mask`: in each call anew, so that every layer saves its own."""
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
    """Head widths are padded to a multiple of 8 outside of the kernel."""
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
    """`_scaled_dot_product_attention_math`, whose C++ treats fake tensors differently."""
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
