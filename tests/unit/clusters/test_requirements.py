"""What jobs ask for beyond their prediction: one rule for Slurm and Kubernetes."""

from __future__ import annotations

import pytest
from kubernetes_cases import CASES, make_job

from tightfit.clusters.kubernetes.objects import PULL_SECONDS, predict_seconds
from tightfit.clusters.kubernetes.pod import read_resources
from tightfit.clusters.requirements import (
    count_restarts,
    count_slices,
    estimate_memory_request,
    estimate_run_seconds,
)
from tightfit.clusters.slurm.script import find_resources
from tightfit.core.units import GIB
from tightfit.planning.plan import Plan


def on_large_nodes(plan: Plan) -> Plan:
    node = plan.hardware.node.model_copy(update={"host_memory_bytes": 4096 * GIB})
    return plan.model_copy(update={"hardware": plan.hardware.model_copy(update={"node": node})})


@pytest.mark.parametrize("name", sorted(CASES))
def test_both_ask_for_the_same(name: str) -> None:
    plan = on_large_nodes(make_job(name).plan)
    slurm = find_resources(plan, max_seconds=None, asked_seconds=None, warn=120)
    pod = read_resources(plan)
    limit = predict_seconds(plan)

    assert slurm.memory_bytes == pod.memory_bytes
    assert slurm.memory_bytes >= plan.estimate.host.peak_bytes * 1.2 + 2 * GIB
    assert slurm.seconds is not None
    assert limit == slurm.seconds + PULL_SECONDS


def test_memory_is_what_a_node_has_but_never_less_than_predicted() -> None:
    plan = make_job("qlora_7b").plan
    needed = plan.estimate.host.peak_bytes

    assert estimate_memory_request(plan, most_bytes=needed + GIB) == needed + GIB
    assert estimate_memory_request(plan, most_bytes=needed // 2) == needed
    assert estimate_memory_request(plan, most_bytes=None) > needed + 2 * GIB


def test_slices_fit_the_run_and_restarts_are_bounded() -> None:
    run = estimate_run_seconds(make_job("qlora_7b").plan)
    assert run is not None

    assert count_slices(run, limit=None) == count_slices(run, limit=run) == 1
    assert count_slices(None, limit=60) == 1
    assert count_slices(run, limit=run / 2) >= 2
    assert count_slices(run, limit=1800) * 1800 > run
    assert count_slices(run, limit=3600, warn_seconds=600) > count_slices(run, limit=3600)
    assert (count_restarts(1), count_restarts(40)) == (10, 80)
