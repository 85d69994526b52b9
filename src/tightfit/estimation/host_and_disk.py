"""Host memory of one node and disk space of one job."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy, Training
from tightfit.core.units import GIB
from tightfit.estimation.activations import offloaded_input_bytes
from tightfit.estimation.state import (
    estimate_state_bytes,
    list_trained_values,
    optimizer_bytes_per_value,
    trained_value_bytes,
)
from tightfit.estimation.weights import (
    adapter_params,
    estimate_weight_bytes,
    num_trainable,
    retrained_params,
)
from tightfit.models.spec import ModelSpec

DEFAULT_CHECKPOINTS = int(Training.model_fields["keep_checkpoints"].default)


def estimate_disk_components(
    spec: ModelSpec,
    strategy: Strategy,
    *,
    num_checkpoints: int = DEFAULT_CHECKPOINTS,
    num_examples: int = 0,
) -> dict[str, int]:
    """Disk for the base model, checkpoints that can be resumed, and the result.

    A checkpoint holds the trained values and their optimizer state, once for all ranks;
    the new one is written before the oldest is deleted. Adapters are saved as trained; a model
    too, but fp32 weights go back to the width that the base is stored in.
    """
    base = spec.file_bytes or spec.num_params * stored_value_bytes(spec, strategy)
    if not strategy.is_trained:
        return {"base_model": base}
    checkpoint = sum(
        count * (width + optimizer_bytes_per_value(strategy, width))
        for count, width in list_trained_values(spec, strategy)
    )
    parts = {
        "base_model": base,
        "checkpoints": (num_checkpoints + 1 if num_checkpoints else 0) * int(checkpoint),
        "result": _result_bytes(spec, strategy),
    }
    kept = reference_bytes(strategy, num_examples=num_examples)
    return parts | {"reference_log_probs": kept} if kept else parts


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


def reference_bytes(strategy: Strategy, *, num_examples: int) -> int:
    """Log-probabilities of the reference that are kept: an fp32 number for each answer."""
    if not strategy.precompute_reference:
        return 0
    return 4 * num_examples * strategy.objective.record.num_reference_sequences


# Host memory

PROCESS_BYTES = int(2.5 * GIB)
"""Resident memory of one training process after CUDA start-up, before any model."""
FILE_SHARD_BYTES = 5 * GIB
"""Checkpoint files come in shards of at most this size. Source: transformers `save_pretrained`."""
PINNED_FACTOR = 1.5
"""Head-room of DeepSpeed's pinned staging buffers. Source: as in `state.py`."""


def estimate_host_components(
    spec: ModelSpec, strategy: Strategy, *, num_examples: int = 0
) -> dict[str, int]:
    """Host RAM of one node at its worst, by part.

    Loading holds at most one copy of the weights per node, as `train` guarantees;
    unsharded loading streams one file shard at a time for each rank.
    Leaves out the page cache, which the system frees on demand.
    """
    parts = _host_parts(spec, strategy)
    # Optimizer state and layers' inputs come after loading, so the larger of the two counts.
    late = ("offloaded_optimizer", "offloaded_inputs")
    is_late = sum(parts[name] for name in late) > parts["loading"]
    for name in ("loading",) if is_late else late:
        parts[name] = 0
    kept = reference_bytes(strategy, num_examples=num_examples)
    parts["reference_log_probs"] = strategy.gpus_per_node * kept
    return {name: size for name, size in parts.items() if size}


def _host_parts(spec: ModelSpec, strategy: Strategy) -> dict[str, int]:
    """Each part at its largest, at whatever time."""
    ranks = strategy.gpus_per_node
    state = estimate_state_bytes(spec, strategy)
    factor = PINNED_FACTOR if strategy.sharding.is_zero else 1.0
    return {
        "processes": ranks * PROCESS_BYTES,
        "loading": sum(estimate_loading_bytes_by_rank(spec, strategy)[:ranks]),
        "offloaded_weights": int(ranks * state.host_weights * factor),
        "offloaded_optimizer": int(ranks * state.host_optimizer * factor),
        "offloaded_inputs": ranks * offloaded_bytes(spec, strategy),
    }


def offloaded_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Inputs of recomputed layers that one rank has in host memory."""
    inputs = strategy.tokens_per_micro_batch * offloaded_input_bytes(spec, strategy)
    return strategy.count_offloaded_inputs(spec.num_layers) * inputs


def estimate_loading_bytes_by_rank(spec: ModelSpec, strategy: Strategy) -> list[int]:
    """Weights that each rank of the job has in host memory at the worst moment of loading.

    Without sharded weights every rank streams the files to its device, one at a time. FSDP's
    rank 0 holds the whole model as it will train, and sends it layer by layer; ZeRO-3's holds
    the files, and broadcasts one tensor after the other. Other ranks get their shards on the
    device. Pages of mapped files count, though the system may reclaim them.
    """
    stored = spec.num_params * stored_value_bytes(spec, strategy)
    if not strategy.sharding.shards_weights:
        return [min(stored, FILE_SHARD_BYTES)] * strategy.world_size
    first = stored if strategy.sharding.is_zero else _whole_model_bytes(spec, strategy)
    return [first] + [0] * (strategy.world_size - 1)


def _whole_model_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """The model with its adapters and its reference, in the formats it trains in."""
    base = estimate_weight_bytes(spec, strategy).total * (1 + strategy.copies_reference)
    if strategy.method is not Method.LORA:
        return base
    return base + sum(count * width for count, width in list_trained_values(spec, strategy))


def estimate_phase_host_bytes(spec: ModelSpec, strategy: Strategy) -> dict[str, int]:
    """Host RAM of one node by phase; `step` for every moment of training and for evaluation.

    Merging and quantizing hold the 16-bit model in host memory and work layer by layer.
    """
    parts = _host_parts(spec, strategy)
    processes = parts["processes"]
    step = processes + sum(size for name, size in parts.items() if name.startswith("offloaded"))
    gathered = num_trainable(spec, strategy) * 4 if strategy.sharding.shards_weights else 0
    whole = PROCESS_BYTES + 2 * spec.num_params
    return {
        "load": processes + parts["loading"] + parts["offloaded_weights"],
        "step": step,
        "save": step + (gathered if strategy.is_trained else 0),
        "merge": whole,
        "quantize": whole,
        "inference": PROCESS_BYTES + min(2 * spec.num_params, FILE_SHARD_BYTES),
    }
