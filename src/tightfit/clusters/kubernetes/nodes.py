"""The cluster's nodes: what can be planned for, and which label keeps a job on its GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from tightfit.clusters.kubernetes.client import KubernetesApi
from tightfit.clusters.kubernetes.pod import Document
from tightfit.clusters.site import Site
from tightfit.core.errors import NotFoundError, SetupError, UsageError, UserError
from tightfit.core.text import shorten
from tightfit.hardware.catalogue import guess_gpu
from tightfit.hardware.inventory import plannable_cluster
from tightfit.hardware.kubernetes import RUNNING, build_inventory, read_labels
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Cluster
from tightfit.planning.plan import Plan

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


_NODES = "/api/v1/nodes"
_PODS = "/api/v1/pods"
_EXAMPLE = "--on 'k8s:2n x 4xA100-40GB'"


def find_nodes(stated: str, api: KubernetesApi | None) -> Cluster:
    """The nodes that the API server lists; by `stated` a node pool, or hardware in words."""
    if api is None:
        return _resolve(stated)
    try:
        nodes = _list(api, _NODES)
    except SetupError as error:
        if stated:
            return _resolve(stated)
        raise SetupError(error.problem, remedy=f"say what the nodes have: {_EXAMPLE}") from error
    try:
        pods: list[Document] | None = _list(api, _PODS, field_selector=RUNNING)
    except SetupError:
        pods = None  # often forbidden to plain users
    try:
        return plannable_cluster(build_inventory(nodes, pods, pool=stated or None))
    except NotFoundError as error:
        try:
            return resolve_hardware(stated)
        except UserError:
            raise NotFoundError(
                f"`{shorten(stated)}` is neither a node pool nor hardware. {error.problem}",
                remedy=error.remedy,
            ) from error


def _resolve(stated: str) -> Cluster:
    if not stated:
        raise UsageError("No cluster is asked, so the nodes have to be named.", remedy=_EXAMPLE)
    return resolve_hardware(stated)


def _list(api: KubernetesApi, path: str, **query: str) -> list[Document]:
    found = api.get_path(path, **query) or {}
    return [item for item in found.get("items") or [] if isinstance(item, dict)]


def select_plan_nodes(
    plan: Plan, site: Site, api: KubernetesApi | None
) -> tuple[dict[str, str], list[str]]:
    """Labels for the pods, and a note where none keeps them on the plan's GPU."""
    gpu = plan.hardware.node.gpu
    if gpu.is_cpu or site.kubernetes.node_selector:
        return {}, []
    found: dict[str, str] | None = None
    if api is not None:
        with suppress(SetupError):
            found = find_selector(
                _list(api, _NODES), gpu_name=gpu.name, gpu_resource=site.kubernetes.gpu_resource
            )
    if found is not None:
        return found, []
    return {}, [
        f"no node label is known that keeps the pods on {gpu.name}; where the cluster has other "
        "GPUs too, set kubernetes.node_selector in site.yaml"
    ]
