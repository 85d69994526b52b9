"""The activations of experts that the kernels know."""

from __future__ import annotations

from enum import IntEnum


class Gating(IntEnum):
    """What lies between the two products: the gated activation."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2
    """gpt-oss: gate and up alternate, both are clamped, and the gate is a fast GELU."""


CLAMP_LIMIT, CLAMP_SLOPE = 7.0, 1.702
"""Source: transformers `GptOssExperts`."""
