"""The nodes that a job on Kubernetes is planned for, and the label that keeps it on them."""

from __future__ import annotations

from tightfit.cli.flags.submit import SubmitFlags
from tightfit.cli.network import state_network
from tightfit.cli.terminal.harmless import shorten
from tightfit.core.errors import EnvironmentFaultError, NotFoundError, UsageError, UserError
from tightfit.hardware.kubernetes import build_inventory
from tightfit.hardware.kubernetes_lists import RUNNING
from tightfit.hardware.plannable import plan_over
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Cluster as Hardware
from tightfit.launch.kubernetes.connect import Cluster
from tightfit.launch.kubernetes.placement import find_selector
from tightfit.launch.kubernetes.pod import Document
from tightfit.launch.site import Site
from tightfit.planning.plan import Plan

_NODES = "/api/v1/nodes"
_PODS = "/api/v1/pods"
_EXAMPLE = "--on 'k8s:2n x 4xA100-40GB'"


def find_nodes(flags: SubmitFlags, on: str | None, cluster: Cluster | None) -> Hardware:
    """`k8s`, `k8s:POOL` by what the cluster says; `k8s:4xA100-40GB` by what the words say."""
    said = (flags.on or on or "").partition(":")[2].strip()
    found = _from_words(said) if cluster is None else _from_cluster(said, cluster)
    return state_network(found, flags.network)


def _from_words(said: str) -> Hardware:
    if not said:
        raise UsageError("No cluster is asked, so the nodes have to be named.", remedy=_EXAMPLE)
    return resolve_hardware(said)


def _from_cluster(said: str, cluster: Cluster) -> Hardware:
    try:
        nodes = _list(cluster, _NODES)
    except EnvironmentFaultError as fault:
        if said:
            return _from_words(said)
        raise EnvironmentFaultError(
            fault.problem, remedy=f"say what the nodes have: {_EXAMPLE}"
        ) from fault
    try:
        pods: list[Document] | None = _list(cluster, _PODS, field_selector=RUNNING)
    except EnvironmentFaultError:
        pods = None  # often forbidden to plain users
    try:
        return plan_over(build_inventory(nodes, pods, pool=said or None))
    except NotFoundError as fault:
        try:
            return resolve_hardware(said)
        except UserError:
            raise NotFoundError(
                f"`{shorten(said)}` is neither a node pool nor hardware. {fault.problem}",
                remedy=fault.remedy,
            ) from fault


def _list(cluster: Cluster, path: str, **query: str) -> list[Document]:
    found = cluster.get_path(path, **query) or {}
    return [item for item in found.get("items") or [] if isinstance(item, dict)]


def find_place_label(
    plan: Plan, site: Site, cluster: Cluster | None
) -> tuple[dict[str, str], list[str]]:
    """Labels for the pods, and a note where the plan's GPU cannot be pinned down."""
    gpu = plan.hardware.node.gpu
    if gpu.is_cpu or site.kubernetes.node_selector:
        return {}, []
    found: dict[str, str] | None = None
    if cluster is not None:
        try:
            resource = site.kubernetes.gpu_resource
            nodes = _list(cluster, _NODES)
            found = find_selector(nodes, gpu_name=gpu.name, gpu_resource=resource)
        except EnvironmentFaultError:
            found = None
    if found is not None:
        return found, []
    return {}, [
        f"no node label is known that keeps the pods on {gpu.name}; where the cluster has other "
        "GPUs too, set kubernetes.node_selector in site.yaml"
    ]
