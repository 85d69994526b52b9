"""The field's well-known six-row ZeRO-3 table: model states only, per offload choice."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.models.spec import ModelSpec

BUFFER_FACTOR = 1.5
"""Head-room DeepSpeed adds to host memory for its pinned staging buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroRow:
    """One line of the table."""

    offload_param: str
    offload_optimizer: str
    zero_init: int
    gpu_bytes: int
    host_bytes: int


def largest_layer_params(spec: ModelSpec) -> int:
    """Parameters of the largest single module, the unit ZeRO-3 gathers.

    A module's own parameters, children left out, as DeepSpeed's live estimator
    takes them; for most models that is the embedding.
    """
    linears = (part for block in spec.blocks for part in block.linears)
    largest_linear = max(
        part.num_params // (part.copies if part.is_module else 1) for part in linears
    )
    return max(spec.embedding_params, spec.lm_head_params, largest_linear)


def estimate_zero_table(
    *, total_params: int, largest_layer_params: int, gpus_per_node: int, num_nodes: int
) -> list[ZeroRow]:
    """Model states of 16-bit training with Adam under ZeRO-3, per GPU and per node.

    18 bytes a parameter: 2 weights, 4 fp32 weights, 8 moments, 4 gradients in
    fp32. Leaves out activations, logits, buckets and the CUDA context; for
    those see `memory.py`. Without `zero_init`, every rank first builds the
    whole fp32 model in host memory.
    Source: deepspeed.runtime.zero.stage3, estimate_zero3_model_states_mem_needs.
    """
    num_gpus = gpus_per_node * num_nodes
    gathered = 4 * largest_layer_params
    whole_models = 4 * gpus_per_node

    def host(bytes_per_param: float, *, zero_init: int) -> int:
        share = bytes_per_param / num_nodes
        per_param = share if zero_init else max(whole_models, share)
        return int(total_params * per_param * BUFFER_FACTOR)

    rows = []
    for param, optimizer, gpu_bytes_per_param, host_bytes_per_param in (
        ("cpu", "cpu", 0, 18),
        ("none", "cpu", 2, 16),
        ("none", "none", 18, 0),
    ):
        for zero_init in (1, 0):
            host_bytes = host(host_bytes_per_param, zero_init=zero_init)
            if not host_bytes:
                host_bytes = int(largest_layer_params * whole_models * BUFFER_FACTOR)
            rows.append(
                ZeroRow(
                    offload_param=param,
                    offload_optimizer=optimizer,
                    zero_init=zero_init,
                    gpu_bytes=gathered + int(gpu_bytes_per_param * total_params / num_gpus),
                    host_bytes=host_bytes,
                )
            )
    return rows
