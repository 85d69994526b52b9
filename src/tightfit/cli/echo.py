"""What a JSON answer repeats of the question: model and hardware as they were understood."""

from __future__ import annotations

from typing import Any

from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.models.spec import ModelSpec


def describe_model(spec: ModelSpec) -> dict[str, Any]:
    """Enough to see which model was meant; `tightfit models NAME --json` has the rest."""
    return {
        "name": spec.name,
        "model_type": spec.model_type,
        "source": spec.source,
        "num_params": spec.num_params,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "warnings": list(spec.warnings),
    }


def describe_group(group: NodeGroup, cluster: Cluster) -> dict[str, Any]:
    """The group that was used, and where it was found."""
    node = group.node
    return {
        "group": group.name,
        "source": cluster.source,
        "gpu": node.gpu.name,
        "gpu_memory_bytes": node.gpu.memory_bytes,
        "compute_capability": node.gpu.compute_capability,
        "num_nodes": group.num_nodes,
        "gpus_per_node": node.num_gpus,
        "host_memory_bytes": node.host_memory_bytes,
        "network_bytes_per_second": cluster.network_bytes_per_second,
        "warnings": list(cluster.warnings),
    }
