"""Kubernetes: nodes, labels and pods in the API's shape, and its errors."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.errors import NotFoundError, SetupError, UserError
from tightfit.hardware.inventory import NodeState, plannable_cluster
from tightfit.hardware.kubernetes import (
    build_inventory,
    parse_quantity,
    probe_kubernetes_inventory,
)
from tightfit.hardware.types import Cluster, NodeGroup

GOLDEN = Path(__file__).parents[2] / "golden" / "hardware"


def _recorded(*, may_list_pods: bool = True) -> Callable[[Sequence[str], float], str]:
    def run(arguments: Sequence[str], timeout_seconds: float) -> str:
        assert 0 < timeout_seconds <= 60
        what = arguments[2]
        if what == "pods" and not may_list_pods:
            raise SetupError("pods is forbidden", remedy="ask")
        return (GOLDEN / f"kubernetes_{what}.json").read_text()

    return run


def _groups(cluster: Cluster) -> dict[str, NodeGroup]:
    return {group.name: group for group in cluster.groups}


def _probe(pool: str | None = None, *, may_list_pods: bool = True) -> Cluster:
    run = _recorded(may_list_pods=may_list_pods)
    return plannable_cluster(probe_kubernetes_inventory(pool, run=run))


def test_a_cluster_of_many_kinds() -> None:
    groups = _groups(_probe())
    seen = {
        name: (group.node.gpu.name, group.node.num_gpus, group.num_nodes, group.num_free_gpus)
        for name, group in groups.items()
    }
    assert seen == {
        "t4-pool": ("Tesla T4", 2, 2, 2),
        "volta/4xTesla V100-SXM2-32GB": ("Tesla V100-SXM2-32GB", 4, 1, 2),
        "volta/3xTesla V100-SXM2-32GB": ("Tesla V100-SXM2-32GB", 3, 1, 1),
        "1xA100-SXM4-40GB MIG 1g.5gb": ("A100-SXM4-40GB MIG 1g.5gb", 1, 1, 4),
        "1xA10G": ("A10G", 1, 1, 1),
        "big": ("A100-SXM4-40GB", 8, 1, 8),
    }
    t4 = groups["t4-pool"].node
    assert t4.host_memory_bytes == 26_613_436 * 1024
    assert t4.num_cores == 7
    assert t4.disk_bytes == 47_093_746_742


def test_what_is_left_out_or_unusual_is_said() -> None:
    warnings = "\n".join(_probe().warnings)
    assert "volta-3 (drained: it is cordoned)" in warnings
    assert "volta-4 (down: it is not ready" in warnings
    assert "taint team" in warnings
    assert "nvidia.com/gpu" not in warnings, "that taint is customary"
    assert "4 pods share each GPU" in warnings
    assert "1 node without GPUs not planned for: cpu-1" in warnings


def test_every_node_is_in_the_inventory() -> None:
    inventory = probe_kubernetes_inventory(run=_recorded())
    seen = {node.name: node for node in inventory.nodes}
    assert seen["volta-3"].state is NodeState.DRAINED
    assert seen["volta-4"].state is NodeState.DOWN
    assert seen["volta-4"].num_free_gpus == 0
    assert seen["cpu-1"].kind == "CPU"
    assert seen["cpu-1"].num_cores
    for node in seen.values():
        assert node.num_free_cores is not None
        assert node.num_free_cores <= (node.num_cores or 0)


def _cpu_node(name: str, *, taints: object = None) -> dict[str, object]:
    return {
        "metadata": {"name": name, "labels": {"pool": "plain"}},
        "spec": {"taints": taints},
        "status": {"allocatable": {"cpu": "15890m", "memory": "64Gi"}},
    }


def test_nodes_without_gpus_are_planned_as_cpus_where_there_is_nothing_else() -> None:
    control = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    nodes = [_cpu_node("a"), _cpu_node("b"), _cpu_node("head", taints=[control])]
    container = {"resources": {"requests": {"cpu": "12", "memory": "1Gi"}}}
    sidecar = {"restartPolicy": "Always", "resources": {"requests": {"cpu": "1500m"}}}
    spec = {"nodeName": "b", "containers": [container], "initContainers": [sidecar]}
    inventory = build_inventory(nodes, [{"spec": spec, "status": {"phase": "Running"}}])
    assert [node.num_free_cores for node in inventory.nodes] == [15, 2, 15]
    cluster = plannable_cluster(inventory)
    (group,) = cluster.groups
    assert (group.name, group.num_nodes, group.num_free_nodes) == ("plain", 2, 1)
    assert group.node.gpu.is_cpu
    assert group.node.num_cores == 15
    assert any("head (drained: it is kept for the control" in note for note in cluster.warnings)


def test_a_pool_by_its_name() -> None:
    assert _probe("t4-pool").num_gpus == 4
    with pytest.raises(NotFoundError, match="t4-pool"):
        _probe("t4-pol")


def test_without_the_right_to_list_pods_free_is_unknown() -> None:
    cluster = _probe(may_list_pods=False)
    assert all(group.num_free_gpus is None for group in cluster.groups)
    assert any("not known what is free" in warning for warning in cluster.warnings)


def test_nodes_that_tell_nothing_are_an_error() -> None:
    with pytest.raises(SetupError) as caught:
        plannable_cluster(build_inventory([{"metadata": {"name": "cpu-1"}, "status": {}}], []))
    assert "cpu-1: the cluster states no cores" in caught.value.problem
    assert "--on k8s --each" in caught.value.remedy


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", "null", '{"items": 3}', "[" * 99999])
def test_output_of_another_shape_is_an_error(text: str) -> None:
    with pytest.raises(SetupError):
        probe_kubernetes_inventory(run=lambda _arguments, _seconds: text)


def test_missing_and_hanging_commands_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SetupError, match="No Kubernetes cluster is configured"):
        probe_kubernetes_inventory()
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(SetupError, match="Neither is the Python client"):
        probe_kubernetes_inventory()
    script = tmp_path / "kubectl"
    script.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    script.chmod(0o755)
    monkeypatch.setattr("tightfit.hardware.kubernetes.TIMEOUT_SECONDS", 0.2)
    with pytest.raises(SetupError, match="no answer"):
        probe_kubernetes_inventory()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4", 4),
        ("31850m", 31.85),
        ("64Gi", 64 * 2**30),
        ("1171131328Ki", 1171131328 * 1024),
        ("2G", 2e9),
        ("1e3", 1000),
        ("12E", 12e18),
        ("", 0),
        (None, 0),
        ("-4", 0),
        ("lots", 0),
    ],
)
def test_quantities(text: object, number: float) -> None:
    assert parse_quantity(text) == pytest.approx(number)


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
_LABELS = st.dictionaries(
    st.sampled_from(["nvidia.com/gpu.product", "nvidia.com/gpu.memory", "nvidia.com/gpu.replicas"]),
    st.one_of(_JSON, st.sampled_from(["Tesla-T4", "4", "16384", "0"])),
)
_RESOURCES = st.dictionaries(
    st.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "memory", "cpu"]),
    st.one_of(_JSON, st.sampled_from(["2", "8Gi"])),
)
_NODES = st.lists(
    st.fixed_dictionaries(
        {
            "status": st.fixed_dictionaries(
                {"allocatable": st.one_of(_RESOURCES, _JSON), "conditions": _JSON}
            ),
            "metadata": st.fixed_dictionaries({"name": _JSON, "labels": st.one_of(_LABELS, _JSON)}),
            "spec": st.one_of(_JSON, st.fixed_dictionaries({"taints": _JSON})),
        },
    ),
    max_size=3,
)
_PODS = st.lists(
    st.fixed_dictionaries(
        {
            "spec": st.fixed_dictionaries(
                {
                    "nodeName": _JSON,
                    "containers": st.one_of(
                        _JSON,
                        st.lists(
                            st.fixed_dictionaries(
                                {
                                    "resources": st.fixed_dictionaries(
                                        {"limits": st.one_of(_JSON, _RESOURCES)}
                                    )
                                }
                            )
                        ),
                    ),
                }
            ),
            "status": _JSON,
        }
    ),
    max_size=3,
)


@given(_NODES, _PODS)
def test_any_objects_give_a_cluster_or_one_error(nodes: object, pods: object) -> None:
    def run(arguments: Sequence[str], _seconds: float) -> str:
        return json.dumps({"items": nodes if arguments[2] == "nodes" else pods})

    with contextlib.suppress(UserError):
        probe_kubernetes_inventory(run=run)
