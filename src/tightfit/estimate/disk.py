"""Disk space of one job: the base model, its checkpoints, and the result."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Strategy
from tightfit.core.training import Training
from tightfit.estimate.state import (
    list_trained_values,
    optimizer_bytes_per_value,
    trained_value_bytes,
)
from tightfit.estimate.weights import adapter_params, retrained_params
from tightfit.models.spec import ModelSpec

DEFAULT_CHECKPOINTS = int(Training.model_fields["keep_checkpoints"].default)


def estimate_disk_components(
    spec: ModelSpec, strategy: Strategy, *, num_checkpoints: int = DEFAULT_CHECKPOINTS
) -> dict[str, int]:
    """Disk for the base model, checkpoints that can be resumed, and the result.

    A checkpoint holds the trained values and their optimizer state, once for all ranks;
    the new one is written before the oldest goes. Adapters are saved as trained; a model
    too, but fp32 weights go back to the width that the base is stored in.
    """
    base = spec.file_bytes or spec.num_params * stored_value_bytes(spec, strategy)
    if not strategy.is_trained:
        return {"base_model": base}
    checkpoint = sum(
        count * (width + optimizer_bytes_per_value(strategy, width))
        for count, width in list_trained_values(spec, strategy)
    )
    return {
        "base_model": base,
        "checkpoints": (num_checkpoints + 1 if num_checkpoints else 0) * int(checkpoint),
        "result": _result_bytes(spec, strategy),
    }


def _result_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    if strategy.method is Method.FULL:
        is_stored = spec.stored_dtype is not None and not spec.stored_dtype.is_quantized
        is_master = strategy.weights is Dtype.FP32
        if is_master and not is_stored:
            return 2 * spec.num_params
        width = stored_value_bytes(spec, strategy) if is_master else trained_value_bytes(strategy)
        return width * spec.num_params
    retrained = 2 if strategy.weights.is_quantized else strategy.weights.value_bytes
    return strategy.adapter_dtype.value_bytes * adapter_params(
        spec, strategy
    ) + retrained * retrained_params(spec, strategy)


def stored_value_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Width of a value in the base's files."""
    if spec.stored_dtype is not None and not spec.stored_dtype.is_quantized:
        return spec.stored_dtype.value_bytes
    return 4 if strategy.weights is Dtype.FP32 else 2
