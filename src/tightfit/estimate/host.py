"""Host memory of one node."""

from __future__ import annotations

from tightfit.core.strategy import Method, Strategy
from tightfit.core.units import GIB
from tightfit.estimate.disk import stored_value_bytes
from tightfit.estimate.state import estimate_state_bytes, list_trained_values
from tightfit.estimate.weights import estimate_weight_bytes, num_trainable
from tightfit.models.spec import ModelSpec

PROCESS_BYTES = int(2.5 * GIB)
"""Resident memory of one training process after CUDA start-up, before any model."""
FILE_SHARD_BYTES = 5 * GIB
"""Checkpoint files come in shards of at most this size. Source: transformers `save_pretrained`."""
PINNED_FACTOR = 1.5
"""Head-room of DeepSpeed's pinned staging buffers. Source: as in `zero_table.py`."""


def estimate_host_components(spec: ModelSpec, strategy: Strategy) -> dict[str, int]:
    """Host RAM of one node at its worst, by part.

    Loading holds at most one copy of the weights per node, as `train` promises;
    unsharded loading streams one file shard at a time for each rank.
    Leaves out the page cache, which the system gives back on demand.
    """
    parts = _host_parts(spec, strategy)
    # Offloaded optimizer state appears after loading is over: the larger of the two counts.
    is_late = parts["offloaded_optimizer"] > parts["loading"]
    parts["loading" if is_late else "offloaded_optimizer"] = 0
    return {name: size for name, size in parts.items() if size}


def _host_parts(spec: ModelSpec, strategy: Strategy) -> dict[str, int]:
    """Each part at its largest, whether or not it meets the others."""
    ranks = strategy.gpus_per_node
    state = estimate_state_bytes(spec, strategy)
    factor = PINNED_FACTOR if strategy.sharding.is_zero else 1.0
    return {
        "processes": ranks * PROCESS_BYTES,
        "loading": sum(estimate_loading_bytes_by_rank(spec, strategy)[:ranks]),
        "offloaded_weights": int(ranks * state.host_weights * factor),
        "offloaded_optimizer": int(ranks * state.host_optimizer * factor),
    }


def estimate_loading_bytes_by_rank(spec: ModelSpec, strategy: Strategy) -> list[int]:
    """Weights that each rank of the job has in host memory at the worst moment of loading.

    Without sharded weights every rank streams the files to its device, one at a time. FSDP's
    rank 0 holds the whole model as it will train, and sends it layer by layer; ZeRO-3's holds
    the files, and hands out one tensor after the other. Other ranks get their shards on the
    device. Pages of mapped files count here, though the system may take them back.
    """
    stored = spec.num_params * stored_value_bytes(spec, strategy)
    if not strategy.sharding.shards_weights:
        return [min(stored, FILE_SHARD_BYTES)] * strategy.world_size
    first = stored if strategy.sharding.is_zero else _whole_model_bytes(spec, strategy)
    return [first] + [0] * (strategy.world_size - 1)


def _whole_model_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """The model with its adapters, in the formats it trains in."""
    base = estimate_weight_bytes(spec, strategy).total
    if strategy.method is not Method.LORA:
        return base
    return base + sum(count * width for count, width in list_trained_values(spec, strategy))


def estimate_phase_host_bytes(spec: ModelSpec, strategy: Strategy) -> dict[str, int]:
    """Host RAM of one node by phase; `step` for every moment of training and for evaluation.

    Merging and quantizing hold the 16-bit model in host memory and work layer by layer.
    """
    parts = _host_parts(spec, strategy)
    processes = parts["processes"]
    step = processes + parts["offloaded_weights"] + parts["offloaded_optimizer"]
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
