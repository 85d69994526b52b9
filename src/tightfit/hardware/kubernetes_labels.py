"""Which GPU and which pool a Kubernetes node's labels speak of, in each cloud's own words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_PRODUCT_LABELS = (
    "nvidia.com/gpu.product",  # NVIDIA GPU feature discovery
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/model",
    "accelerator",
)
_POOL_LABELS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
    "agentpool",
    "node-pool",
    "pool",
)
_INSTANCE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_INSTANCES = (
    # From the clouds' lists of GPU machine types; general knowledge, 2025.
    (r"g4dn\..*|Standard_NC\d+as_T4_v3", "T4"),
    (r"g5\..*", "A10G"),
    (r"g6\..*|g2-standard-.*", "L4"),
    (r"g6e\..*", "L40S"),
    (r"p3dn\..*|Standard_ND40rs_v2", "V100-SXM2-32GB"),
    (r"p3\..*|Standard_NC\d+r?s_v3", "V100-16GB"),
    (
        r"p4de\..*|a2-ultragpu-.*|Standard_ND96amsr_A100_v4",
        "A100-80GB",
    ),
    (r"Standard_NC\d+ads_A100_v4", "A100-PCIE-80GB"),
    (r"p4d\..*|a2-highgpu-.*|a2-megagpu-.*|Standard_ND96asr_v4", "A100-40GB"),
    (r"p5\..*|a3-(?:high|mega)gpu-.*|Standard_ND96isr_H100_v5", "H100"),
    (r"p5en?\..*|a3-ultragpu-.*|Standard_ND96isr_H200_v5", "H200"),
    (r"p6-b200\..*|a4-highgpu-.*", "B200"),
)
_SHARED = re.compile(r"-SHARED$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelWords:
    """What the labels say, as words for `guess_gpu`."""

    product: str | None
    hints: tuple[str, ...]
    pool: str | None
    replicas: int
    """How many pods share one GPU in turns; 1 where none do."""


def read_labels(labels: Mapping[str, str]) -> LabelWords:
    """Collect what is known about the GPU; the plug-in's own label first."""
    labels = {key: value for key, value in labels.items() if isinstance(value, str)}
    products = [labels[key] for key in _PRODUCT_LABELS if labels.get(key)]
    instance = next((labels[key] for key in _INSTANCE_LABELS if labels.get(key)), "")
    named = [gpu for pattern, gpu in _INSTANCES if re.fullmatch(pattern, instance)]
    words = [_SHARED.sub("", word) for word in (*products, *named[:1])]
    replicas = labels.get("nvidia.com/gpu.replicas", "")
    return LabelWords(
        product=words[0] if words else None,
        hints=(*words[1:], *_memory_hints(labels.get("nvidia.com/gpu.memory", ""))),
        pool=next((labels[key] for key in _POOL_LABELS if labels.get(key)), None),
        replicas=max(1, int(replicas)) if re.fullmatch(r"[0-9]{1,4}", replicas) else 1,
    )


def _memory_hints(mebibytes: str) -> tuple[str, ...]:
    """The label is the driver's total in MiB, some way below the size as sold."""
    if not re.fullmatch(r"[0-9]{4,7}", mebibytes):
        return ()
    whole = -(-int(mebibytes) // 1024)
    return tuple(f"{size}gb" for size in (whole, whole + 1))
