"""How wide values are where, for one strategy."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Strategy
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How wide values are where, for one strategy."""

    value: int
    """Results of matrix products."""
    residual: int
    """The stream between layers: fp32 wherever weights or norms are, else as `value`."""
    is_autocast: bool
    is_full: bool
    adapter: int
    """Width in which adapters read their input."""
    is_cpu: bool = False


def find_numerics(spec: ModelSpec, strategy: Strategy, *, is_cpu: bool = False) -> Numerics:
    # A quantized matrix returns the dtype it was given: fp32, where norms are, and where
    # autocast runs LayerNorm in fp32. Source: bitsandbytes Linear4bit; torch autocast's fp32 ops.
    is_uniform = _has_one_dtype(strategy)
    is_autocast = strategy.is_autocast and not is_uniform
    is_wide_norm = strategy.upcast_unquantized or (is_autocast and not spec.is_rms_norm)
    is_upcast = strategy.weights.is_quantized and is_wide_norm
    value = 4 if is_upcast else strategy.compute.value_bytes
    return Numerics(
        value=value,
        residual=4 if strategy.casts_weights or is_upcast else value,
        is_autocast=is_autocast,
        is_full=strategy.method is Method.FULL,
        # Autocast casts an adapter's input to the compute dtype, whatever the adapter is in.
        adapter=(
            strategy.compute if is_autocast or is_uniform else strategy.adapter_dtype
        ).value_bytes,
        is_cpu=is_cpu,
    )


def _has_one_dtype(strategy: Strategy) -> bool:
    """Whether modules see weights and adapters in the compute dtype alone, and nothing is cast.

    DeepSpeed knows no autocast and wants one dtype throughout; FSDP casts fp32 shards as it
    gathers them, adapters among them.
    """
    is_half = strategy.compute.value_bytes == 2
    is_gathered_half = strategy.sharding.is_fsdp and strategy.weights is Dtype.FP32
    return is_half and (strategy.sharding.is_zero or is_gathered_half)
