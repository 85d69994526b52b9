"""`--explain`: the counts add up and the levers are told truly."""

from __future__ import annotations

from planning_cases import make_cluster, make_request

from tightfit.planning.search import explain, list_stages, search


def test_explanation_accounts_for_the_excluded() -> None:
    result = search(make_request(), make_cluster((4, "V100-32GB")))
    told = explain(result)
    assert told.num_considered == result.num_considered
    assert told.num_illegal + told.num_too_big <= told.num_considered
    assert told.num_illegal > 100
    assert {found.rule for found in told.by_memory} <= {"memory", "host-memory"}
    assert told.by_rule
    assert all(found.link for found in told.by_rule)
    assert told.failure is None


def test_standings_compare_with_the_best() -> None:
    told = explain(search(make_request(), make_cluster((1, "A100-80GB"))))
    assert [found.place for found in told.standings] == list(range(1, len(told.standings) + 1))
    assert told.standings[0].slowdown == 1.0
    assert all(found.slowdown > 0.5 for found in told.standings)
    assert all(found.headroom_bytes > 0 for found in told.standings)
    assert "lora bf16, single on 1 GPU" in told.standings[0].summary


def test_failure_is_told_without_plans() -> None:
    told = explain(search(make_request("Llama-2-70b"), make_cluster((1, "T4"))))
    assert told.standings == ()
    assert told.failure is not None


def test_recomputation_is_told_with_its_price() -> None:
    plan = search(make_request(), make_cluster((1, "T4"))).plans[0]
    told = next(line for line in plan.why if line.startswith("recomputing activations"))
    assert "x slower" in told
    assert "without it the job does not fit" in told


def test_stages_keep_the_largest_moment() -> None:
    plan = search(make_request(), make_cluster((1, "A100-80GB"))).plans[0]
    stages = list_stages(plan.estimate)
    moments = {phase.name: phase.peak_reserved_bytes for phase in plan.estimate.phases}
    assert stages["backward"] == max(moments["backward"], moments["backward_end"])
    assert "inference" not in stages
