"""The cluster's nodes: which label keeps a job on the GPUs that its plan was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tightfit.clusters.kubernetes.pod import Document
from tightfit.hardware.catalogue import guess_gpu
from tightfit.hardware.kubernetes import read_labels

_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/model",
    "accelerator",
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
    "node.kubernetes.io/instance-type",
)
"""Those that name the card first: they hold for nodes that an autoscaler will add too."""


def find_selector(
    nodes: Sequence[Document], *, gpu_name: str, gpu_resource: str
) -> dict[str, str] | None:
    """Labels that all nodes with this GPU have and no others; {} where every GPU node has it.

    None where the nodes cannot be told apart so: the site has to name a label.
    """
    wanted: list[Mapping[str, str]] = []
    others: list[Mapping[str, str]] = []
    for node in nodes:
        labels = _labels_of(node)
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        if str(allocatable.get(gpu_resource, "0")) == "0":
            continue
        words = read_labels(labels)
        guess = guess_gpu(words.product, words.hints)
        is_wanted = guess.gpu is not None and guess.gpu.name == gpu_name
        (wanted if is_wanted else others).append(labels)
    if not wanted:
        return None
    if not others:
        return {}
    for key in _LABELS:
        values = {labels.get(key) for labels in wanted}
        if len(values) == 1 and None not in values:
            (value,) = values
            if value is not None and all(labels.get(key) != value for labels in others):
                return {key: value}
    return None


def _labels_of(node: Document) -> Mapping[str, str]:
    labels = (node.get("metadata") or {}).get("labels") or {}
    return {str(key): str(value) for key, value in labels.items()}
