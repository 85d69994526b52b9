"""Several partitions: the best plan of each, what can start now, and what would be cut off."""

from __future__ import annotations

from pathlib import Path

from planning_cases import SHORT_ROWS, make_cluster, make_request

from tightfit.hardware.inventory import plannable_cluster
from tightfit.hardware.slurm import probe_slurm_inventory
from tightfit.hardware.types import Cluster
from tightfit.planning.search import search

RECORDED = Path(__file__).parents[2] / "golden" / "hardware"


def _recorded(partition: str | None = None) -> Cluster:
    def run(arguments: object, _seconds: float) -> str:
        kind = "nodes" if "-o" in arguments else "used"  # type: ignore[operator]
        return (RECORDED / f"slurm_22_05_lab.{kind}.txt").read_text()

    return plannable_cluster(probe_slurm_inventory(partition, run=run))


def test_every_group_has_its_best_plan() -> None:
    result = search(make_request("pythia-160m"), _recorded())
    found = {best.group.name: best for best in result.by_group}
    assert list(found) == ["gpu/2xa100", "gpu/1xv100d32q", "low/2xa100", "low/1xv100d32q"]
    for name, best in found.items():
        assert best.plan is not None
        assert best.plan.hardware.group == name
    first = result.plans[0]
    assert found[first.hardware.group].plan == first


def test_the_same_nodes_under_two_names_are_one_idea() -> None:
    plans = search(make_request("pythia-160m"), _recorded()).plans
    ideas = [
        (plan.hardware.node.gpu.name, plan.strategy.num_nodes, plan.strategy.model_dump_json())
        for plan in plans
    ]
    assert len(set(ideas)) == len(ideas)


def test_what_is_free_decides_what_starts_now() -> None:
    request = make_request("pythia-160m", fixed={"num_nodes": 1, "gpus_per_node": 1})
    starts = {b.group.name: b.can_start_now for b in search(request, _recorded("gpu")).by_group}
    assert starts == {"gpu/2xa100": True, "gpu/1xv100d32q": False}, "one A100 is free, no V100 is"


def test_a_group_where_nothing_fits_is_told_too() -> None:
    cluster = make_cluster((1, "A100-80GB"), (1, "T4"))
    request = make_request("Llama-2-13b", method="lora", fixed={"offload": "none"})
    found = {best.group.name: best.plan for best in search(request, cluster).by_group}
    assert [plan is None for plan in found.values()] == [False, True]


def test_one_group_needs_no_table() -> None:
    assert search(make_request("pythia-160m"), make_cluster((1, "T4"))).by_group == ()


def test_a_run_beyond_the_limit_is_warned_of() -> None:
    cluster = make_cluster((1, "T4"), (2, "T4"))
    short = [group.model_copy(update={"max_seconds": 1.0}) for group in cluster.groups]
    request = make_request("pythia-160m", profile=SHORT_ROWS)
    limited = search(request, cluster.model_copy(update={"groups": tuple(short)}))
    assert all(best.exceeds_limit for best in limited.by_group)
    assert any("stops jobs after 1" in warning for warning in limited.plans[0].warnings)
    free = search(request, cluster)
    assert not any(best.exceeds_limit for best in free.by_group)
    assert not any("stops jobs" in warning for warning in free.plans[0].warnings)
